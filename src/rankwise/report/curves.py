"""Curves: token states through depth, and singular values of heads."""

import html
import math
from collections.abc import Sequence
from typing import Any

from rankwise.audit.measures import DRAWN, LayerMeasure, shown
from rankwise.audit.records import HeadRecord, LayerRecord
from rankwise.report.text import rank_share

_SMALLEST = 1e-12
"""Below this share of the largest, a float64 singular value is rounding noise and is not drawn."""

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
    return {"data": traces, "layout": _depth_layout(measure), "name": measure.name}


def _edge(measure: LayerMeasure, layer: LayerRecord, side: int) -> float:
    """One edge of the band, kept within what the measure can be; on the line where no spread is known."""
    spread = layer.spread.get(measure.name, math.nan)
    value = measure.value(layer) + side * (spread if math.isfinite(spread) else 0.0)
    low, high = measure.ends(layer)
    return (
        min(max(value, low), math.inf if measure.to_the_largest else high)
        if math.isfinite(value)
        else math.nan
    )


def _hover(measure: LayerMeasure, layer: LayerRecord) -> str:
    spread = layer.spread.get(measure.name, math.nan)
    around = f" ± {shown(spread, measure.digits)}" if math.isfinite(spread) else ""
    when = "input" if layer.layer == 0 else f"after block {layer.layer}"
    return f"{html.escape(layer.stack)}, {when}<br>{shown(measure.value(layer), measure.digits)}{around}"


def _depth_layout(measure: LayerMeasure) -> dict[str, Any]:
    # Tokens are seldom opposed: below 0 the axis opens only where there is something to see.
    scale = {"rangemode": "tozero", "fixedrange": True, "zeroline": False, "nticks": 6, "automargin": True}
    depth = {
        "title": {"text": "blocks passed"},
        "fixedrange": True,
        "zeroline": False,
        "tickformat": "d",
        "nticks": 8,
    }
    return {
        "height": 260,
        "margin": {"l": 40, "r": 8, "t": 8, "b": 44},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": depth,
        "yaxis": scale | ({"range": [0, 1.03]} if measure.name == "relative_collapse" else {}),
    }


def spectra(heads: Sequence[HeadRecord], delta: float) -> list[dict[str, Any]]:
    """Prepare the singular values of each head for drawing.

    Args:
        heads: the heads of the audit.
        delta: the threshold of the numerical rank.

    Returns:
        For each head ``values`` (σ_i/σ_1; None where rounding noise or not finite) and ``last``, the index of
        the last drawn value at or above δ; None where there is none.
    """
    return [_spectrum(head, delta) for head in heads]


def _spectrum(head: HeadRecord, delta: float) -> dict[str, Any]:
    largest = head.spectrum[0] if head.spectrum else math.nan
    if not (math.isfinite(largest) and largest > 0):
        return {"values": [], "last": None}
    shares = [value / largest for value in head.spectrum]
    values = [
        float(f"{share:.4g}") if math.isfinite(share) and share >= _SMALLEST else None for share in shares
    ]
    counted = [i for i, sigma in enumerate(head.spectrum) if sigma >= delta and values[i] is not None]
    return {"values": values, "last": counted[-1] if counted else None}


def opening_heads(heads: Sequence[HeadRecord]) -> list[int]:
    """Choose the spectra to show first: of the heads with the lowest, the middle and the highest rank share.

    Args:
        heads: the heads of the audit.

    Returns:
        Up to three indices into ``heads``, of heads that have a spectrum.
    """
    known = [i for i, head in enumerate(heads) if head.spectrum and math.isfinite(rank_share(head))]
    ranked = sorted(known, key=lambda i: rank_share(heads[i]))
    return list(dict.fromkeys(ranked[i] for i in (0, len(ranked) // 2, -1))) if ranked else []
