"""What the benchmarks share: the clock, medians, peak memory, what the machine is."""

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

Answer = TypeVar("Answer")


def timed(run: Callable[[], Answer], device: torch.device) -> tuple[float, Answer]:
    """Seconds and answer; on a GPU until it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    answer = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, answer


def taken(run: Callable[[], object], device: torch.device) -> float:
    """CPU seconds of the process, or seconds until a GPU is done."""
    if device.type == "cuda":
        return timed(run, device)[0]
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """MiB needed beyond what is there before; None where the system does not tell.

    On a CPU it is the kernel's high-water mark: use a fresh process, in which little was freed
    that could be used again without a trace.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what is free goes back to the system
    reset.write_text("5")  # the mark starts anew
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) / 1024


def median(numbers: list[float]) -> list[float]:
    """The median, and the two numbers that hold it between them in 95 % of samples, whatever is sampled."""
    ordered, count = sorted(numbers), len(numbers)
    outside = max(int((count - 1.96 * count**0.5) / 2), 1)  # numbers below the median are tosses of a coin
    return [statistics.median(ordered), ordered[outside - 1], ordered[-outside]]


def percent(share: list[float]) -> str:
    return "{:+.2f} % ({:+.2f} … {:+.2f})".format(*(100 * one for one in share))


def machine(device: torch.device) -> dict[str, object]:
    """What a time means nothing without."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _kib(field: str) -> int:
    return next(int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith(field))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
