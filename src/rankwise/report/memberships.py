"""Membership maps: how far each token belongs to each head of a TSSA layer."""

import math
from collections.abc import Sequence
from typing import Any

from rankwise.auditing.records import HeadRecord
from rankwise.report.heatmap_grid import Grid, Row


def membership_maps(panels: Sequence[Grid], heads: Sequence[HeadRecord]) -> list[dict[str, Any]]:
    """Lay out the memberships of the first sequence, a picture for each layer of a panel that has them.

    A layer of a text is a grid of heads by tokens. A layer of a picture is its heads side by side, each with
    the tokens where they lie in the picture, an empty column between two.

    Args:
        panels: the panels of the audit.
        heads: its heads.

    Returns:
        For each panel with memberships its title, the largest membership, and its layers with their names,
        their grids and the columns of a picture (0 for a text). Layers whose heads do not have the same
        tokens are left out.
    """
    found = []
    for panel in panels:
        rows = [row for row in panel.rows if _is_whole(row, heads)]
        if rows:
            mine = [heads[index] for row in rows for index in row.cells.values()]
            shares = [share for head in mine for share in head.membership_map if math.isfinite(share)]
            found.append(
                {
                    "title": panel.title,
                    "largest": max(shares, default=0.0),
                    "layers": [_layer(row, panel, heads) for row in rows],
                }
            )
    return found


def _is_whole(row: Row, heads: Sequence[HeadRecord]) -> bool:
    """Whether the heads have memberships, all of the same tokens."""
    mine = [heads[index] for index in row.cells.values()]
    shapes = {(len(head.membership_map), head.membership_grid) for head in mine}
    return len(shapes) == 1 and bool(mine[0].membership_map)


def _layer(row: Row, panel: Grid, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    grid = heads[next(iter(row.cells.values()))].membership_grid
    return {"name": _name(row, panel), "columns": grid[1] if grid else 0, "z": _grid(row, heads)}


def _name(row: Row, panel: Grid) -> str:
    alone = [other.layer for other in panel.rows].count(row.layer) == 1
    return f"layer {row.layer}" if alone else f"layer {row.layer}, {row.site}"


def _grid(row: Row, heads: Sequence[HeadRecord]) -> list[list[float | None]]:
    mine = [heads[index] for _, index in sorted(row.cells.items())]
    values = [[float(f"{share:.3g}") for share in head.membership_map] for head in mine]
    grid = mine[0].membership_grid
    if not grid:
        return [list(line) for line in values]
    height, width = grid
    lines: list[list[float | None]] = []
    for at in range(height):
        line: list[float | None] = []
        for number, shares in enumerate(values):
            line += [None][: number > 0]  # an empty column between two heads
            line += shares[at * width : (at + 1) * width]
        lines.append(line)
    return lines
