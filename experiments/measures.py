"""Tables and functions of docs/reference/measures.md, from the table of measures."""

from collections.abc import Sequence
from types import FunctionType

from experiments.render import markdown_table
from rankwise import measures
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, Measure

PARTS = ("logit_moments",)
"""Functions that measures are made of, which are not on the page."""


def tables() -> dict[str, str]:
    """Return both tables and the functions in Markdown, by the names of their marks."""
    names = [name for name in measures.__all__ if isinstance(getattr(measures, name), FunctionType)]
    functions = "\n".join(f"::: rankwise.measures.{name}" for name in names if name not in PARTS)
    return {"heads": _table(HEAD_MEASURES), "layers": _table(LAYER_MEASURES), "functions": functions}


def _table(shown: Sequence[Measure]) -> str:
    heads = any(isinstance(measure, HeadMeasure) for measure in shown)
    columns = ["measure", "formula", "range", "low", "high", "cost", *(["null"] if heads else [])]
    return markdown_table(columns, [_row(measure, heads) for measure in shown])


def _row(measure: Measure, heads: bool) -> list[str]:
    named = measure.name.replace("_", " ")
    named += f" ({measure.symbol})" if measure.symbol else ""
    row = [named, measure.formula, measure.range.text, measure.low, measure.high, measure.cost]
    row += [", ".join(null.replace("_", " ") for null in measure.nulls)] if heads else []
    return [cell.replace("|", "\\|") for cell in row]
