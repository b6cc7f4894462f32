"""Draw figures as Plotly dictionaries without colors. Pages add the colors."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankwise._internals.records import format_number, grouped
from rankwise.auditing.measure_table import StateMeasure
from rankwise.auditing.records import HeadRecord, Severity, StateRecord
from rankwise.report.document import Figure
from rankwise.report.format import round_for_page
from rankwise.report.heatmap_grid import Grid, Row

_MOST_NUMBERS = 16
"""Maximum number of rows and of columns of a heat map that shows numbers in its cells."""
_LEAST_HEIGHT = 68
"""Minimum height of a heat map in pixels: room for the label at the pointer in a map of one row."""
_EDGE = 0.53
"""Distance from the center of the last cell to the end of an axis: 0.5, and room for an outline."""

_MOST_TICKS = 8
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
_SEVERITY_SYMBOLS: dict[Severity, str] = {"error": "diamond", "warning": "triangle-up", "info": "circle"}


@dataclass(frozen=True)
class MapCell:
    """Cell of a heat map: its number, the text in the cell, and the text at the mouse pointer."""

    value: float
    text: str
    hover: str


def cell_map(
    name: str,
    title: str,
    cells: Sequence[Sequence[MapCell | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    caption: str = "",
) -> Figure:
    """Return a heat map of numbers from −1 to 1, with named rows and columns.

    The text of a cell without a number is always shown. Other texts are shown if the cells have room.
    """
    roomy = has_room(rows, columns)
    values = [[cell.value if cell and math.isfinite(cell.value) else None for cell in row] for row in cells]
    texts = [[cell.text if cell and roomy else "" for cell in row] for row in cells]
    hover = [[html.escape(cell.hover) if cell else "" for cell in row] for row in cells]
    heat = {"type": "heatmap", "z": values, "zmin": -1.0, "zmax": 1.0, "xgap": 2, "ygap": 2}
    words = {"text": texts, "texttemplate": "%{text}" if roomy else "", "hovertext": hover}
    data: list[dict[str, Any]] = [heat | words | {"hoverinfo": "text", "meta": {"scale": "signed"}}]
    missing = [
        (x, y, cell.text)
        for y, row in enumerate(cells)
        for x, cell in enumerate(row)
        if cell and not math.isfinite(cell.value)
    ]
    if missing:
        x, y, text = (list(values) for values in zip(*missing, strict=True))
        look = {"mode": "text", "hoverinfo": "skip", "meta": {"muted": True}}
        data.append({"type": "scatter", "x": x, "y": y, "text": text} | look)
    return Figure(name, title, data, map_layout(rows, columns), caption)


def has_room(rows: Sequence[object], columns: Sequence[object]) -> bool:
    """Return True if a heat map is small enough to show numbers in its cells."""
    return len(columns) <= _MOST_NUMBERS and len(rows) <= _MOST_NUMBERS


def map_layout(rows: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Return the layout of a heat map: heads at the top (up to 16 names), layers at the left (up to 24)."""
    height = 34 if len(rows) <= 12 else 24 if len(rows) <= 24 else 16
    x_step, y_step = 1 + (len(columns) - 1) // 16, 1 + (len(rows) - 1) // 24
    shared = {"showgrid": False, "zeroline": False, "fixedrange": True, "ticks": "", "automargin": True}
    x = {"title": {"text": "head"}, "side": "top", "range": [-_EDGE, len(columns) - 1 + _EDGE]}
    y = {"title": {"text": "layer", "standoff": 8}, "range": [len(rows) - 1 + _EDGE, -_EDGE]}
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
    """Return a figure with one curve per line, over training steps or over named audits.

    The points of a line are pairs of value and standard deviation.
    """
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines" if len(steps) > 20 else "lines+markers",
            "x": list(steps),
            "y": [round_for_page(value) for value, _ in points],
            "customdata": [f" ± {format_number(std)}" if math.isfinite(std) else "" for _, std in points],
            "text": [html.escape(audit) for audit in names],
            "hovertemplate": f"{'%{text}' if names else 'step %{x}'}<br>{line}: %{{y:.3g}}%{{customdata}}"
            "<extra></extra>",
            "name": line,
            "line": {"width": 1.6},
            "meta": {"shade": index / max(len(lines) - 1, 1)},
        }
        for index, (line, points) in enumerate(lines.items())
    ]
    ticks: dict[str, Any] = {"nticks": 8}
    if len(steps) <= 12:
        ticks = {"tickvals": list(steps)}
        if names:
            ticks["ticktext"] = [html.escape(audit[-24:]) for audit in names]
    layout = {
        "height": 320,
        "showlegend": len(lines) <= 12,
        "xaxis": {"title": {"text": "audit" if names else "step"}} | ticks,
    }
    return Figure(name, title, data, layout, caption)


def severity_signs(grid: Grid, severities: Mapping[int, Severity]) -> list[dict[str, Any]]:
    """Return one trace per severity: small signs in the corners of cells whose head has a finding."""
    places = {
        index: (x, y) for y, row in enumerate(grid.cells) for x, index in enumerate(row) if index is not None
    }
    traces = []
    for severity, symbol in _SEVERITY_SYMBOLS.items():
        points = [places[i] for i, worst in severities.items() if worst == severity and i in places]
        if points:
            where = {"x": [x + 0.34 for x, _ in points], "y": [y - 0.3 for _, y in points]}
            look = {"marker": {"symbol": symbol, "size": 7}, "meta": {"severity": severity}}
            whole = {"hoverinfo": "skip", "cliponaxis": False}  # signs at the border are not cut off
            traces.append({"type": "scatter", "mode": "markers", **whole, **where, **look})
    return traces


