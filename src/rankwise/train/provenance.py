"""Where a result comes from: version, command, machine."""

import json
import os
import platform
import resource
import shlex
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import rankwise
from rankwise.train.overrides import changes
from rankwise.train.recipes import RECIPES
from rankwise.train.settings import Recipe


def provenance(recipe: Recipe, source: str | None) -> dict[str, Any]:
    """What made a result; paths are told by their last part alone.

    Args:
        recipe: the configuration.
        source: `commit` when the training began: files of the source may change while it runs.
    """
    known = RECIPES.get(recipe.name)
    return {
        "rankwise": rankwise.__version__,
        "commit": source,
        "command": None if known is None else command(recipe.name, changes(recipe, known)),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": recipe.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": hardware(),
    }


def command(name: str, given: Mapping[str, Any]) -> str:
    """The command that starts the run again.

    Args:
        name: of the recipe.
        given: the pairs it was made with.

    Examples:
        >>> command("language", {"model": "tost", "task.path": "/home/me/data/input.txt"})
        'rankwise train language model=tost task.path=input.txt'
    """
    pairs = (f"{key}={_word(shown(key, value))}" for key, value in given.items())
    return shlex.join(["rankwise", "train", name, *pairs])


def shown(key: str, value: Any) -> Any:
    """A value as a record tells it: of a path, and of the folder of a tokenizer, the last part alone.

    Args:
        key: of the configuration.
        value: of that key.

    Examples:
        >>> shown("task.path", "/home/me/data/input.txt")
        'input.txt'
    """
    last = key.rpartition(".")[2]
    local = last == "path" or (last == "tokenizer" and Path(str(value)).is_dir())
    return Path(str(value)).name if local and value is not None else value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def commit() -> str | None:
    """The commit of the source that runs, with ``+`` where files differ; None outside a checkout."""
    folder = Path(rankwise.__file__).parent
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return name + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """Processor, cores, threads that are used, and the accelerator."""
    found = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
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
    """Bytes: of the accelerator where one was used, else of the process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    kilobytes = 1 if platform.system() == "Darwin" else 1024  # macOS tells bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
