"""Token states through depth: curves, and the table of their numbers."""

import html
import math
from collections.abc import Sequence
from typing import Any

from rankwise._internals.records import format_number
from rankwise.auditing.measure_table import DRAWN, LAYER_MEASURES, LayerMeasure
from rankwise.auditing.records import LayerRecord

_MOST_TICKS = 8
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def draw_depth(layers: Sequence[LayerRecord]) -> list[dict[str, Any]]:
    """Draw each measure of the states against depth: a line for each stack, one standard deviation around it.

    Args:
        layers: the layer records of an audit.

    Returns:
        One Plotly figure for each state measure, colours left to the page; none where there are no states.
    """
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    return [_draw_measure(measure, layers, stacks) for measure in DRAWN] if layers else []


def _draw_measure(measure: LayerMeasure, layers: Sequence[LayerRecord], stacks: list[str]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for series, stack in enumerate(stacks):
        mine = sorted((layer for layer in layers if layer.stack == stack), key=lambda layer: layer.layer)
        depths = [layer.layer for layer in mine]
        for side in (1, -1):
            edge = [_edge(measure, layer, side) for layer in mine]
            band: dict[str, Any] = {
                "type": "scatter",
                "x": depths,
                "y": edge,
                "mode": "lines",
                "line": {"width": 0},
            }
            fill = {"fill": "none" if side == 1 else "tonexty", "meta": {"series": series, "band": True}}
            traces.append(band | fill | {"hoverinfo": "skip"})
        text = [_hover(measure, layer) for layer in mine]
        line: dict[str, Any] = {"type": "scatter", "x": depths, "y": [measure.value(layer) for layer in mine]}
        line |= {"mode": "lines+markers", "hovertext": text, "hoverinfo": "text", "meta": {"series": series}}
        traces.append(line | {"marker": {"symbol": _SYMBOLS[series % len(_SYMBOLS)]}})
    return {
        "data": traces,
        "layout": _depth_layout(measure, max(layer.layer for layer in layers)),
        "name": measure.name,
    }


def _edge(measure: LayerMeasure, layer: LayerRecord, side: int) -> float:
    """One edge of the band, kept within what the measure can be; on the line where no spread is known."""
    spread = layer.std.get(measure.name, math.nan)
    value = measure.value(layer) + side * (spread if math.isfinite(spread) else 0.0)
    low, high = measure.ends(layer)
    return (
        min(max(value, low), math.inf if measure.range.wide else high) if math.isfinite(value) else math.nan
    )


def _hover(measure: LayerMeasure, layer: LayerRecord) -> str:
    spread = layer.std.get(measure.name, math.nan)
    around = f" ± {format_number(spread, measure.digits)}" if math.isfinite(spread) else ""
    when = "input" if layer.layer == 0 else f"after block {layer.layer}"
    return (
        f"{html.escape(layer.stack)}, {when}<br>{format_number(measure.value(layer), measure.digits)}{around}"
    )


def _depth_layout(measure: LayerMeasure, deepest: int) -> dict[str, Any]:
    # Tokens are seldom opposed: below 0 the axis opens only where there is something to see.
    scale = {"rangemode": "tozero", "fixedrange": True, "zeroline": False, "nticks": 6, "automargin": True}
    step = 1 + deepest // _MOST_TICKS  # whole blocks: an axis left to itself counts halves
    depth = {
        "title": {"text": "blocks passed"},
        "fixedrange": True,
        "zeroline": False,
        "tickvals": list(range(0, deepest + 1, step)),
    }
    return {
        "height": 260,
        "margin": {"l": 40, "r": 8, "t": 8, "b": 44},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": depth,
        "yaxis": scale | ({"range": [0, 1.03]} if measure.name == "relative_spread" else {}),
    }


def state_table(layers: Sequence[LayerRecord]) -> list[dict[str, Any]]:
    """The token states as columns of a table, each with its numbers and how they are shown.

    Args:
        layers: the layer records of an audit.
    """
    columns: list[dict[str, Any]] = [
        {"name": "stack", "head": "Stack", "texts": [layer.stack for layer in layers]},
        {"name": "layer", "head": "Blocks passed", "digits": 0, "values": [y.layer for y in layers]},
        {"name": "tokens", "head": "Tokens", "digits": 0, "values": [y.tokens for y in layers]},
    ]
    for measure in LAYER_MEASURES:
        numbers = [measure.value(layer) for layer in layers]
        columns.append(
            {"name": measure.name, "head": measure.head, "digits": measure.digits, "values": numbers}
        )
    for name, head in (("sequences", "Sequences"), ("nonfinite", "Not finite")):
        columns.append(
            {"name": name, "head": head, "digits": 0, "values": [getattr(y, name) for y in layers]}
        )
    return columns
