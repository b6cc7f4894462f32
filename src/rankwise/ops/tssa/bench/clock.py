"""Times taken in turns, so that whatever else the machine does hits every contender; and peak memory."""

import ctypes
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ENOUGH = 0.001
"""Seconds that one reading lasts at least: shorter calls are repeated within it."""


def once(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds of one call, the mean of several in a row; on a GPU until they are done.

    Args:
        run: the call.
        device: where it runs.
        calls: in a row.

    Returns:
        Seconds.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def race(
    runs: dict[str, Callable[[], object]], device: torch.device, repeats: int, budget: float = 60.0
) -> dict[str, float]:
    """Median seconds of every run, in rounds: each round runs all, beginning with another one.

    Each has one call before the one that is timed: otherwise it would pay for the memory that the one before
    left behind, which the C library returns to the system when somebody frees something, and that can take
    longer than the call. A run that took longer than its share of the budget takes part in fewer rounds.

    Args:
        runs: by name.
        device: where they run.
        repeats: rounds.
        budget: seconds for one run in all its rounds.

    Returns:
        Medians by name.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        once(runs[name], device)  # compiled
    calls = {name: math.ceil(ENOUGH / max(once(run, device), 1e-6)) for name, run in runs.items()}
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if 2 * calls[name] * sum(seconds[name]) < budget or not seconds[name]:
                once(runs[name], device)
                seconds[name].append(once(runs[name], device, calls[name]))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


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
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    reset.write_text("5")  # the high-water mark starts anew
    before = _kib("VmRSS")
    run()
    return 1024 * (_kib("VmHWM") - before)


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


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
