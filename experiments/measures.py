"""Write the tables and functions of `docs/measures.md`: `python -m experiments.measures`."""

from collections.abc import Sequence
from pathlib import Path
from types import FunctionType

from rankwise import measures
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, Measure

PAGE = Path(__file__).parent.parent / "docs" / "measures.md"
START, END = "<!-- {}: written by `python -m experiments.measures` -->", "<!-- end of {} -->"
PARTS = ("check_delta", "logit_moments")
"""Of which measures are made; not on the page."""


def main() -> None:
    """Put the tables into the page, between their marks."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        start, end = START.format(name), END.format(name)
        before, _, rest = text.partition(f"{start}\n")
        _, mark, after = rest.partition(f"{end}\n")
        if not mark:
            raise SystemExit(f"{PAGE} has no {start} … {end}")
        text = f"{before}{start}\n{table}{end}\n{after}"
    PAGE.write_text(text, encoding="utf-8")


def tables() -> dict[str, str]:
    """Both tables and the functions in Markdown, by the names of their marks."""
    return {"heads": _table(HEAD_MEASURES), "layers": _table(LAYER_MEASURES), "functions": _functions()}


def _functions() -> str:
    names = [name for name in measures.__all__ if isinstance(getattr(measures, name), FunctionType)]
    return "".join(f"::: rankwise.measures.{name}\n" for name in names if name not in PARTS)


def _table(shown: Sequence[Measure]) -> str:
    heads = any(isinstance(measure, HeadMeasure) for measure in shown)
    columns = ["measure", "formula", "range", "low", "high", "cost", *(["null"] if heads else [])]
    rows = [columns, ["---"] * len(columns), *(_row(measure, heads) for measure in shown)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(measure: Measure, heads: bool) -> list[str]:
    named = measure.name.replace("_", " ")
    named += f" ({measure.symbol})" if measure.symbol else ""
    row = [named, measure.formula, measure.range.text, measure.low, measure.high, measure.cost]
    row += [", ".join(null.replace("_", " ") for null in measure.nulls)] if heads else []
    return [cell.replace("|", "\\|") for cell in row]


if __name__ == "__main__":
    main()
