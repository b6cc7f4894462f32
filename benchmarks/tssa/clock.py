"""Times taken in turns, so that whatever else the machine does hits every contender."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from benchmarks.tssa.memory import kept

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
    runs: dict[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    budget: float = 60.0,
    keep: bool = True,
) -> dict[str, list[float]]:
    """Seconds of every run, in rounds: each round runs all, beginning with another one.

    Each run has one call before the one that is timed: nobody pays for what the one before has left behind.
    A run that took longer than its share of the budget takes part in fewer rounds.

    Args:
        runs: by name.
        device: where they run.
        repeats: rounds.
        budget: seconds for one run in all its rounds.
        keep: whether memory is `kept` meanwhile; otherwise each run pays for what the C library fetches anew.

    Returns:
        Readings by name.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with kept() if keep else nullcontext():
        for name in names:
            once(runs[name], device)  # compiled
        calls = {name: math.ceil(ENOUGH / max(once(run, device), 1e-6)) for name, run in runs.items()}
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if 2 * calls[name] * sum(seconds[name]) < budget or not seconds[name]:
                    once(runs[name], device)
                    seconds[name].append(once(runs[name], device, calls[name]))
    return seconds
