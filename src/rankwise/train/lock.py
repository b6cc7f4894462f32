"""One process at a time trains into a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rankwise._internals.files import writable_folder
from rankwise.errors import TrainingError

LOCK = ".lock"


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system frees it when the process ends, killed or not.

    The empty file stays: to remove it would let two processes lock files of the same name.

    Args:
        out: folder of the run, made if it is not there.

    Raises:
        TrainingError: if another process holds it.
        InputError: if the folder cannot be written to.
    """
    writable_folder(out)
    lock = FileLock(out / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise TrainingError(
            f"--out {out}",
            expected="a folder that no other process trains into",
            got="one in which a run is going on",
            fix="Wait until it has ended, or choose another --out.",
        ) from error
    try:
        yield
    finally:
        lock.release()