def banded_line(
    series: int,
    name: str,
    x: Sequence[int],
    y: Sequence[float],
    upper: Sequence[float],
    lower: Sequence[float],
    hover: Sequence[str],
) -> list[dict[str, Any]]:
    """Return three traces: the upper edge of a band, its filled lower edge, and the line in the band."""
    base: dict[str, Any] = {"type": "scatter", "x": list(x)}
    edge = base | {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    marker = {"symbol": _SYMBOLS[series % len(_SYMBOLS)], "size": 3 if len(x) > 16 else 6}
    line = base | {"mode": "lines+markers", "marker": marker, "name": html.escape(name)}
    return [
        edge | {"y": list(upper), "meta": {"series": series, "band": False}},
        edge | {"y": list(lower), "meta": {"series": series, "band": True}},
        line | {"y": list(y), "hovertext": list(hover), "hoverinfo": "text", "meta": {"series": series}},
    ]


def depth_curves(measure: StateMeasure, states: Sequence[StateRecord]) -> Figure:
    """Draw a measure of token states against depth: a line per stack of blocks, ± 1 standard deviation."""
    stacks = grouped(states, lambda state: state.stack)
    data: list[dict[str, Any]] = []
    for series, (stack, unsorted) in enumerate(stacks.items()):
        curve = sorted(unsorted, key=lambda state: state.blocks)
        data += banded_line(
            series,
            stack or "states",
            [state.blocks for state in curve],
            [measure.value(state) for state in curve],
            [_edge(measure, state, 1) for state in curve],
            [_edge(measure, state, -1) for state in curve],
            [_state_hover(measure, state) for state in curve],
        )
    deepest = max(state.blocks for state in states)
    step = 1 + deepest // _MOST_TICKS  # whole numbers: automatic ticks can be at half blocks
    scale = {"range": [0, 1.03]} if measure.name == "direction_spread" else {"rangemode": "tozero"}
    layout = {
        "height": 260,
        "showlegend": len(stacks) > 1,
        "xaxis": {"title": {"text": "blocks passed"}, "tickvals": list(range(0, deepest + 1, step))},
        "yaxis": {"nticks": 6} | scale,
    }
    return Figure(f"depth-{measure.name}", measure.title, data, layout, measure.meaning)


def _edge(measure: StateMeasure, state: StateRecord, side: int) -> float:
    """Return the upper (`side` 1) or lower (`side` −1) edge of the band, within the range of the measure."""
    spread = state.std.get(measure.name, math.nan)
    value = measure.value(state) + side * (spread if math.isfinite(spread) else 0.0)
    low, high = measure.ends(state)
    if not math.isfinite(value):
        return math.nan
    return min(max(value, low), math.inf if measure.range.wide else high)


def _state_hover(measure: StateMeasure, state: StateRecord) -> str:
    spread = state.std.get(measure.name, math.nan)
    around = f" ± {format_number(spread, measure.digits)}" if math.isfinite(spread) else ""
    when = "input" if state.blocks == 0 else f"after {state.blocks} blocks"
    number = format_number(measure.value(state), measure.digits)
    return f"{html.escape(state.stack)}, {when}<br>{number}{around}"


def membership_maps(grids: Sequence[Grid], heads: Sequence[HeadRecord]) -> list[Figure]:
    """Draw memberships per layer of TSSA (token statistics self-attention), for tokens of the first sequence.

    A membership is the share with which a token belongs to a head. A layer of a text model is drawn as heads
    by tokens, a layer of an image model as one image per head, side by side. Layers whose heads have
    different tokens are left out.
    """
    figures = []
    for grid in grids:
        rows = [(number, row) for number, row in enumerate(grid.rows) if _has_memberships(row, heads)]
        indices = [index for _, row in rows for index in row.cells.values()]
        shares = [share for index in indices for share in heads[index].membership_map]
        largest = max(filter(math.isfinite, shares), default=0.0)
        figures += [_membership_map(grid, number, row, heads, largest) for number, row in rows]
    return figures


def _has_memberships(row: Row, heads: Sequence[HeadRecord]) -> bool:
    layer = [heads[index] for index in row.cells.values()]
    lengths = {len(head.membership_map) for head in layer}
    return len(lengths) == 1 and bool(layer[0].membership_map)


def _membership_map(grid: Grid, number: int, row: Row, heads: Sequence[HeadRecord], largest: float) -> Figure:
    layer = {head: heads[row.cells[head]] for head in sorted(row.cells)}
    shares = [[float(f"{share:.3g}") for share in head.membership_map] for head in layer.values()]
    x, y = [str(token) for token in range(len(shares[0]))], [f"head {head}" for head in layer]
    trace = {
        "type": "heatmap", "x": x, "y": y, "z": shares, "zmin": 0, "zmax": largest,
        "hovertemplate": "%{y}, token %{x}<br>Π %{z}<extra></extra>", "meta": {"scale": "ramp"},
    }  # fmt: skip
    layout = {
        "height": 72 + 22 * len(shares),
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "xaxis": {"title": {"text": "token"}, "nticks": 16, "type": "category"},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }
    caption = f"{grid.title} · heads as rows, tokens as columns; the scale ends at {largest:.2f}"
    layers = [other.layer for other in grid.rows]
    title = f"layer {row.layer}" if layers.count(row.layer) == 1 else f"layer {row.layer}, {row.site}"
    return Figure(f"memberships-{number}", title, [trace], layout, caption)


def without_nan(value: Any) -> Any:
    """Return a value with None for NaN and infinities, which JSON does not have, at any depth.

    Examples:
        >>> without_nan({"a": [1.0, float("nan")]})
        {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
