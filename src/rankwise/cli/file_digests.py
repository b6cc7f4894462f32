"""Digests of the local files that a job reads: whether they have changed since."""

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

WHOLE = 1 << 26
"""Bytes up to which a file is read whole; of a larger file as much is read, in pieces evenly spaced."""
PIECE = 1 << 16


def source_digests(paths: Mapping[str, str | Path | None], flat: Collection[str] = ()) -> dict[str, str]:
    """A digest of each path that is there: of a file, or of all files in a folder and below.

    Hidden files and folders are left out. Of a file over 64 MiB as much is read, in pieces evenly spaced: a
    training changes all of its weights.

    Args:
        paths: by what they are for.
        flat: of which of them folders below are left out, such as one of results in a model's folder.

    Returns:
        Hexadecimal digits; of what is no local path, such as a name on the Hub, nothing.
    """
    there = {name: Path(path) for name, path in paths.items() if path and Path(path).exists()}
    return {name: _digest_of(path, "*" if name in flat else "**/*") for name, path in there.items()}


def _digest_of(path: Path, which: str) -> str:
    files = [path] if path.is_file() else sorted(file for file in path.glob(which) if _counts(file, path))
    found = hashlib.sha256()
    for file in files:
        about = file.stat()
        name = "" if file == path else file.relative_to(path).as_posix()
        found.update(f"{name} {_digest(file, about.st_size, about.st_mtime_ns)}".encode())
    return found.hexdigest()[:16]


def _counts(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden


@lru_cache(maxsize=4096)
def _digest(file: Path, size: int, changed: int) -> str:
    found = hashlib.sha256(str(size).encode())
    pieces = range(0, size, PIECE) if size <= WHOLE else range(0, size, size * PIECE // WHOLE)
    with file.open("rb") as content:
        for at in pieces:
            content.seek(at)
            found.update(content.read(PIECE))
    return found.hexdigest()
