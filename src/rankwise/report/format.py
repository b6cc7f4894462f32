"""Format numbers and names for the readers of a report."""

import math
import re

from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES

RANK = next(measure for measure in HEAD_MEASURES if measure.name == "numerical_rank")
"""Measure of rank/min(T, S) for a T×S mixing matrix. If entries have signs, ranks are relative to σ₁."""

_TITLES = {
    "direction_spread_input": "direction spread of the input",
    "direction_spread_lowest": "lowest direction spread",
    "blocks": "blocks passed",
    "cost": "cost of removal",
    "loss": "loss after removal",
    "relative": "share of the loss",
    "parameters": "share of the parameters",
} | {measure.name: measure.label for measure in (*HEAD_MEASURES, *STATE_MEASURES)}


def title(measure: str) -> str:
    """Return the name of a measure as it is shown to readers, such as token spread for `spread`."""
    return _TITLES.get(measure, measure.replace("_", " "))


def split_code(text: str) -> list[tuple[str, bool]]:
    """Split a text into pairs (text, True if it is code), where code is in backticks.

    Examples:
        >>> split_code("then `rankwise compare A B`")
        [('then ', False), ('rankwise compare A B', True)]
    """
    return [(piece, number % 2 == 1) for number, piece in enumerate(text.split("`")) if piece]


GENERIC = {"model", "models", "output", "weights", "pretrained"}
"""Folder names too general to identify a model; the parent folder names the model instead."""
STATES = {"final", "best", "last"}
"""Folder names that identify a checkpoint only together with the name of the parent folder."""


def model_name(name: str) -> str:
    r"""Return a short model name for a title: the last parts of a path, or the whole name on the Hub.

    Examples:
        >>> model_name("/me/runs/bert-a/checkpoint-500"), model_name("org/model"), model_name("./my-vit/")
        ('bert-a/checkpoint-500', 'org/model', 'my-vit')
        >>> model_name("/data/all-MiniLM/model"), model_name("C:\\m\\gpt"), model_name("code/net.py:build")
        ('all-MiniLM', 'gpt', 'net.py:build')
    """
    parts = [folder for folder in re.split(r"[/\\]", name) if folder not in ("", ".", "..", "~")]
    is_path = name.startswith(("/", ".", "~", "\\")) or re.match(r"[A-Za-z]:[/\\]", name) or len(parts) > 2
    if not parts or not (is_path or ".py:" in name):
        return name
    last = parts[-1].lower()
    if last in GENERIC and len(parts) > 1:
        return parts[-2]
    vague = last in STATES or re.fullmatch(r"(checkpoint|step|epoch)[-_]?\d+", parts[-1])
    return "/".join(parts[-2:]) if vague else parts[-1]


def count(number: int, singular: str, many: str = "") -> str:
    """Return a number followed by its noun in singular or plural, such as "1 head" or "0 heads"."""
    return f"{number} {singular if number == 1 else many or singular + 's'}"


def round_for_page(value: float) -> float | None:
    """Return a number with the 6 significant digits that pages store. Return None if it is not finite.

    Examples:
        >>> round_for_page(1 / 3), round_for_page(math.inf)
        (0.333333, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None
