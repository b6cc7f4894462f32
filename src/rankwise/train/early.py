"""Training losses of kept runs in their first steps, by the row of a recipe, collapsed rows among them."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rankwise.train.settings import EarlyLoss

KEPT = Path(__file__).with_name("early.json")
"""Written by `python -m experiments.early` from kept runs; small sizes alone."""


def early_losses(
    name: str, size: str, variant: Mapping[str, Any]
) -> tuple[tuple[EarlyLoss, ...], str | None]:
    """Early losses of a recipe with these arguments, and the SHA-256 of the data they hold for.

    Args:
        name: of the recipe.
        size: of the run.
        variant: all arguments of the recipe beside size and seed.

    Returns:
        Nothing and None where no run is kept.
    """
    for row in _kept() if size == "small" else ():
        if row["recipe"] == name and row["variant"] == dict(variant):
            losses = (EarlyLoss(step=step, loss=loss, tolerance=far) for step, loss, far in row["losses"])
            return tuple(losses), row["data"]
    return (), None


@cache
def _kept() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))
    return rows
