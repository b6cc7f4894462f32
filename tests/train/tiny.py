"""A run of a second: bytes of a small text, one layer of width 16."""

from pathlib import Path
from typing import Any

from rankwise.train import Recipe, recipe

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 40
TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "parameters": None,
    "feed_forward": 16,
    "tokens": 16,
    "batch": 2,
    "steps": 6,
    "warmup": 2,
    "log_every": 2,
    "evaluation.every": 3,
    "evaluation.examples": 6,
    "device": "cpu",
}


def text_in(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT)
    return path


def tiny(folder: Path, **changes: Any) -> Recipe:
    return recipe("language", **{**TINY, "task.path": str(text_in(folder)), **changes})


def pairs(folder: Path, **changes: Any) -> list[str]:
    given = {**TINY, "task.path": str(text_in(folder)), **changes}
    return [f"{key}={'null' if value is None else value}" for key, value in given.items()]
