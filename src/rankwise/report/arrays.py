"""Measures of an audit as tensors and in matplotlib axes, for papers and notebooks."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise._internals.records import grouped
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES
from rankwise.auditing.result import Audit
from rankwise.errors import InputError, need_package, one_of
from rankwise.report.head_columns import color_limits
from rankwise.report.heatmap_grid import grids_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor


def _measured(audit: Audit, measure: str, of: str) -> tuple[Any, list[Any]]:
    """Return the row of a measure and the records that have a value; raise `InputError` if none has."""
    table = {row.name: row for row in (HEAD_MEASURES if of == "heads" else STATE_MEASURES)}
    row: Any = table[one_of("measure", measure, table)]
    records = [record for record in getattr(audit, of) if math.isfinite(row.value(record))]
    if not records:
        fix = "Audit again with `importance=True`." if measure == "removal_cost" else "Choose another."
        raise InputError(f"{measure} of {of}", expected="numbers in the audit", got="none", fix=fix)
    return row, records


def head_tensor(audit: Audit, measure: str, stack: str | None = None) -> "Tensor":
    """Return a measure of all heads as a tensor; `Audit.to_tensor` describes it.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> head_tensor(rw.audit(layer, [torch.randn(1, 5, 8)]), "effective_rank").shape
        torch.Size([1, 2])
    """
    import torch

    _measured(audit, measure, "heads")
    grids = {grid.title: grid for grid in grids_of(audit.heads)}
    if stack is None and len(grids) > 1:
        fix = f"For example `stack={next(iter(grids))!r}`."
        raise InputError("`stack`", expected=f"one of {', '.join(map(repr, grids))}", got="None", fix=fix)
    grid = grids[one_of("`stack`", next(iter(grids)) if stack is None else stack, grids)]
    layers = [row.layer for row in grid.rows]
    if len(set(layers)) < len(layers):
        fix = "Use `audit.to_frame()`, which has a row per head."
        raise InputError(grid.title, expected="one mixer per layer", got="several", fix=fix)
    values = torch.full((max(layers) + 1, max(grid.columns) + 1), math.nan)
    for row in grid.rows:
        for head, index in row.cells.items():
            values[row.layer, head] = getattr(audit.heads[index], measure)
    return values


def plot_measure(audit: Audit, measure: str, of: str, ax: "Axes | None" = None) -> "Axes":
    """Draw a measure of "heads" as a heat map, of "states" as curves; `Audit.plot` describes them.

    Examples:
        >>> import rankwise as rw
        >>> about = rw.auditing.Provenance(model="m", delta=0.01)
        >>> empty = rw.Audit(provenance=about, heads=[], states=[], findings=[])
        >>> plot_measure(empty, "spread", "states")
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: spread of states: expected numbers in the audit, got none. Choose another.
    """
    row, records = _measured(audit, measure, of)
    pyplot = need_package("matplotlib.pyplot", "`Audit.plot`", "figures")
    ax = pyplot.subplots(layout="constrained")[1] if ax is None else ax
    unit = "nats" if row.range.text.endswith(" nats") else ""
    if measure == "removal_cost" and audit.importance is not None:
        unit = audit.importance.unit
    label = f"{row.title} ({unit})" if unit else row.title
    if of == "states":
        for stack, states in grouped(records, lambda state: state.stack).items():
            values = np.array([[s.blocks, row.value(s), s.std.get(measure, math.nan)] for s in states])
            blocks, value, std = values[values[:, 0].argsort()].T
            line = ax.plot(blocks, value, marker="o", markersize=3, label=stack or "states")[0]
            ax.fill_between(blocks, value - std, value + std, color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set(xlabel="blocks passed", ylabel=label)
        if len(ax.lines) > 1:
            ax.legend()
        return ax
    grids = grids_of(records)
    lines = [(grid, *line) for grid in grids for line in zip(grid.row_names, grid.rows, strict=True)]
    cells = np.full((len(lines), 1 + max(head.head for head in records)), math.nan)
    for y, (_, _, heads) in enumerate(lines):
        for head, index in heads.cells.items():
            cells[y, head] = row.value(records[index]) if row.applies_to(records[index]) else math.nan
    low, high = color_limits(row, records)
    image = ax.imshow(cells, vmin=low, vmax=high, aspect="auto", interpolation="none")
    beyond = "max" if np.nanmax(cells, initial=low) > high else "neither"
    ax.figure.colorbar(image, ax=ax, label=label, extend=beyond)
    names = [name if len(grids) == 1 else f"{grid.title} {name}" for grid, name, _ in lines]
    step = 1 + (len(names) - 1) // 24
    ax.set_yticks(range(0, len(names), step), names[::step], parse_math=False)
    ax.set(xlabel="head", ylabel="layer")
    ax.set_xticks(range(0, cells.shape[1], 1 + (cells.shape[1] - 1) // 16))
    return ax
