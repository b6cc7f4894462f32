"""A comparison of two audits as one HTML file without scripts: findings, a map of differences, the layers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwise._internals.files import write_file
from rankwise._internals.records import format_number
from rankwise.auditing.comparison import Change, Comparison, LayerChange
from rankwise.auditing.match_findings import OUTCOMES
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, LayerMeasure
from rankwise.auditing.records import HeadId
from rankwise.report.comparison import change_words, finding_words
from rankwise.report.pages import render_page
from rankwise.report.text import SEVERITIES, model_name, title

MOST_CELLS = 2**15
"""Of all maps: those of the measures that changed most come first, and the page says which are left out."""
MOST_CHANGES, MOST_PLACES = 50, 40
_OUTCOMES = {
    "new": "Only in the second audit.",
    "worse": "Says more than before: graver, earlier, of more heads, or farther beyond its threshold.",
    "better": "Says less than before.",
    "changed": "Its number is another; neither way is worse.",
    "unchanged": "The same, within two standard errors over the sequences.",
    "resolved": "Only in the first audit.",
}


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as one self-contained HTML file.

    Args:
        comparison: the comparison.
        path: the file; for an existing folder, ``comparison.html`` in it.

    Returns:
        The file written.

    Raises:
        InputError: where it cannot be written.
    """
    path = path / "comparison.html" if path.is_dir() else path
    return write_file(path, render_page("comparison.html", comparison_context(comparison)), "comparison")


def comparison_context(comparison: Comparison) -> dict[str, Any]:
    """Gather what the template prints; nothing of it is escaped yet.

    Args:
        comparison: the comparison.
    """
    maps, left_out = difference_maps(comparison)
    return {
        "comparison": comparison,
        "names": [model_name(about.model) for about in (comparison.before, comparison.after)],
        "totals": [
            (total.name, format_number(total.before), format_number(total.after))
            for total in comparison.totals
            if not (math.isnan(total.before) and math.isnan(total.after))
        ],
        "outcomes": finding_groups(comparison),
        "maps": maps,
        "left_out": left_out,
        "tables": [_table(comparison.by_layer, of) for of in ("heads", "states")],
        "changes": [_change_row(change) for change in comparison.changes[:MOST_CHANGES]],
        "more_changes": max(0, len(comparison.changes) - MOST_CHANGES),
        "alone": [
            (words, [str(place) for place in places[:MOST_PLACES]], max(0, len(places) - MOST_PLACES))
            for words, places in (("first", comparison.only_before), ("second", comparison.only_after))
            if places
        ],
    }


def finding_groups(comparison: Comparison) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """Findings by what became of them: the outcome, what it means, and for each a severity and two texts.

    Args:
        comparison: the comparison.
    """
    groups: list[tuple[str, str, list[tuple[str, str, str]]]] = []
    for outcome in OUTCOMES:
        mine = [change for change in comparison.findings if change.outcome == outcome]
        rows = [
            (SEVERITIES[change.finding.severity][0], finding_words(change), change.finding.meaning)
            for change in mine
        ]
        if rows:
            groups.append((outcome, _OUTCOMES[outcome], rows))
    return groups


def difference_maps(comparison: Comparison) -> tuple[list[dict[str, Any]], list[str]]:
    """A map for each measure of heads that changed: layers down, heads across, the share of its range.

    Args:
        comparison: the comparison.

    Returns:
        The maps, those with the largest changes first, and the titles of those that are left out.
    """
    changed: dict[str, dict[tuple[str, str, int | None, int | None], Change]] = {}
    for change in comparison.changes:  # the largest comes first, and so does its measure
        if change.where.head is not None:
            changed.setdefault(change.measure, {})[_key(change.where)] = change
    known = {measure.name: measure for measure in HEAD_MEASURES}
    room = MOST_CELLS // max(1, len(comparison.matched))
    names = [name for name in changed if name in known]
    maps = [_map(known[name], changed[name], comparison.matched) for name in names[: max(room, 1)]]
    return maps, [known[name].title for name in names[max(room, 1) :]]


def _key(place: HeadId) -> tuple[str, str, int | None, int | None]:
    return place.stack, place.site, place.layer, place.head


def _map(measure: HeadMeasure, changed: dict[Any, Change], places: Sequence[HeadId]) -> dict[str, Any]:
    rows: dict[tuple[str, str, int | None], dict[int, dict[str, str]]] = {}
    for place in places:
        cells = rows.setdefault((place.stack, place.site, place.layer), {})
        cells[place.head or 0] = _cell(place, changed.get(_key(place)))
    columns = sorted({head for cells in rows.values() for head in cells})
    lines = [
        (f"{layer}", f"{stack} {site}", [cells.get(head) for head in columns])
        for (stack, site, layer), cells in rows.items()
    ]
    return {"title": measure.title, "formula": measure.formula, "rows": lines}


def _cell(place: HeadId, change: Change | None) -> dict[str, str]:
    """Its colour: one hue for more, another for less, deeper for a larger share of the range."""
    where = f"layer {place.layer}, head {place.head}"
    if change is None:
        return {"style": "", "title": f"{where}: the same", "kind": "same"}
    if math.isnan(change.change):
        said = f"{where}: {format_number(change.before)} → {format_number(change.after)}"
        return {"style": "", "title": said, "kind": "came"}
    kind = "more" if change.change > 0 else "less"
    depth = 12 + 88 * math.sqrt(change.size)  # small changes are to be seen, too
    said = f"{where}: {format_number(change.before)} → {format_number(change.after)}"
    said += f" ({100 * change.size:.0f} % of the range)"
    return {"style": f"--depth:{depth:.0f}%", "title": said, "kind": kind}


def _table(changes: Sequence[LayerChange], of: str) -> dict[str, Any]:
    """A row for each layer, a column for each measure that changed in any."""
    mine = [change for change in changes if change.of == of]
    table: Sequence[HeadMeasure] | Sequence[LayerMeasure] = HEAD_MEASURES if of == "heads" else LAYER_MEASURES
    moved = {change.measure for change in mine if change.change}
    measures = [measure for measure in table if measure.name in moved]
    rows: dict[tuple[str, int, bool], dict[str, LayerChange]] = {}
    for change in mine:
        rows.setdefault((change.stack, change.layer, change.cross), {})[change.measure] = change
    return {
        "title": "Heads, mean of each layer" if of == "heads" else "Token states",
        "columns": [measure.head for measure in measures],
        "rows": [
            (f"{stack} {layer}{', cross' if cross else ''}", [_layer_cell(row.get(m.name)) for m in measures])
            for (stack, layer, cross), row in rows.items()
        ],
    }


def _layer_cell(change: LayerChange | None) -> dict[str, str]:
    if change is None:
        return {"words": "", "title": "", "kind": "same"}
    far = math.isfinite(change.ratio) and abs(change.ratio) >= 1
    spread = f", standard deviation over sequences {format_number(change.std)}" if change.std > 0 else ""
    said = f"{format_number(change.before)} → {format_number(change.after)}{spread}"
    return {"words": change_words(change), "title": said, "kind": "far" if far else "near"}


def _change_row(change: Change) -> list[str]:
    place = str(change.where) if change.where.head is not None else f"{change.where}, states"
    signed = f"{'+' if change.change > 0 else ''}{format_number(change.change)}"
    numbers = [
        format_number(change.before),
        format_number(change.after),
        signed,
        f"{100 * change.size:.0f} %",
    ]
    return [place, title(change.measure), *numbers]
