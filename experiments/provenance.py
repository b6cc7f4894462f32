"""Origin of a result: versions, commit, machine."""

import os
import platform
import resource
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import rankwise


def provenance(command: str, commit: str | None) -> dict[str, Any]:
    """Return the origin of a run; `commit` is read when the run begins, because files may change later."""
    return {
        "rankwise": rankwise.__version__,
        "commit": commit,
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": hardware(),
    }


def commit() -> str | None:
    """Return the commit of the source, with `+` if files differ from it; None outside a checkout."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "src", "experiments/*.py")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return name + ("+" if changed else "")


def _git(*words: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """Return the processor, cores, threads in use, and the accelerator."""
    found = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def peak_memory() -> int:
    """Return the peak memory in bytes: of the accelerator if one was used, else of the process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    unit = 1 if platform.system() == "Darwin" else 1024  # macOS reports bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
