"""A run of a second: bytes of a small text, one layer of width 16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.tasks import load_task
from experiments.tasks.task import Task
from experiments.training.config import TrainingConfig

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 40
TINY = TrainingConfig(
    model="transformer",
    width=16,
    layers=1,
    heads=2,
    task="bytes",
    text="text.txt",
    tokens=16,
    batch=2,
    steps=6,
    warmup=2,
    log_every=2,
    evaluate_every=3,
    evaluate_on=6,
)


def tiny(folder: Path, **changes: Any) -> tuple[TrainingConfig, Task]:
    """Return a configuration and its task; the folder holds the data."""
    (folder / "text.txt").write_text(TEXT)
    config = replace(TINY, **changes)
    return config, load_task(config, folder)
