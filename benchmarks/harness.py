"""Time runs in turns, compare them, measure peak memory in a fresh process, and describe the machine."""

import ctypes
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

MIN_READING = 0.001
"""Seconds that one reading lasts at least; shorter calls are repeated within it."""


class Ratio(NamedTuple):
    """Median of the ratios within a round, and the order statistics that hold it in 95 % of samples."""

    median: float
    low: float
    high: float

    def percent(self) -> str:
        """Format the ratio in percent."""
        return "{:+.2f} % ({:+.2f} to {:+.2f})".format(*(100 * one for one in self))


def race(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    clock: Callable[[], float] = time.process_time,
    budget: float = math.inf,
) -> dict[str, list[float]]:
    """Return the seconds of every run in every round; each round runs all and begins with another one.

    Before each timed call comes an untimed one, so that no run pays for the memory of the previous run. A run
    that has used up its budget of seconds takes no part in later rounds.

    Args:
        clock: on a CPU, CPU seconds of the process (other programs count less) or `time.perf_counter`, which
            threads require. On a GPU it is always the latter, after the device has finished.
    """
    if device.type != "cpu":
        clock = time.perf_counter

    def read(run: Callable[[], object], calls: int = 1) -> float:
        finish(device)
        start = clock()
        for _ in range(calls):
            run()
        finish(device)
        return (clock() - start) / calls

    names = list(runs)
    for run in runs.values():
        run()  # load libraries, compile
    calls = {name: math.ceil(MIN_READING / max(read(run), 1e-6)) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if not seconds[name] or 2 * calls[name] * sum(seconds[name]) < budget:
                runs[name]()
                seconds[name].append(read(runs[name], calls[name]))
    return seconds


def ratio(times: Sequence[float], base: Sequence[float]) -> Ratio:
    """Compare two runs within their rounds: other work on the machine hits whole rounds."""
    ratios = sorted(one / unit for one, unit in zip(times, base, strict=False))  # budgets end rounds early
    count = len(ratios)
    outside = max(int((count - 1.96 * count**0.5) / 2), 1)  # numbers below the median are tosses of a coin
    return Ratio(statistics.median(ratios), ratios[outside - 1], ratios[-outside])


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the MiB that a call needs beyond what was held before; None if the system does not say.

    On a CPU it is the high-water mark of the kernel: call it in a fresh process, which has freed little
    memory that the run could use again without a trace.
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
        trim(0)  # return free memory to the system
    reset.write_text("5")  # reset the high-water mark
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) / 1024


def in_fresh_process(module: str, path: Sequence[Path] = (), **job: Any) -> Any:
    """Return what `peak(**job)` of a benchmark returns in a new Python, which frees memory as usual.

    ``path`` are folders where Python searches first.
    """
    call = f"from benchmarks.{module} import peak; print(json.dumps(peak(**json.loads(sys.argv[1]))))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    first = os.pathsep.join([*map(str, path), environment.get("PYTHONPATH", "")])
    environment["PYTHONPATH"] = first
    command = [sys.executable, "-W", "ignore", "-c", f"import json, sys; {call}", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a time depends on: the machine and the versions."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": [round(one, 2) for one in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device}, {platform.machine()}",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def positive(text: str) -> int:
    """Read a whole number above 0 from a command line."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def finish(device: torch.device) -> None:
    """Wait until a device has done all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _kib(field: str) -> int:
    return next(int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith(field))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
