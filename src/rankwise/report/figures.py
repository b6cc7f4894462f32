"""Figures for notebooks: Plotly objects that their user can change, of the numbers the page draws."""

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rankwise._internals.records import format_number
from rankwise.auditing.measure_table import (
    DRAWN,
    HEAD_MEASURES,
    LAYER_MEASURES,
    HeadMeasure,
    LayerMeasure,
    Measure,
)
from rankwise.auditing.records import HeadRecord, LayerRecord
from rankwise.auditing.result import Audit
from rankwise.errors import InputError, did_you_mean
from rankwise.report.head_columns import color_limits
from rankwise.report.panels import Panel, make_panels
from rankwise.report.text import model_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

SCALE = "Viridis"
"""Of one hue order for every measure: no end of it says good or bad."""
_ROW, _AROUND, _TALLEST = 26, 110, 1400
"""Pixels of a layer, around a map, and of a figure at most."""


def plot_heads(audit: Audit, measure: str) -> "go.Figure":
    """Draw a heat map of one measure of every head: a map for each stack, layers down and heads across.

    Args:
        audit: the audit.
        measure: the name of a measure of heads.

    Raises:
        InputError: if plotly is missing, there is no such measure, or no heads.
    """
    go, subplots = _plotly()
    of: HeadMeasure = _named(measure, HEAD_MEASURES)
    _need(audit.heads, "heads", "No mixing operator was captured: see `audit.uncaptured`.")
    panels = make_panels(audit.heads)
    figure = subplots(
        rows=len(panels), cols=1, subplot_titles=[html.escape(panel.title) for panel in panels],
        row_heights=[len(panel.rows) + 2 for panel in panels],
    )  # fmt: skip
    for row, panel in enumerate(panels, start=1):
        figure.add_trace(go.Heatmap(_map(panel, audit.heads, of), coloraxis="coloraxis"), row=row, col=1)
    low, high = color_limits(of, audit.heads)
    height = sum(_ROW * len(panel.rows) + _AROUND for panel in panels)
    title = f"{of.title}, {html.escape(model_name(audit.provenance.model))}"
    scale = {"colorscale": SCALE, "cmin": low, "cmax": high, "colorbar": {"title": {"text": of.head}}}
    figure.update_layout(title=title, height=min(height, _TALLEST), coloraxis=scale)
    figure.update_xaxes(title="head", tickformat="d", showgrid=False, type="category")
    figure.update_yaxes(title="layer", autorange="reversed", showgrid=False, type="category")
    return figure


def plot_depth(audit: Audit, measure: str | None = None) -> "go.Figure":
    """Draw measures of the token states through depth: a line for each stack, one standard deviation around.

    Args:
        audit: the audit.
        measure: the name of one; those of the report where none is named.

    Raises:
        InputError: if plotly is missing, there is no such measure, or no token states.
    """
    go, subplots = _plotly()
    chosen: Sequence[LayerMeasure] = DRAWN if measure is None else [_named(measure, LAYER_MEASURES)]
    _need(audit.layers, "token states", "No residual blocks were found: name them, `rw.audit(…, blocks=…)`.")
    stacks = list(dict.fromkeys(layer.stack for layer in audit.layers))
    figure = subplots(rows=1, cols=len(chosen), subplot_titles=[measure.title for measure in chosen])
    for column, drawn in enumerate(chosen, start=1):
        for number, stack in enumerate(stacks):
            line = _line(stack, audit.layers, drawn) | {"showlegend": column == 1 and len(stacks) > 1}
            figure.add_trace(go.Scatter(line, legendgroup=str(number)), row=1, col=column)
    figure.update_layout(title=f"Token states, {html.escape(model_name(audit.provenance.model))}", height=380)
    figure.update_xaxes(title="blocks passed", tickformat="d")
    return figure


def _plotly() -> tuple[Any, Any]:
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError:
        raise InputError(
            "figures",
            expected="plotly",
            got="an environment without it",
            fix="pip install plotly; `audit.to_html(path)` draws them in a file without it.",
        ) from None
    return go, make_subplots


def _named(name: str, table: Sequence[Any]) -> Any:
    known = {measure.name: measure for measure in table}
    if name not in known:
        raise InputError(
            f"measure {name!r}", expected="a measure", got=repr(name), fix=did_you_mean(str(name), known)
        )
    return known[name]


def _need(records: Sequence[Any], words: str, fix: str) -> None:
    if not records:
        raise InputError("the audit", expected=f"{words} to draw", got="none", fix=fix)


def _map(panel: Panel, heads: Sequence[HeadRecord], measure: HeadMeasure) -> dict[str, Any]:
    grid = [[row.cells.get(number) for number in panel.columns] for row in panel.rows]
    layers = [row.layer for row in panel.rows]
    alone = len(set(layers)) == len(layers)
    names = [str(row.layer) if alone else f"{row.layer} {html.escape(row.site)}" for row in panel.rows]
    return {
        "x": [str(number) for number in panel.columns],
        "y": names,
        "z": [[None if i is None else _finite(measure.value(heads[i])) for i in line] for line in grid],
        "text": [["" if i is None else _said(heads[i], measure) for i in line] for line in grid],
        "hoverinfo": "text",
        "xgap": 1,
        "ygap": 1,
    }


def _said(head: HeadRecord, measure: HeadMeasure) -> str:
    said = f"{measure.head}: {measure.formatted(head)}{_around(head, measure)}"
    return f"layer {head.layer}, head {head.head}<br>{said}"


def _around(record: HeadRecord | LayerRecord, measure: Measure) -> str:
    spread = record.std.get(measure.name, math.nan)
    if measure.share and isinstance(record, HeadRecord):
        spread /= record.smaller
    return f" ± {format_number(spread, measure.digits)}" if math.isfinite(spread) else ""


def _line(stack: str, layers: Sequence[LayerRecord], measure: LayerMeasure) -> dict[str, Any]:
    mine = sorted((layer for layer in layers if layer.stack == stack), key=lambda layer: layer.layer)
    around = [layer.std.get(measure.name, math.nan) for layer in mine]
    return {
        "x": [layer.layer for layer in mine],
        "y": [_finite(measure.value(layer)) for layer in mine],
        "error_y": {"type": "data", "array": [spread if math.isfinite(spread) else 0.0 for spread in around]},
        "mode": "lines+markers",
        "name": html.escape(stack) or "states",
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
