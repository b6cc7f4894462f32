"""Memory of a call at its peak, and memory that stays in the process while calls are timed."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

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


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes needed beyond what was there before; None where the system does not tell.

    Args:
        run: the call.
        device: where it runs.

    Returns:
        Bytes.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
    reset.write_text("5")  # the high-water mark starts anew
    before = status_kib("VmRSS")
    run()
    return 1024 * (status_kib("VmHWM") - before)


def fresh_peak(job: dict[str, object]) -> int | None:
    """Peak bytes of one job in a process of its own.

    Args:
        job: what `rankwise.ops.tssa.bench.run` takes as its only argument, as JSON.

    Returns:
        Bytes.
    """
    command = [sys.executable, "-m", "rankwise.ops.tssa.bench.peak", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return None if found is None else int(found)


def status_kib(field: str) -> int:
    """A size that Linux tells of this process.

    Args:
        field: such as "VmRSS", what lies in memory now, or "VmHWM", the most so far.

    Returns:
        KiB.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
