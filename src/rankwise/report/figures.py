"""Figures as Plotly dictionaries without colors, which the page and notebooks add."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankwise._internals.records import format_number
from rankwise.report.document import Figure

_MOST_NUMBERS = 16
"""Rows and columns up to which a cell has room for its number."""
_LEAST_HEIGHT = 68
"""Pixels that a map of one row needs for the label at the pointer."""
_EDGE = 0.53
"""Distance from the center of the last cell to the end of an axis, beyond the border that an outline has."""


@dataclass(frozen=True)
class MapCell:
    """Cell of a heat map: a number, the text inside and the text at the pointer."""

    value: float
    text: str
    hover: str


def cell_map(
    name: str,
    title: str,
    cells: Sequence[Sequence[MapCell | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    limits: tuple[float, float] = (0.0, 1.0),
    scale: str = "ramp",
    caption: str = "",
) -> Figure:
    """Draw a heat map: layers as rows, heads as columns.

    The text of cells without a number is always shown, of other cells if there is room.

    Args:
        name: name of the file if the figure is saved.
        title: title of the figure.
        cells: rows of cells; None for a gap.
        rows: names of the rows.
        columns: names of the columns.
        limits: ends of the color scale.
        scale: `ramp`, or `signed` for numbers around 0.
        caption: explanation.
    """
    roomy = len(columns) <= _MOST_NUMBERS and len(rows) <= _MOST_NUMBERS
    values = [[cell.value if cell and math.isfinite(cell.value) else None for cell in row] for row in cells]
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "z": values,
            "text": [[cell.text if cell and roomy else "" for cell in row] for row in cells],
            "texttemplate": "%{text}" if roomy else "",
            "hovertext": [[html.escape(cell.hover) if cell else "" for cell in row] for row in cells],
            "hoverinfo": "text",
            "zmin": limits[0],
            "zmax": limits[1],
            "xgap": 2,
            "ygap": 2,
            "meta": {"scale": scale},
        }
    ]
    missing = [
        (x, y, cell.text)
        for y, row in enumerate(cells)
        for x, cell in enumerate(row)
        if cell and not math.isfinite(cell.value)
    ]
    if missing:
        x, y, text = (list(part) for part in zip(*missing, strict=True))
        look = {"mode": "text", "hoverinfo": "skip", "meta": {"muted": True}}
        data.append({"type": "scatter", "x": x, "y": y, "text": text} | look)
    return Figure(name, title, data, map_layout(rows, columns), caption)


def map_layout(rows: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Return the layout of a heat map: heads at the top, layers at the left, at most 24 names each."""
    height = 34 if len(rows) <= 12 else 24 if len(rows) <= 24 else 16
    x_step, y_step = 1 + (len(columns) - 1) // 16, 1 + (len(rows) - 1) // 24
    shared = {"showgrid": False, "zeroline": False, "fixedrange": True, "ticks": "", "automargin": True}
    x = {"title": {"text": "head"}, "side": "top", "range": [-_EDGE, len(columns) - 1 + _EDGE]}
    y = {"title": {"text": "layer"}, "range": [len(rows) - 1 + _EDGE, -_EDGE]}
    return {
        "height": max(height * len(rows), _LEAST_HEIGHT) + 56,
        "margin": {"l": 44, "r": 4, "t": 44, "b": 8},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": shared | x | _ticks(columns, x_step),
        "yaxis": shared | y | _ticks(rows, y_step),
    }


def _ticks(names: Sequence[str], step: int) -> dict[str, Any]:
    return {
        "tickvals": list(range(0, len(names), step)),
        "ticktext": [html.escape(name) for name in names[::step]],
    }


def step_curves(
    name: str,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    steps: Sequence[int],
    names: Sequence[str],
    caption: str = "",
) -> Figure:
    """Draw one line per layer over the steps of a history.

    Args:
        name: name of the file if the figure is saved.
        title: title of the figure.
        lines: value and standard deviation at each step, by the name of the line.
        steps: steps of the audits.
        names: names of the audits if their numbers are no steps; else empty.
        caption: explanation.
    """
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines" if len(steps) > 20 else "lines+markers",
            "x": list(steps),
            "y": [_rounded(value) for value, _ in points],
            "customdata": [f" ± {format_number(std)}" if math.isfinite(std) else "" for _, std in points],
            "text": [html.escape(one) for one in names],
            "hovertemplate": f"{'%{text}' if names else 'step %{x}'}<br>{line}: %{{y:.3g}}%{{customdata}}"
            "<extra></extra>",
            "name": line,
            "line": {"width": 1.6},
            "meta": {"shade": at / max(len(lines) - 1, 1)},
        }
        for at, (line, points) in enumerate(lines.items())
    ]
    ticks: dict[str, Any] = {"nticks": 8}
    if len(steps) <= 12:
        ticks = {"tickvals": list(steps)}
        if names:
            ticks["ticktext"] = [html.escape(one[-24:]) for one in names]
    layout = {
        "height": 320,
        "showlegend": len(lines) <= 12,
        "xaxis": {"title": {"text": "audit" if names else "step"}} | ticks,
    }
    return Figure(name, title, data, layout, caption)


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
