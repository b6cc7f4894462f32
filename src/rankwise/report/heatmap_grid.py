"""Arrange heads in grids: one grid per kind of mixing site, layers as rows, heads as columns."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.auditing.records import HeadId, HeadRecord
from rankwise.errors import RecordError

MOST_CELLS = 2**20
"""Cells of all grids; a model of 128 layers of 128 heads has 2¹⁴."""


@dataclass(frozen=True)
class Row:
    """One mixer of one layer; `cells` maps the number of a head to its index in the audit."""

    layer: int
    site: str
    cells: dict[int, int]


@dataclass(frozen=True)
class Grid:
    """The mixers of a stack whose names differ in numbers only, such as the cross-attentions of a decoder."""

    stack: str
    title: str
    """Title, different for each grid of the audit."""
    pattern: str
    """Name of the mixers, with `*` for numbers."""
    cross: bool
    rows: tuple[Row, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """Numbers of the heads, with gaps where channels were sampled."""
        return tuple(sorted({number for row in self.rows for number in row.cells}))

    @property
    def indices(self) -> list[int]:
        """Indices of its heads in the audit, row by row."""
        return [index for row in self.rows for index in row.cells.values()]

    @property
    def cells(self) -> list[list[int | None]]:
        """Index of the head of each cell, None for a gap."""
        return [[row.cells.get(number) for number in self.columns] for row in self.rows]

    @property
    def row_names(self) -> list[str]:
        """Layer of each row, with the end of the site's name where a layer has several rows."""
        layers = Counter(row.layer for row in self.rows)
        return [
            str(row.layer) if layers[row.layer] == 1 else f"{row.layer} {row.site.rsplit('.', 1)[-1] or '–'}"
            for row in self.rows
        ]


def make_grids(heads: Sequence[HeadId], cross: Sequence[bool] = ()) -> list[Grid]:
    """Return one grid per (stack, cross, site with masked numbers), in the order of first appearance.

    A grid has a row per layer, site and call, and another row if an address occurs again: no head is lost.

    Raises:
        RecordError: if there are over a million cells: no model has heads that are so far apart.
    """
    grouped: dict[tuple[str, bool, str], dict[tuple[int, str, int, int], dict[int, int]]] = {}
    seen: Counter[tuple[HeadId, bool]] = Counter()
    for index, (head, reads_other) in enumerate(zip(heads, cross or [False] * len(heads), strict=True)):
        rows = grouped.setdefault((head.stack, reads_other, _pattern(head.site)), {})
        row = (head.layer or 0, head.site, head.call, seen[head, reads_other])
        rows.setdefault(row, {})[head.head or 0] = index
        seen[head, reads_other] += 1
    grids = [
        Grid(key[0], title, key[2], key[1], tuple(Row(*name[:2], rows[name]) for name in sorted(rows)))
        for (key, rows), title in zip(grouped.items(), _titles(list(grouped)), strict=True)
    ]
    cells = sum(len(grid.rows) * len(grid.columns) for grid in grids)
    if cells > MOST_CELLS:
        raise RecordError(
            "heads of the audit",
            expected=f"layers by heads, in grids of {MOST_CELLS:,} cells at most",
            got=f"{cells:,} cells, nearly all of them empty",
            fix="The file is damaged; run `rankwise audit` again. `Audit.to_frame` lists its heads.",
        )
    return grids


def grids_of(heads: Sequence[HeadRecord]) -> list[Grid]:
    """Arrange the heads of an audit."""
    return make_grids([head.id for head in heads], [head.cross for head in heads])


class HeadIndex:
    """Finds the heads at an address among the thousands that an audit can have."""

    def __init__(self, heads: Sequence[HeadId]) -> None:
        self._heads = heads
        self._near: dict[tuple[int | None, int | None], list[int]] = {}
        for index, head in enumerate(heads):
            for number in {head.head, None}:
                self._near.setdefault((head.layer, number), []).append(index)

    def at(self, place: HeadId) -> list[int]:
        """Return indices of the heads at a place; every head matches the parts that the place leaves open."""
        near: Sequence[int] = range(len(self._heads))
        if place.layer is not None:
            near = self._near.get((place.layer, place.head), [])
        parts = ((name, getattr(place, name)) for name in ("stack", "site", "head"))
        wanted = [(name, part) for name, part in parts if part not in ("", None)]
        return [i for i in near if all(getattr(self._heads[i], name) == part for name, part in wanted)]


def _titles(keys: list[tuple[str, bool, str]]) -> list[str]:
    """Name grids by stack and cross-attention, and by as much of the site as makes the names unique."""
    plain = [f"{stack or pattern or 'model'}{', cross' if cross else ''}" for stack, cross, pattern in keys]
    named = [f"{title}, {key[2].rsplit('.', 1)[-1]}" for title, key in zip(plain, keys, strict=True)]
    whole = [f"{title}, {key[2]}" for title, key in zip(plain, keys, strict=True)]
    return [
        next((names[i] for names in (plain, named) if names.count(names[i]) == 1), whole[i])
        for i in range(len(keys))
    ]


def _pattern(site: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in site.split("."))
