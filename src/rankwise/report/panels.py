"""Heads put in grids: one panel for each kind of place where a stack mixes, layers down, heads across."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankwise._internals.records import format_number
from rankwise.auditing.measure_table import mixer_kind
from rankwise.auditing.records import HeadId, HeadRecord
from rankwise.errors import RecordError
from rankwise.report.text import mean

MOST_CELLS = 2**20
"""Of all panels; a model of 128 layers of 128 heads has 2¹⁴."""


@dataclass(frozen=True)
class Row:
    """One mixer of one layer; ``cells`` leads from the head's number to its index in the audit."""

    layer: int
    site: str
    cells: dict[int, int]


@dataclass(frozen=True)
class Panel:
    """The mixers of a stack whose names differ in numbers only, such as a decoder's cross-attentions."""

    stack: str
    title: str
    """What to call it; no other panel of the audit has this name."""
    pattern: str
    """Their name with the numbers replaced by ``*``."""
    cross: bool
    rows: tuple[Row, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """The numbers that heads have here: not all up to the largest where channels were sampled."""
        return tuple(sorted({number for row in self.rows for number in row.cells}))

    @property
    def indices(self) -> list[int]:
        """The heads of this panel as indices into the audit, row by row."""
        return [index for row in self.rows for index in row.cells.values()]


def make_panels(heads: Sequence[HeadRecord]) -> list[Panel]:
    """Sort heads into panels, in the order of their first appearance.

    Args:
        heads: the heads of an audit.

    Returns:
        One panel for each (stack, cross, site with its numbers masked); a row for each layer and site, and
        another one where the same heads come twice. Every head is in exactly one cell.

    Raises:
        RecordError: if there are over a million cells: no model has heads that lie so far apart.
    """
    grouped: dict[tuple[str, bool, str], dict[tuple[int, str, int], dict[int, int]]] = {}
    met: Counter[tuple[str, bool, str, int, int]] = Counter()
    for index, head in enumerate(heads):
        rows = grouped.setdefault((head.stack, head.cross, _pattern(head.site)), {})
        same = (head.stack, head.cross, head.site, head.layer, head.head)
        rows.setdefault((head.layer, head.site, met[same]), {})[head.head] = index
        met[same] += 1
    panels = [
        Panel(key[0], title, key[2], key[1], tuple(Row(*name[:2], rows[name]) for name in sorted(rows)))
        for (key, rows), title in zip(grouped.items(), _titles(list(grouped)), strict=True)
    ]
    _check_cells(panels)
    return panels


def _check_cells(panels: Sequence[Panel]) -> None:
    cells = sum(len(panel.rows) * len(panel.columns) for panel in panels)
    if cells > MOST_CELLS:
        raise RecordError(
            "heads of the audit",
            expected=f"layers by heads, in grids of {MOST_CELLS:,} cells at most",
            got=f"{cells:,} cells, nearly all of them empty",
            fix="The file is damaged; run `rankwise audit` again. `Audit.to_frame` lists its heads.",
        )


def panel_words(panel: Panel, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """What the page says of a panel: its title, and facts that its heads have in common.

    Args:
        panel: the panel.
        heads: all heads of the audit.
    """
    mine = [heads[index] for index in panel.indices]
    kinds = dict.fromkeys(head.kind for head in mine)
    masks = dict.fromkeys(f"{head.mask} mask" for head in mine if mixer_kind(head.kind).mixes_tokens)
    tokens = f"{format_number(mean(head.tokens for head in mine), 0)} tokens"
    if panel.cross:
        tokens += f" reading {format_number(mean(head.sources for head in mine), 0)}"
    return {
        "title": panel.title,
        "pattern": panel.pattern,
        "facts": [*kinds, *masks, tokens],
        "diagonal": "diagonal" in kinds,
        "columns": len(panel.columns),
    }


class HeadsByLayer:
    """Finds the heads that findings speak of, of which an audit can have thousands.

    Args:
        heads: the heads of the audit.
    """

    def __init__(self, heads: Sequence[HeadRecord]) -> None:
        self._heads = heads
        self._layers: dict[int, list[int]] = {}
        self._numbers: dict[tuple[int, int], list[int]] = {}
        for index, head in enumerate(heads):
            self._layers.setdefault(head.layer, []).append(index)
            self._numbers.setdefault((head.layer, head.head), []).append(index)

    def at(self, place: HeadId) -> list[int]:
        """Indices of the heads at a place; what it leaves open, all of them match.

        Args:
            place: where a finding is.
        """
        asked = {"stack": place.stack or None, "site": place.site or None, "head": place.head}
        wanted = {name: value for name, value in asked.items() if value is not None}
        near: Sequence[int]
        if place.layer is None:
            near = range(len(self._heads))
        elif place.head is None:
            near = self._layers.get(place.layer, [])
        else:
            near = self._numbers.get((place.layer, place.head), [])
        return [i for i in near if all(getattr(self._heads[i], name) == wanted[name] for name in wanted)]


def _titles(keys: list[tuple[str, bool, str]]) -> list[str]:
    """The stack, whether it reads another sequence, and as much of the site as tells panels apart."""
    plain = [f"{stack or pattern or 'model'}{', cross' if cross else ''}" for stack, cross, pattern in keys]
    named = [f"{title}, {key[2].rsplit('.', 1)[-1]}" for title, key in zip(plain, keys, strict=True)]
    whole = [f"{title}, {key[2]}" for title, key in zip(plain, keys, strict=True)]
    return [
        next((names[i] for names in (plain, named) if names.count(names[i]) == 1), whole[i])
        for i in range(len(keys))
    ]


def _pattern(site: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in site.split("."))
