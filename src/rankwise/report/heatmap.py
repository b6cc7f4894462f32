"""The heat map of one panel: layers down, heads across, one view for each measure."""

import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.audit.measures import MISSING, PICTURED, HeadMeasure, pictured, shown
from rankwise.audit.records import HeadRecord, Severity
from rankwise.report.panels import Panel, Row
from rankwise.report.text import (
    null_share,
    random_share,
    uniform_share,
)

_SAME_NULL = 0.005
"""Nulls nearer than this look like one on a scale from 0 to 1."""

_MOST_NUMBERS = 16
"""Rows and columns up to which a cell is large enough to hold its number."""

_LEAST = 68
"""Pixels that a map of one layer needs so that the label at the pointer fits."""

_EDGE = 0.53
"""How far the axes go beyond the centre of the last cell: past its border, so that an outline is not cut."""

_SYMBOLS: dict[Severity, str] = {"error": "diamond", "warning": "triangle-up", "info": "circle"}


def draw_panel(panel: Panel, heads: Sequence[HeadRecord], marks: Mapping[int, Severity]) -> dict[str, Any]:
    """Draw a panel with Plotly, colours left to the page.

    Args:
        panel: the panel.
        heads: all heads of the audit.
        marks: heads with a finding, by index, and how severe the worst one is.

    Returns:
        ``data`` and ``layout`` of the figure, ``views`` (what changes with the measure, by its name),
        ``places`` (the column and row of each head, by index), ``values`` (what a view says of each head) and
        ``numbers`` (whether cells can hold their number).
    """
    grid = _index_grid(panel)
    heat: dict[str, Any] = {"type": "heatmap", "z": [[None] * len(line) for line in grid], "customdata": grid}
    heat |= {"hoverinfo": "text", "hoverongaps": True, "showscale": False, "xgap": 2, "ygap": 2}
    places = {
        index: (x, y) for y, line in enumerate(grid) for x, index in enumerate(line) if index is not None
    }
    return {
        "data": [heat, *_marks(places, marks)],
        "layout": _layout(panel),
        "views": {measure.name: _view(measure, grid, heads) for measure in pictured(heads)},
        "places": places,
        "numbers": len(panel.columns) <= _MOST_NUMBERS and len(panel.rows) <= _MOST_NUMBERS,
    }


def describe(head: HeadRecord) -> str:
    """Say everything that was measured of a head, with its spread, in one line.

    Args:
        head: the head.

    Returns:
        Plain text, not escaped.
    """
    facts = [f"{head.kind}, {head.mask} mask", f"rank share {PICTURED[0].said(head)}"]
    facts[1] += f" (null {shown(null_share(head), 2)}{_other_nulls(head)})"
    for measure in pictured([head])[1:]:
        spread = head.spread.get(measure.name, math.nan)
        around = f" ± {shown(spread, measure.digits)}" if math.isfinite(spread) else ""
        facts.append(f"{measure.head.lower()} {measure.said(head)}{around}{_error_words(head, measure)}")
    if head.nonfinite:
        facts.append(f"not finite in {head.nonfinite} of {head.nonfinite + head.sequences} sequences")
    return " · ".join(facts)


def _other_nulls(head: HeadRecord) -> str:
    nulls = {"random queries and keys": random_share(head), "equal weights": uniform_share(head)}
    return "".join(f", {name} {shown(share, 2)}" for name, share in nulls.items() if math.isfinite(share))


def _error_words(head: HeadRecord, measure: HeadMeasure) -> str:
    error = head.stderr.get(measure.name, math.nan)
    return f" (standard error {shown(error, measure.digits)})" if math.isfinite(error) else ""


def _index_grid(panel: Panel) -> list[list[int | None]]:
    return [[row.cells.get(number) for number in panel.columns] for row in panel.rows]


def _view(measure: HeadMeasure, grid: list[list[int | None]], heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """What the heat map shows for a measure: colours, numbers in the cells, and the ends of the scale."""
    present = [heads[index] for line in grid for index in line if index is not None]
    low, high = measure.limits(present)
    view: dict[str, Any] = {"bad": measure.bad, "low": low, "high": high, "null": None, "difference": False}
    if measure.bad == "null":
        nulls = [null for head in present if math.isfinite(null := null_share(head))]
        if nulls and max(nulls) - min(nulls) <= _SAME_NULL:
            view["null"] = sum(nulls) / len(nulls)
        elif nulls:
            view |= {"low": -max(nulls), "high": 1.0 - min(nulls), "null": 0.0, "difference": True}
    colours = [[_colour(measure, view["difference"], index, heads) for index in line] for line in grid]
    words = [[_words(measure, index, heads) for index in line] for line in grid]
    ends = [shown(view["low"], measure.digits), shown(view["high"], measure.digits)]
    return view | {"z": colours, "text": words, "ends": ends, "nulls": shown(_or_nan(view["null"]), 2)}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _colour(
    measure: HeadMeasure, difference: bool, index: int | None, heads: Sequence[HeadRecord]
) -> float | None:
    if index is None:
        return None
    value = measure.value(heads[index]) - (null_share(heads[index]) if difference else 0.0)
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _words(measure: HeadMeasure, index: int | None, heads: Sequence[HeadRecord]) -> str:
    if index is None:
        return ""
    return measure.said(heads[index])


def _marks(places: Mapping[int, tuple[int, int]], marks: Mapping[int, Severity]) -> list[Any]:
    """Small signs in the corner of cells with a finding, one trace for each severity."""
    traces = []
    for severity, symbol in _SYMBOLS.items():
        points = [places[index] for index, mark in marks.items() if mark == severity and index in places]
        if points:
            where = {"x": [x + 0.32 for x, _ in points], "y": [y - 0.3 for _, y in points]}
            look = {"marker": {"symbol": symbol, "size": 8}, "meta": {"severity": severity}}
            traces.append({"type": "scatter", "mode": "markers", "hoverinfo": "skip", **where, **look})
    return traces


def _layout(panel: Panel) -> dict[str, Any]:
    columns, rows = panel.columns, panel.rows
    height = 34 if len(rows) <= 12 else 24 if len(rows) <= 24 else 16
    layers = Counter(row.layer for row in rows)
    names = [str(row.layer) if layers[row.layer] == 1 else _long_name(row) for row in rows]
    x_step, y_step = 1 + (len(columns) - 1) // 16, 1 + (len(rows) - 1) // 24
    shared = {"showgrid": False, "zeroline": False, "fixedrange": True, "ticks": "", "automargin": True}
    return {
        "height": max(height * len(rows), _LEAST) + 56,
        "margin": {"l": 44, "r": 4, "t": 44, "b": 8},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": shared
        | {"title": {"text": "head"}, "side": "top", "range": [-_EDGE, len(columns) - 1 + _EDGE]}
        | {"tickvals": list(range(0, len(columns), x_step)), "ticktext": [str(n) for n in columns[::x_step]]},
        "yaxis": shared
        | {"title": {"text": "layer"}, "range": [len(rows) - 1 + _EDGE, -_EDGE]}
        | {"tickvals": list(range(0, len(rows), y_step)), "ticktext": names[::y_step]},
    }


def _long_name(row: Row) -> str:
    return html.escape(f"{row.layer} {row.site.rsplit('.', 1)[-1] or MISSING}")
