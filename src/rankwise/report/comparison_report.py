"""Build the reports on a comparison of two audits and on a history of audits."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from rankwise._internals.records import MISSING, format_number, grouped
from rankwise._internals.statistics import mean
from rankwise.auditing.comparison import LOSS, Change, Comparison, LayerChange
from rankwise.auditing.findings import about
from rankwise.auditing.history import History, steps_of
from rankwise.auditing.match_findings import OUTCOMES, FindingChange
from rankwise.auditing.measure_table import DRAWN, HEAD_MEASURES, PICTURED, STATE_MEASURES, Measure
from rankwise.auditing.records import (
    SEVERITIES,
    SEVERITY_ORDER,
    Address,
    Finding,
    Provenance,
    Verdict,
    last_states,
)
from rankwise.auditing.result import Audit
from rankwise.report.document import Cell, Document, Figure, Item, Items, Section, Table, nonempty
from rankwise.report.figures import MapCell, cell_map, step_curves
from rankwise.report.format import count, model_name, title
from rankwise.report.heatmap_grid import make_grids

MOST_CELLS = 2**15
"""Maximum number of cells of all maps of a comparison. Measures that changed most are drawn first."""
MOST_CHANGES, MOST_PLACES = 50, 10
_OUTCOMES = {
    "new": "Only in the second audit.",
    "changed": "Its severity, place or number differs.",
    "unchanged": "The same up to rounding.",
    "resolved": "Only in the first audit.",
}
_FIRST = {
    "heads": ("numerical_rank", "effective_rank", "stable_rank", "first_token_mass"),
    "states": ("direction_spread", "effective_rank"),
}
"""Measures in the first columns of the tables of layers. The console shows only these columns."""
_HISTORY_HEADS = [measure for measure in HEAD_MEASURES if measure.name in _FIRST["heads"]]
_HISTORY_STATES = [m for m in STATE_MEASURES if m.name in ("direction_spread", "mean_cosine")]
_SIGNS = {"error": "◆", "warning": "▲", "info": "●"}


def comparison_document(comparison: Comparison) -> Document:
    """Return the report on a comparison: structure, findings, maps of changes, layers, largest changes."""
    maps, omitted = _maps(comparison)
    only = [
        (f"Only in the audit {when}", _places(places))
        for when, places in (("before", comparison.only_before), ("after", comparison.only_after))
        if places
    ]
    colors = (
        "Blue: higher than before, brown: lower; the deeper, the larger the share of the range of the "
        "measure. Neither is better in itself. ╱: a number came or went."
    )
    not_drawn = f" Not drawn, for the size of the page: {', '.join(omitted)}." if omitted else ""
    moved = comparison.changes or comparison.only_before or comparison.only_after
    layers = [_layer_table(comparison.by_layer, of) for of in ("heads", "states") if moved]
    before, after = comparison.before, comparison.after
    heads, states = count(comparison.heads, "head"), count(comparison.states, "token state")
    return Document(
        command="Rankwise comparison",
        heading=f"{model_name(before.model)} → {model_name(after.model)}",
        setting=f"{heads} and {states} in both",
        verdict=Verdict(sentence=_verdict(comparison)),
        sections=nonempty(
            Section("structure", "The architectures differ", tables=[_structure(comparison)]),
            Section(
                "totals",
                "Totals",
                tables=[_totals(comparison)],
                on_console=bool(comparison.structure or only),
            ),
            Section("findings", "Findings", lists=finding_lists(comparison)),
            Section("maps", "Where heads changed", colors + not_drawn, figures=maps, choice="Measure"),
            Section("layers", "Layers", tables=layers),
            Section("changes", "Largest changes", tables=[_changes(comparison.changes)]),
            Section("only", "In one audit alone", facts=only),
        ),
        warnings=comparison.warnings,
        origin=[*_origin("Before", before), *_origin("After", after)],
    )


def _verdict(comparison: Comparison) -> str:
    left_out = count(comparison.below_rounding, "difference") + " below rounding are left out."
    left_out = f" {left_out}" if comparison.below_rounding else ""
    if comparison.is_empty:
        return f"No difference.{left_out}"
    losses = [total for total in comparison.totals if total.name.startswith(LOSS)]
    loss = "".join(f"Loss {x.before:.4g} → {x.after:.4g} {x.name.removeprefix(LOSS)}. " for x in losses)
    outcomes = Counter(change.outcome for change in comparison.findings)
    counts = [f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES if outcomes[outcome]]
    changes = count(len(comparison.changes), "number") + " of heads and token states changed"
    return f"{loss}Findings: {', '.join(counts) or 'none'}. {changes}.{left_out}"


def _origin(when: str, provenance: Provenance) -> list[tuple[str, str]]:
    facts = {"model": provenance.model, "data": provenance.data, "command": provenance.command}
    return [(f"{when}, {name}", value) for name, value in facts.items() if value]


def _structure(comparison: Comparison) -> Table:
    rows = [[sentence] for sentence in comparison.structure]
    return Table("The architectures differ", ["difference"], rows, console_rows=8)


def _totals(comparison: Comparison) -> Table:
    rows = [
        [total.name, format_number(total.before), format_number(total.after)]
        for total in comparison.totals
        if not (math.isnan(total.before) and math.isnan(total.after))
    ]
    return Table("Totals", ["", "before", "after"], rows)


def finding_lists(comparison: Comparison) -> list[Items]:
    """Return one list of findings per outcome, such as new or resolved. The unchanged list is folded."""
    outcomes = grouped(comparison.findings, attrgetter("outcome"))
    return [
        Items(
            outcome.capitalize(),
            [_finding_item(change) for change in outcomes[outcome]],
            _OUTCOMES[outcome],
            folded=outcome == "unchanged",
        )
        for outcome in OUTCOMES
        if outcome in outcomes
    ]


def _finding_item(change: FindingChange) -> Item:
    finding, old, new = change.finding, change.before, change.after
    facts = []
    if old and new and old.severity != new.severity:
        facts.append(("severity", f"{old.severity} → {new.severity}"))
    if old and new and "blocks" in old.evidence.keys() & new.evidence.keys():
        passed = [format_number(finding.evidence["blocks"]) for finding in (old, new)]
        if passed[0] != passed[1]:
            facts.append((title("blocks"), " → ".join(passed)))
    if change.numbers is not None:
        name, before, after = change.numbers
        was = f"{format_number(before)} → " if old and new else ""
        facts.append((title(name), was + format_number(after if new else before)))
    place = "" if about(finding.code) == "model" else finding.place
    return Item(finding.severity, finding.code, place, facts, finding.meaning)


def _places(places: Sequence[Address]) -> str:
    names = [str(place) if place.head is not None else f"{place}, states" for place in places[:MOST_PLACES]]
    rest = f" … and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return "; ".join(names) + rest


def _maps(comparison: Comparison) -> tuple[list[Figure], list[str]]:
    """Return maps of the change of each measure, the largest change first, and the measures without a map."""
    changed: dict[str, dict[Address, Change]] = {}
    # changes are sorted by size, so measures appear in the order of their largest change
    for change in comparison.changes:
        if change.where.head is not None:
            changed.setdefault(change.measure, {})[change.where] = change
    measures = {measure.name: measure for measure in HEAD_MEASURES if measure.name in changed}
    room = max(MOST_CELLS // max(1, len(comparison.matched)), 1)
    names = [name for name in changed if name in measures]
    grids = make_grids(comparison.matched) if names else []
    figures = [
        cell_map(
            f"changes-{name}",
            measures[name].title,
            [
                [None if i is None else _map_cell(comparison.matched[i], changed[name]) for i in row]
                for row in grid.cells
            ],
            grid.row_names,
            [str(number) for number in grid.columns],
            caption=f"{grid.title} · {measures[name].formula}",
        )
        for name in names[:room]
        for grid in grids
    ]
    return figures, [measures[name].title for name in names[room:]]


def _map_cell(head: Address, changed: Mapping[Address, Change]) -> MapCell:
    """Return the cell of a head: the signed square root of its change, so that small changes are visible."""
    where, change = f"layer {head.layer}, head {head.head}", changed.get(head)
    if change is None:
        return MapCell(0.0, "", f"{where}: the same")
    hover = f"{where}: {format_number(change.before)} → {format_number(change.after)}"
    if math.isnan(change.change):
        return MapCell(math.nan, "╱", hover)
    hover += f" ({100 * change.size:.0f} % of the range)"
    return MapCell(math.copysign(math.sqrt(change.size), change.change), "", hover)


def _layer_table(changes: Sequence[LayerChange], of: str) -> Table:
    """Return a table with one row per layer and one column per measure that changed in any layer."""
    changes = [change for change in changes if change.of == of]
    every: Sequence[Measure] = HEAD_MEASURES if of == "heads" else STATE_MEASURES
    moved = {change.measure for change in changes if change.change}
    measures = sorted((m for m in every if m.name in moved), key=lambda m: m.name not in _FIRST[of])
    rows: dict[str, dict[str, LayerChange]] = defaultdict(dict)
    for change in changes:
        name = f"{change.stack} {change.layer}{', cross' if change.cross else ''}".strip()
        rows[name][change.measure] = change
    first = sum(measure.name in _FIRST[of] for measure in measures)
    maxima = ", ".join(measure.title for measure in measures if measure.maximum)
    return Table(
        f"Changes by layer, {'means of the heads' if of == 'heads' else 'token states'}",
        ["layer", *(measure.head for measure in measures)],
        [
            [name, *(_change_cell(row.get(m.name)) for m in measures)]
            for name, row in rows.items()
            if measures
        ],
        note="In brackets: changes in standard deviations over the sequences; bold from 1 on."
        + (f" {maxima}: maximum of the heads." if maxima else ""),
        console_columns=1 + first if first else None,
    )


def _change_cell(change: LayerChange | None) -> Cell | str:
    if change is None:
        return "–"
    ratio = f" ({abs(change.ratio):.1f})" if math.isfinite(change.ratio) else ""
    deviation = f", standard deviation over sequences {format_number(change.std)}" if change.std > 0 else ""
    hover = f"{format_number(change.before)} → {format_number(change.after)}{deviation}"
    return Cell(_signed(change.change) + ratio, hover, strong=abs(change.ratio) >= 1)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{format_number(value)}"


def _changes(changes: Sequence[Change]) -> Table:
    rows = []
    for change in changes[:MOST_CHANGES]:
        place = str(change.where) if change.where.head is not None else f"{change.where}, states"
        numbers = [format_number(change.before), format_number(change.after), _signed(change.change)]
        rows.append([place, title(change.measure), *numbers, f"{100 * change.size:.0f} %"])
    smaller = len(changes) - len(rows)
    return Table(
        "Largest changes",
        ["place", "measure", "before", "after", "change", "share"],
        rows,
        note="Share: change over the range of the measure; for a cost, over the loss of the model."
        + (f" {smaller} smaller changes are not listed." if smaller else ""),
        console_rows=20,
    )


def history_document(history: History, links: Mapping[str, str] | None = None, failed: str = "") -> Document:
    """Return the report on a history: curves, audits, changes of findings. `failed` starts the verdict."""
    names = [model_name(name) for name in history.names]
    between = f", {names[0]} to {names[-1]}" if len(names) > 1 else ""
    numbered = "The audits are numbered, as their names contain no steps. " if history.counted else ""
    comparison = history.comparison if len(history) > 1 else None
    structure = [_structure(comparison)] if comparison else []
    ends = finding_lists(comparison) if comparison else []
    heads, states = _charts(history, names, "heads", PICTURED), _charts(history, names, "states", DRAWN)
    last = f"Last audit: {history.audits[-1].verdict.sentence}" if names else "No audits."
    curves = "One line per layer, from the first to the last; for heads the mean of the layer."
    return Document(
        command="Rankwise history",
        heading=f"{count(len(history), 'audit')}{between}",
        setting=f"{numbered}Means over all heads; states: at the end; findings: errors/warnings/notes.",
        verdict=Verdict(sentence=failed + _loss_words(history) + last),
        sections=nonempty(
            Section("loss", "Loss over the steps", figures=_loss_curve(history, names)),
            Section("heads", "Heads over the steps", curves, figures=heads, choice="Measure"),
            Section("states", "Token states over the steps", figures=states),
            Section("audits", "Audits", tables=[_audits(history, names, links or {})]),
            Section("findings", "Findings by step", tables=[_marks(history, names)], on_console=False),
            Section("structure", "The first and the last audit differ in architecture", tables=structure),
            Section("ends", "The last audit against the first", lists=ends, on_console=False),
        ),
        warnings=history.warnings,
    )


def _loss_words(history: History) -> str:
    """Return a sentence on the audit with the lowest loss. Return "" if losses cannot be compared."""
    if history.best is None:
        return ""
    name, best = history.best
    unit = best.importance.unit if best.importance else ""
    ends = {"first": history.audits[0].loss, "last": history.audits[-1].loss}
    others = ", ".join(f"{end} {loss:.4g}" for end, loss in ends.items() if loss > best.loss)
    return f"{model_name(name)} has the lowest loss, {best.loss:.4g} {unit}{'; ' * bool(others)}{others}. "


def _loss_curve(history: History, names: Sequence[str]) -> list[Figure]:
    """Return the curve of the loss over the steps. Return an empty list if losses cannot be compared."""
    if history.best is None:
        return []
    points = {"loss": [(audit.loss, math.nan) for audit in history.audits]}
    return [step_curves("history-loss", "Loss", points, history.steps, names if history.counted else ())]


def _charts(history: History, names: Sequence[str], of: str, measures: Sequence[Measure]) -> list[Figure]:
    """Return one figure per measure and stack, and a separate figure for cross-attention."""
    order = {measure.name: (place, measure) for place, measure in enumerate(measures)}
    lines: dict[tuple[str, str, bool], dict[str, Any]] = defaultdict(dict)
    for key, points in history.curves().items():
        if key.of == of and key.measure in order:
            lines[key.measure, key.stack, key.cross][f"layer {key.layer}"] = points
    return [
        step_curves(
            f"history-{of}-{name}",
            order[name][1].title,
            points,
            history.steps,
            names if history.counted else (),
            f"{stack}{', cross' if cross else ''}",
        )
        for (name, stack, cross), points in sorted(lines.items(), key=lambda item: order[item[0][0]][0])
    ]


def _audits(history: History, names: Sequence[str], links: Mapping[str, str]) -> Table:
    name_is_step = not history.counted and steps_of(history.names) == history.steps
    first = ["step"] if name_is_step else ["audit"] if history.counted else ["audit", "step"]
    measures: list[Measure] = [*_HISTORY_HEADS, *_HISTORY_STATES]
    titles = [measure.console or measure.head.lower().replace(" ", "\n") for measure in measures]
    loss = ["loss"] * any(math.isfinite(audit.loss) for audit in history.audits)
    rows: list[list[str | Cell]] = []
    for step, name, full_name, audit in zip(history.steps, names, history.names, history.audits, strict=True):
        who = Cell(str(step) if name_is_step else name, hover=full_name, link=links.get(full_name, ""))
        rows.append(
            [who, *([str(step)] if len(first) > 1 else []), *_audit_cells(audit, has_loss=bool(loss))]
        )
    return Table("Audits", [*first, "heads", *loss, *titles, "findings"], rows)


def _audit_cells(audit: Audit, *, has_loss: bool) -> list[str]:
    last = last_states(audit.states)
    means = [(mean(map(measure.value, audit.heads)), measure.digits) for measure in _HISTORY_HEADS]
    means += [(mean(map(measure.value, last)), measure.digits) for measure in _HISTORY_STATES]
    return [
        str(len(audit.heads)) + ("" if audit.complete else ", incomplete"),
        *[f"{audit.loss:.4g}" if math.isfinite(audit.loss) else MISSING] * has_loss,
        *(format_number(*pair) for pair in means),
        "/".join(str(sum(f.severity == severity for f in audit.findings)) for severity in SEVERITIES),
    ]


def finding_marks(findings: Sequence[Sequence[Finding]]) -> dict[str, list[str]]:
    """Return one text per audit for each code: the sign of the most severe finding, and their number."""
    by_code = [grouped(of_audit, attrgetter("code")) for of_audit in findings]
    codes = dict.fromkeys(chain(*by_code))
    return {code: [_mark(of_audit.get(code, [])) for of_audit in by_code] for code in codes}


def _mark(findings: Sequence[Finding]) -> str:
    signs = sorted(findings, key=lambda finding: SEVERITY_ORDER[finding.severity])
    return f"{_SIGNS[signs[0].severity]} {len(signs)}" if signs else ""


def _marks(history: History, names: Sequence[str]) -> Table:
    marks = finding_marks([audit.findings for audit in history.audits])
    return Table(
        "Findings by code",
        ["finding", *(names if history.counted else map(str, history.steps))],
        [[code, *signs] for code, signs in marks.items()],
        note="Number of findings; ◆ at least one error, ▲ at least one warning, ● notes.",
    )
