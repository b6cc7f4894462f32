"""Tasks of the training experiments, by name."""

from collections.abc import Callable
from pathlib import Path

from experiments.tasks.listops import listops
from experiments.tasks.mqar import mqar
from experiments.tasks.needle import needle
from experiments.tasks.pathfinder import pathfinder
from experiments.tasks.pictures import cifar10, cifar10_sequence
from experiments.tasks.reviews import imdb_bytes
from experiments.tasks.task import Task
from experiments.tasks.text import byte_text, token_text
from experiments.training.config import TrainingConfig

TEXTS: dict[str, Callable[..., Task]] = {"bytes": byte_text, "tokens": token_text, "needle": needle}
"""Tasks on the text file of the configuration."""
FOLDERS: dict[str, tuple[str, Callable[..., Task]]] = {
    "cifar10": ("cifar10", cifar10),
    "cifar10-sequence": ("cifar10", cifar10_sequence),
    "imdb-bytes": ("imdb", imdb_bytes),
}
"""Tasks on files, with the folder that holds them."""
GENERATED: dict[str, Callable[..., Task]] = {"mqar": mqar, "listops": listops, "pathfinder": pathfinder}
SIZED = {"bytes", "tokens", "needle", "imdb-bytes", "mqar", "listops"}
"""Tasks whose sequences have the length of the configuration."""


def load_task(config: TrainingConfig, data: Path) -> Task:
    """Return the task of a configuration.

    The draws of a task depend on its own seed alone, so that runs of all seeds have the same data.
    """
    options = dict(config.task_options) | ({"length": config.tokens} if config.task in SIZED else {})
    if config.task in TEXTS:
        return TEXTS[config.task](data / config.text, **options)
    if config.task in FOLDERS:
        folder, function = FOLDERS[config.task]
        return function(data / folder, **options)
    return GENERATED[config.task](**options)
