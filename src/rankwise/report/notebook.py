"""What a notebook shows of an audit: a small table and a map of its ranks, without scripts."""

import math
from collections.abc import Sequence
from html import escape
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
from rankwise.report.heatmap_grid import Grid, Row, grids_of
from rankwise.report.text import SEVERITIES, count, mean, model_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_ROWS, MOST_COLUMNS = 48, 64
"""Layers and heads of a map that are shown; of more, it is said how many."""
_COLUMNS = ("numerical_rank", "effective_rank", "stable_rank", "first_token_mass")
_MEASURES = [measure for measure in HEAD_MEASURES if measure.name in _COLUMNS]
_CELL = "padding:0 .3em;text-align:right"


def notebook_html(audit: Audit) -> str:
    """Write an audit as a piece of HTML: a table of the layers, and the rank of every head as a colour.

    Everything in it is escaped; it holds no script and asks the network for nothing.

    Args:
        audit: the audit.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="<b>", delta=0.01)
        >>> text = notebook_html(Audit(provenance=about, heads=[], layers=[], findings=[]))
        >>> text.removeprefix("<div><strong>Rankwise audit</strong> ")
        '&lt;b&gt;<br>0 heads · 0 sequences · δ = 0.01 · no findings</div>'
    """
    panels = grids_of(audit.heads)
    return "".join([f"<div>{_header(audit)}", *(_panel(panel, audit.heads) for panel in panels), "</div>"])


def _header(audit: Audit) -> str:
    about = audit.provenance
    numbers = {severity: sum(f.severity == severity for f in audit.findings) for severity in SEVERITIES}
    findings = ", ".join(count(n, *SEVERITIES[severity]) for severity, n in numbers.items() if n)
    facts = [
        count(len(audit.heads), "head"),
        count(about.sequences, "sequence"),
        f"δ = {about.delta}",
        findings or "no findings",
        *([] if audit.complete else ["incomplete"]),
    ]
    return f"<strong>Rankwise audit</strong> {escape(model_name(about.model))}<br>{escape(' · '.join(facts))}"


def _panel(panel: Grid, heads: Sequence[HeadRecord]) -> str:
    rows, columns = panel.rows[:MOST_ROWS], panel.columns[:MOST_COLUMNS]
    head = "".join(f"<th>{escape(name)}</th>" for name in ["layer", *(m.head for m in _MEASURES)])
    body = "".join(_row(row, columns, heads) for row in rows)
    more = [
        f"{len(whole) - len(part)} more {words}"
        for words, whole, part in (("layers", panel.rows, rows), ("heads", panel.columns, columns))
        if len(whole) > len(part)
    ]
    rest = f"<div>… and {' and '.join(more)} not shown</div>" if more else ""
    measure = HEAD_MEASURES[0]
    said = f"{measure.head} of each head, from {_block(0.0)} 0 to {_block(1.0)} 1"
    return (
        "<div style='overflow-x:auto'><table>"
        f"<caption style='text-align:left'>{escape(panel.title)}</caption>"
        f"<thead><tr>{head}<th style='text-align:left'>{said}</th></tr></thead><tbody>{body}</tbody></table>"
        f"{rest}</div>"
    )


def _row(row: Row, columns: Sequence[int], heads: Sequence[HeadRecord]) -> str:
    mine = [heads[index] for index in row.cells.values()]
    numbers = "".join(
        f"<td style='{_CELL}'>{format_number(_mean(m, mine), m.digits)}</td>" for m in _MEASURES
    )
    drawn = (row.cells.get(number) for number in columns)
    cells = "".join(_block(math.nan) if index is None else _coloured(heads[index]) for index in drawn)
    return (
        f"<tr><th title='{escape(row.site)}'>{row.layer}</th>{numbers}"
        f"<td style='text-align:left;white-space:nowrap'>{cells}</td></tr>"
    )


def _mean(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> float:
    return mean(measure.value(head) for head in heads)


def _coloured(head: HeadRecord) -> str:
    measure = HEAD_MEASURES[0]
    return _block(measure.value(head), f"head {head.head}: {measure.formatted(head)}")


def _block(value: float, title: str = "") -> str:
    """A square of one hue, deeper for more; an outline alone where there is no number."""
    known = math.isfinite(value)
    depth = min(max(value, 0.0), 1.0) if known else 0.0
    colour = f"hsl(215,60%,{92 - 62 * depth:.0f}%)" if known else "transparent"
    style = (
        f"display:inline-block;width:.9em;height:.9em;margin:1px;border:1px solid #8884;background:{colour}"
    )
    return f"<span style='{style}' title='{escape(title)}'></span>"


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
    panels = grids_of(audit.heads)
    figure = subplots(
        rows=len(panels), cols=1, subplot_titles=[escape(panel.title) for panel in panels],
        row_heights=[len(panel.rows) + 2 for panel in panels],
    )  # fmt: skip
    for row, panel in enumerate(panels, start=1):
        figure.add_trace(go.Heatmap(_heat_map(panel, audit.heads, of), coloraxis="coloraxis"), row=row, col=1)
    low, high = color_limits(of, audit.heads)
    height = sum(_ROW * len(panel.rows) + _AROUND for panel in panels)
    title = f"{of.title}, {escape(model_name(audit.provenance.model))}"
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
            line = _depth_line(stack, audit.layers, drawn) | {"showlegend": column == 1 and len(stacks) > 1}
            figure.add_trace(go.Scatter(line, legendgroup=str(number)), row=1, col=column)
    figure.update_layout(title=f"Token states, {escape(model_name(audit.provenance.model))}", height=380)
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


def _heat_map(panel: Grid, heads: Sequence[HeadRecord], measure: HeadMeasure) -> dict[str, Any]:
    grid = [[row.cells.get(number) for number in panel.columns] for row in panel.rows]
    layers = [row.layer for row in panel.rows]
    alone = len(set(layers)) == len(layers)
    names = [str(row.layer) if alone else f"{row.layer} {escape(row.site)}" for row in panel.rows]
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


def _depth_line(stack: str, layers: Sequence[LayerRecord], measure: LayerMeasure) -> dict[str, Any]:
    mine = sorted((layer for layer in layers if layer.stack == stack), key=lambda layer: layer.layer)
    around = [layer.std.get(measure.name, math.nan) for layer in mine]
    return {
        "x": [layer.layer for layer in mine],
        "y": [_finite(measure.value(layer)) for layer in mine],
        "error_y": {"type": "data", "array": [spread if math.isfinite(spread) else 0.0 for spread in around]},
        "mode": "lines+markers",
        "name": escape(stack) or "states",
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
