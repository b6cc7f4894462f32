"""Draw audits as figures of the Python package plotly, for notebooks."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.auditing.measure_table import DRAWN, HEAD_MEASURES, STATE_MEASURES, Measure, StateMeasure
from rankwise.auditing.result import Audit
from rankwise.errors import InputError, one_of
from rankwise.report.document import Figure
from rankwise.report.figures import depth_curves, heat_map, without_nan
from rankwise.report.format import model_name
from rankwise.report.head_columns import measure_column
from rankwise.report.heatmap_grid import grids_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

M = TypeVar("M", bound=Measure)
SCALE = "Viridis"
"""Color scale of every measure: neither end suggests good or bad."""
COLORS = ("#1d5ba6", "#c2500f", "#0b7a5c", "#9a3b8c", "#7a6200", "#4a5563")
_TALLEST = 1400
"""Maximum height of a figure in pixels."""


def plot_heads(audit: Audit, measure: str) -> "go.Figure":
    """Draw a heat map of one measure per grid of heads, with layers as rows and heads as columns.

    The title counts the values above the upper end of the color scale.

    Raises:
        InputError: if the measure is unknown, or the audit has no heads.

    Examples:
        >>> import torch, rankwise as rw
        >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
        >>> audit = rw.audit(model, [torch.randn(1, 9, 8)])
        >>> plot_heads(audit, "effective_rank").data[0].type, plot_depth(audit).data[0].type
        ('heatmap', 'scatter')
    """
    column = measure_column(_named(measure, HEAD_MEASURES), audit.heads)
    _need(audit.heads, "heads", "No mixing operator was captured: see `audit.uncaptured`.")
    maps = [heat_map(grid, column, audit.heads) for grid in grids_of(audit.heads)]
    heights = [drawn.layout["height"] for drawn in maps]
    figure = _subplots(maps, rows=len(maps), columns=1, heights=heights)
    for row, heat in enumerate(maps, 1):  # as axis title: a title above would cover head numbers
        figure.update_xaxes(title_text=f"{escape(heat.title)}, head", row=row)
    count_beyond, (low, high) = len(column.beyond), column.limits
    beyond = f" ({count_beyond} beyond the scale, up to {max(column.beyond):.3g})" if count_beyond else ""
    title = f"{column.title}, {escape(model_name(audit.provenance.model))}{beyond}"
    colors = {
        "colorscale": SCALE,
        "cmin": low,
        "cmax": high,
        "colorbar": {"title": {"text": column.short_title}},
    }
    figure.update_layout(title=title, height=min(sum(heights) + 120, _TALLEST), coloraxis=colors)
    return figure


def plot_depth(audit: Audit, measure: str | None = None) -> "go.Figure":
    """Draw measures of the token states against depth: a line per stack of blocks, ± 1 standard deviation.

    By default all measures of the page are drawn (example: `plot_heads`).

    Raises:
        InputError: if the measure is unknown, or the audit has no token states.
    """
    chosen: Sequence[StateMeasure] = DRAWN if measure is None else [_named(measure, STATE_MEASURES)]
    _need(audit.states, "token states", "No residual blocks were found: name them, `rw.audit(…, blocks=…)`.")
    curves = [depth_curves(measure, audit.states) for measure in chosen]
    titles = [escape(curve.title) for curve in curves]
    figure = _subplots(curves, rows=1, columns=len(curves), heights=[1], titles=titles)
    figure.update_layout(title=f"Token states, {escape(model_name(audit.provenance.model))}", height=380)
    return figure


def _subplots(
    drawn: Sequence[Figure], rows: int, columns: int, heights: Sequence[int], titles: Sequence[str] = ()
) -> "go.Figure":
    """Return page figures as subplots of one Plotly figure, in colors for a notebook."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=rows, cols=columns, subplot_titles=titles, row_heights=list(heights))
    for number, page_figure in enumerate(drawn):
        place = {"row": 1 + number // columns, "col": 1 + number % columns}
        for trace in page_figure.data:
            figure.add_trace(_colored_trace(trace, first=number == 0), **place)
        figure.update_xaxes(page_figure.layout["xaxis"], **place)
        figure.update_yaxes(page_figure.layout["yaxis"], **place)
    figure.update_layout(showlegend=any(page_figure.layout["showlegend"] for page_figure in drawn))
    return figure


def _colored_trace(trace: Mapping[str, Any], *, first: bool) -> dict[str, Any]:
    meta = trace["meta"]
    if "scale" in meta:
        return {**trace, "z": without_nan(trace["z"]), "coloraxis": "coloraxis"}
    if "muted" in meta:
        return dict(trace)
    color = COLORS[meta["series"] % len(COLORS)]
    shown = {"showlegend": first and trace.get("showlegend", True), "legendgroup": str(meta["series"])}
    fill = {"fill": "tonexty", "fillcolor": f"{color}28"} if meta.get("band") else {}
    line = {"line": {**trace.get("line", {}), "color": color}}
    return {**trace, "y": without_nan(trace["y"]), **shown, **fill, **line}


def _named(name: str, table: Sequence[M]) -> M:
    measures = {measure.name: measure for measure in table}
    return measures[one_of("measure", name, measures)]


def _need(records: Sequence[Any], words: str, fix: str) -> None:
    if not records:
        raise InputError("the audit", expected=f"{words} to draw", got="none", fix=fix)
