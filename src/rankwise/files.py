"""Files are written whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from rankwise.errors import InputError


def write_whole(path: Path, text: str, subject: str) -> Path:
    """Write a text file under another name beside its place, then rename it.

    Whoever reads the path meets the old file or the new one, never half of either; a full disk leaves the
    old one as it was.

    Args:
        path: the file to write; missing folders are made.
        text: its content.
        subject: what an error calls it.

    Raises:
        InputError: if the file cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder) / "a" / "b.txt", "hello", "file").read_text()
        'hello'
    """
    if path.exists() and not path.is_file():
        raise InputError(
            f"{subject} {path}",
            wanted="a file, or a name that is free",
            got="a folder or a device",
            fix="Choose another name.",
        )
    path = path.resolve()  # a link is followed, not replaced
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise InputError(
            f"{subject} {path}",
            wanted="a file that can be written",
            got=error.strerror or str(error),
            fix=f"Choose a folder you may write to and that has room, or make {path.parent} writable.",
        ) from error
    return path
