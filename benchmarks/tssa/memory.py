"""Memory of a call in a process of its own, and memory that stays in the process while calls are timed."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRIM, MMAP = -1, -3
"""What glibc's mallopt calls the bytes above which free memory goes back, and above which it comes anew."""
NEVER = -1
MOST = (2**31 - 1, 32 << 20)
"""What the second is set to, or what older releases grant at most."""
ADAPTED = (64 << 20, 32 << 20)
"""Where glibc itself arrives at most in a process that frees large arrays."""


@contextmanager
def kept() -> Iterator[int]:
    """Let the C library keep memory that is freed: of tensors up to as many bytes as come, 0 where it cannot.

    By default glibc returns large pieces to the system at moments of its own choice and fetches them again
    page by page. At 25 MB that takes up to ten times as long as TSSA, and hits whoever is running. Here
    nobody pays for it, which helps most those who make many temporary tensors. Behind it free memory goes
    back, and glibc's limits are those it adapts to by itself, whatever they were before.
    """
    library = _glibc()
    if library is None:
        yield 0
        return
    most = next((size for size in MOST if library.mallopt(MMAP, size)), 0)
    library.mallopt(TRIM, NEVER)
    try:
        yield most
    finally:
        for name, size in zip((TRIM, MMAP), ADAPTED, strict=True):
            library.mallopt(name, size)
        library.malloc_trim(0)


def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def fresh_peak(job: dict[str, object]) -> float | None:
    """Peak MiB of one job of `peak`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tssa.peak", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
