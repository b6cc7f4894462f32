"""Arrange heads in grids with layers as rows and heads as columns, one grid per kind of mixer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rankwise.auditing.records import Address, HeadRecord


@dataclass(frozen=True)
class Row:
    """Heads of one mixer of one layer. `cells` maps the number of a head to its index in the audit."""

    layer: int
    site: str
    cells: dict[int, int]


@dataclass(frozen=True)
class Grid:
    """Mixers of a stack whose module names differ only in numbers, such as a decoder's cross-attentions."""

    stack: str
    title: str
    """Title, unique among the grids of the audit."""
    pattern: str
    """Module name of the mixers, with `*` in place of numbers."""
    cross: bool
    rows: tuple[Row, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """Numbers of the heads, ascending, with gaps if only some channels were measured."""
        return tuple(sorted({number for row in self.rows for number in row.cells}))

    @property
    def indices(self) -> list[int]:
        """Indices of the heads in the audit, row by row."""
        return [index for row in self.rows for index in row.cells.values()]

    @property
    def cells(self) -> list[list[int | None]]:
        """Index in the audit of the head in each cell, row by row. None for a gap."""
        return [[row.cells.get(number) for number in self.columns] for row in self.rows]

    @property
    def row_names(self) -> list[str]:
        """Layer number of each row, followed by the end of the module name if the layer has several rows."""
        layers = Counter(row.layer for row in self.rows)
        return [
            str(row.layer) if layers[row.layer] == 1 else f"{row.layer} {row.site.rsplit('.', 1)[-1] or '–'}"
            for row in self.rows
        ]


def make_grids(heads: Sequence[Address], cross: Sequence[bool] = ()) -> list[Grid]:
    """Return one grid per stack and module name without numbers, self-attention and cross-attention apart.

    Grids are in the order of first appearance. A grid has one row per layer, site (module) and call. A head
    whose address occurs twice gets another row, so that no head is lost.
    """
    grouped: dict[tuple[str, bool, str], dict[tuple[int, str, int, int], dict[int, int]]] = {}
    seen: Counter[tuple[Address, bool]] = Counter()
    for index, (head, reads_other) in enumerate(zip(heads, cross or [False] * len(heads), strict=True)):
        rows = grouped.setdefault((head.stack, reads_other, _pattern(head.site)), {})
        row = (head.layer or 0, head.site, head.call, seen[head, reads_other])
        rows.setdefault(row, {})[head.head or 0] = index
        seen[head, reads_other] += 1
    return [
        Grid(key[0], title, key[2], key[1], tuple(Row(*name[:2], rows[name]) for name in sorted(rows)))
        for (key, rows), title in zip(grouped.items(), _titles(list(grouped)), strict=True)
    ]


def grids_of(heads: Sequence[HeadRecord]) -> list[Grid]:
    """Arrange the heads of an audit in grids, self-attention and cross-attention apart."""
    return make_grids([head.id for head in heads], [head.cross for head in heads])


class HeadIndex:
    """Index that finds heads by address (stack, module, layer, head), fast for thousands of heads."""

    def __init__(self, heads: Sequence[Address]) -> None:
        self._heads = heads
        self._near: dict[tuple[int | None, int | None], list[int]] = {}
        for index, head in enumerate(heads):
            for number in {head.head, None}:
                self._near.setdefault((head.layer, number), []).append(index)

    def at(self, place: Address) -> list[int]:
        """Return the indices of the heads at a place. Empty fields of the place match every head."""
        near: Sequence[int] = range(len(self._heads))
        if place.layer is not None:
            near = self._near.get((place.layer, place.head), [])
        fields = {name: getattr(place, name) for name in ("stack", "site", "head")}
        wanted = [(name, value) for name, value in fields.items() if value not in ("", None)]
        return [i for i in near if all(getattr(self._heads[i], name) == value for name, value in wanted)]


def _titles(keys: list[tuple[str, bool, str]]) -> list[str]:
    """Return a unique title per grid: the stack, "cross", and as much of the module name as needed."""
    plain = [f"{stack or pattern or 'model'}{', cross' if cross else ''}" for stack, cross, pattern in keys]
    named = [f"{title}, {key[2].rsplit('.', 1)[-1]}" for title, key in zip(plain, keys, strict=True)]
    whole = [f"{title}, {key[2]}" for title, key in zip(plain, keys, strict=True)]
    return [
        next((names[i] for names in (plain, named) if names.count(names[i]) == 1), whole[i])
        for i in range(len(keys))
    ]


def _pattern(site: str) -> str:
    return ".".join("*" if name.isdecimal() else name for name in site.split("."))
