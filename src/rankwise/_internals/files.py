"""Files are written whole or not at all, and JSON is read only where Python can hold it."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankwise.errors import InputError

DEEPEST = 100
"""Levels of lists and objects that JSON may have: ours has six, and deeper ones exhaust Python's stack."""


def parse_json(text: str) -> Any:
    """Read JSON, whatever its author meant it to do.

    Args:
        text: the JSON.

    Raises:
        ValueError: if it is no JSON, is nested deeper than 100 levels, or holds what Python cannot:
            numbers of thousands of digits, half a surrogate pair.

    Examples:
        >>> parse_json('{"layers": [1, null]}')
        {'layers': [1, None]}
        >>> parse_json("[" * 1000 + "]" * 1000)
        Traceback (most recent call last):
        ...
        ValueError: lists or objects nested deeper than 100 levels
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"lists or objects nested deeper than {DEEPEST} levels") from None
    level = [content]
    for _ in range(DEEPEST + 1):
        lists = [item.values() if isinstance(item, dict) else item for item in level if _is_nested(item)]
        level = [item for items in lists for item in items]
    if lists:
        raise ValueError(f"lists or objects nested deeper than {DEEPEST} levels")
    json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no text
    return content


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def writable_folder(folder: Path, option: str = "--out") -> None:
    """Make a folder and see that it can be written to, before anything is computed.

    Args:
        folder: the folder.
        option: that names it.

    Raises:
        InputError: if it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{option} {folder}",
            expected="a folder that can be written",
            got=error.strerror or str(error),
            fix="Choose a folder you may write to.",
        ) from error


def write_file(path: Path, content: str | Callable[[Path], object], subject: str) -> Path:
    """Write a file under another name beside its place, then rename it.

    A program that opens the path finds the old file or the new one, never half of either; a full disk, or
    Ctrl-C, leaves the old one as it was.

    Args:
        path: the file to write; missing folders are made.
        content: its text, or what writes it into the path that it is given.
        subject: what an error calls it.

    Raises:
        InputError: if the file cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(Path(folder) / "a" / "b.txt", "hello", "file").read_text()
        'hello'
    """
    if path.exists() and not path.is_file():
        raise InputError(
            f"{subject} {path}",
            expected="a file, or a name that is free",
            got="a folder or a device",
            fix="Choose another name.",
        )
    path = path.resolve()  # a link is followed, not replaced
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
        else:
            content(partial)
        partial.replace(path)
    except OSError as error:
        raise InputError(
            f"{subject} {path}",
            expected="a file that can be written",
            got=error.strerror or str(error),
            fix=f"Choose a folder you may write to and that has room, or make {path.parent} writable.",
        ) from error
    finally:  # also where Ctrl-C came in between
        with suppress(OSError):
            partial.unlink()
    return path


def write_files(folder: Path, write: Callable[[Path], object], subject: str) -> list[Path]:
    """Write files of one folder that belong together: all are replaced, or none.

    They are written into a hidden folder inside it, then renamed; an error or Ctrl-C in between puts back
    what was there. Other files of the folder stay.

    Args:
        folder: where to; made if it is not there.
        write: writes them into the folder that it is given.
        subject: what an error calls it.

    Returns:
        The files written.

    Raises:
        InputError: if the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".rankwise-") as partial:
            new, old = Path(partial, "new"), Path(partial, "old")
            new.mkdir()
            old.mkdir()
            write(new)
            names = sorted(file.name for file in new.iterdir())
            try:
                for name in names:
                    (new / name).chmod(0o644)  # some libraries write for the owner alone
                    if (folder / name).exists():
                        (folder / name).replace(old / name)
                    (new / name).replace(folder / name)
            except BaseException:  # Ctrl-C too
                _put_back(folder, names, new, old)
                raise
    except OSError as error:
        raise InputError(
            f"{subject} {folder}",
            expected="a folder that can be written",
            got=error.strerror or str(error),
            fix="Choose a folder you may write to and that has room.",
        ) from error
    return [folder / name for name in names]


def _put_back(folder: Path, names: list[str], new: Path, old: Path) -> None:
    for name in names:
        if (old / name).exists():
            (old / name).replace(folder / name)
        elif not (new / name).exists():  # it was renamed, and there was none before
            (folder / name).unlink(missing_ok=True)
