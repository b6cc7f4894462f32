"""Atomic writing of files: readers find either the old content or the complete new content."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankwise.errors import InputError


def parse_json(text: str) -> Any:
    """Return the content of JSON text; raise ValueError if it is invalid, nested too deeply or not Unicode.

    Examples:
        >>> parse_json('{"layers": [1, null]}')
        {'layers': [1, None]}
    """
    try:
        content = json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()  # raises for half a surrogate pair, invalid in UTF-8
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    return content


def writable_folder(folder: Path, option: str = "--out") -> None:
    """Create a folder; raise InputError if it is not writable, before any time is spent on results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(f"{option} {folder}", folder, error, "Choose a folder you may write to.") from error


def folder_name(name: str) -> str:
    """Convert the name of a model or checkpoint to a valid name of a folder.

    Examples:
        >>> folder_name("org/model"), folder_name("../x"), folder_name("net.py:build"), folder_name("")
        ('org-model', 'x', 'net.py-build', 'model')
    """
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return kept.strip(".-")[:100] or "model"


def check_unused(folder: Path, option: str = "--out", fix: str = "Choose another name.") -> None:
    """Raise InputError if a path is a file, or a folder that contains files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = "a folder with files" if folder.is_dir() else "a file"
        raise InputError(f"{option} {folder}", expected="a new or empty folder", got=got, fix=fix)


def set_default_mode(file: Path) -> None:
    """Set the mode of a new file by the umask: safetensors writes files that only their owner can read."""
    umask = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def write_file(
    path: str | Path, content: str | Callable[[Path], object], subject: str, in_folder: str = ""
) -> Path:
    """Write a file under a temporary name, then rename it; return its path.

    Readers find either the old or the complete new file. After a full disk or Ctrl-C the old file remains.
    Missing folders are created. ``content`` is text, or a function that writes the file to the path that it
    gets as argument; ``in_folder`` names the file if ``path`` is an existing folder.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(Path(folder) / "a" / "b.txt", "hello", "file").read_text()
        'hello'
    """
    path = Path(path)
    path = path / in_folder if in_folder and path.is_dir() else path
    if path.exists() and not path.is_file():
        raise InputError(
            f"{subject} {path}",
            expected="a file, or an unused name",
            got="a folder or a device",
            fix="Choose another name.",
        )
    path = path.resolve()  # so that a symbolic link remains a link, and its target is written
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
        else:
            content(partial)
            set_default_mode(partial)
        partial.replace(path)
    except OSError as error:
        fix = f"Choose a folder you may write to and that has room, or make {path.parent} writable."
        raise _unwritable(f"{subject} {path}", path, error, fix, "file") from error
    finally:  # Ctrl-C must not leave the temporary file behind
        with suppress(OSError):
            partial.unlink()
    return path


def write_files(folder: Path, write: Callable[[Path], object], subject: str) -> list[Path]:
    """Write several files into a folder, all or none; return their paths. Other files in it are kept.

    ``write`` writes them to a hidden folder, its argument; they are then moved into ``folder``, which is
    created if it is missing. After an error or Ctrl-C the old files are restored.
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
                    if (new / name).is_file():
                        set_default_mode(new / name)
                    if (folder / name).exists():
                        (folder / name).replace(old / name)
                    (new / name).replace(folder / name)
            except BaseException:  # includes KeyboardInterrupt, which is not an Exception
                for name in names:
                    if (old / name).exists():
                        (old / name).replace(folder / name)
                    elif not (new / name).exists():  # it was moved already, and there was no old file
                        (folder / name).unlink(missing_ok=True)
                raise
    except OSError as error:
        fix = "Choose a folder you may write to and that has room."
        raise _unwritable(f"{subject} {folder}", folder, error, fix) from error
    return [folder / name for name in names]


def _unwritable(subject: str, path: Path, error: OSError, fix: str, kind: str = "folder") -> InputError:
    got = "a file" if kind == "folder" and path.is_file() else error.strerror or str(error)
    return InputError(subject, expected=f"a {kind} that can be written", got=got, fix=fix)
