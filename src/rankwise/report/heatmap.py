"""The heat map of one panel: layers down, heads across; its colours are chosen on the page."""

import html
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rankwise._internals.records import MISSING
from rankwise.auditing.records import Severity
from rankwise.report.heatmap_grid import Grid, Row

_MOST_NUMBERS = 16
"""Rows and columns up to which a cell is large enough to hold its number."""

_LEAST = 68
"""Pixels that a map of one layer needs so that the label at the pointer fits."""

_EDGE = 0.53
"""How far the axes go beyond the centre of the last cell: past its border, so that an outline is not cut."""

_SYMBOLS: dict[Severity, str] = {"error": "diamond", "warning": "triangle-up", "info": "circle"}


def draw_panel(panel: Grid, marks: Mapping[int, Severity]) -> dict[str, Any]:
    """Lay out a panel; what its cells hold, the page takes from the columns of numbers.

    Args:
        panel: the panel.
        marks: heads with a finding, by index, and how severe the gravest one is.

    Returns:
        ``title``, ``grid`` (indices of heads, rows of cells; None for a gap), ``places`` (the column and row
        of each head, by index), ``signs`` (Plotly's traces of the marks), ``layout`` and ``numbers`` (whether
        cells can hold their number).
    """
    grid = [[row.cells.get(number) for number in panel.columns] for row in panel.rows]
    places = {
        index: (x, y) for y, line in enumerate(grid) for x, index in enumerate(line) if index is not None
    }
    return {
        "title": panel.title,
        "grid": grid,
        "places": places,
        "signs": _signs(places, marks),
        "layout": _layout(panel),
        "numbers": len(panel.columns) <= _MOST_NUMBERS and len(panel.rows) <= _MOST_NUMBERS,
    }


def _signs(places: Mapping[int, tuple[int, int]], marks: Mapping[int, Severity]) -> list[dict[str, Any]]:
    """Small signs in the corner of cells with a finding, one trace for each severity."""
    traces = []
    for severity, symbol in _SYMBOLS.items():
        points = [places[index] for index, mark in marks.items() if mark == severity and index in places]
        if points:
            where = {"x": [x + 0.34 for x, _ in points], "y": [y - 0.3 for _, y in points]}
            look = {"marker": {"symbol": symbol, "size": 7}, "meta": {"severity": severity}}
            whole = {"hoverinfo": "skip", "cliponaxis": False}  # nor cut at the last column
            traces.append({"type": "scatter", "mode": "markers", **whole, **where, **look})
    return traces


def _layout(panel: Grid) -> dict[str, Any]:
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
