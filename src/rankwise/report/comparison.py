"""A comparison of two audits on the console."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from rankwise._internals.records import format_number
from rankwise.auditing.comparison import Change, Comparison, LayerChange
from rankwise.auditing.findings import about
from rankwise.auditing.match_findings import OUTCOMES, FindingChange
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES
from rankwise.auditing.records import HeadId
from rankwise.report.console import ascii_fallback, line
from rankwise.report.terminal import new_table, print_findings, tally
from rankwise.report.text import count, model_name, plain, title

_MOST_CHANGES = 20
_MOST_PLACES = 5
_MOST_LINES = 8
_COLUMNS = {
    "heads": ("numerical_rank", "effective_rank", "stable_rank", "first_token_mass"),
    "states": ("relative_spread", "effective_rank"),
}
"""Of the table of the layers; the page has all."""
_MEANS = {"heads": "means of the heads", "states": "token states"}
_HEADS = {("heads", measure.name): measure.short.lower() or measure.label for measure in HEAD_MEASURES} | {
    ("states", measure.name): measure.console.replace("\n", " ") for measure in LAYER_MEASURES
}


def render_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print what changed between two audits: structure, findings, layers, the largest changes.

    Args:
        comparison: what `rankwise.auditing.compare` returned.
        console: where to print; the standard output where there is none.
    """
    with ascii_fallback(console or Console()) as out:
        _print_header(comparison, out)
        if comparison.structure:
            _print_structure(comparison, out)
        for outcome in OUTCOMES:
            _print_outcome(
                outcome, [finding for finding in comparison.findings if finding.outcome == outcome], out
            )
        for words, places in (("before", comparison.only_before), ("after", comparison.only_after)):
            _print_places(f"Only in the audit {words}", places, out)
        if any(change.change for change in comparison.by_layer):
            _print_layers(comparison.by_layer, out)
        if comparison.changes:
            _print_changes(comparison.changes, out)
        if comparison.is_empty:
            out.print(Text("No difference.", "bold green"))


def _print_header(comparison: Comparison, console: Console) -> None:
    names = [plain(model_name(about.model)) for about in (comparison.before, comparison.after)]
    console.print(
        line(("Rankwise comparison", "bold"), f"{names[0]} → {names[1]}", separator="  "), overflow="fold"
    )
    matched = (
        f"{count(comparison.heads, 'head')} and the states of {count(comparison.layers, 'layer')} in both"
    )
    console.print(line(matched))
    for warning in comparison.warnings:
        console.print(line(("warning", "bold yellow"), warning, separator="  "), overflow="fold")
    console.print()


def _print_structure(comparison: Comparison, console: Console) -> None:
    console.print(Text("The architectures differ", "bold"))
    for sentence in comparison.structure[:_MOST_LINES]:
        console.print(line(f"  {sentence}"), overflow="fold")
    more = len(comparison.structure) - _MOST_LINES
    if more > 0:
        console.print(line(f"  … and {more} more sentences (see the page)"))
    console.print()
    table = new_table([("", False), ("before", True), ("after", True)])
    for total in comparison.totals:
        if not (math.isnan(total.before) and math.isnan(total.after)):
            table.add_row(total.name, format_number(total.before), format_number(total.after))
    console.print(table)
    console.print()


def _print_outcome(outcome: str, changes: Sequence[FindingChange], console: Console) -> None:
    """Print new and resolved findings in full, and of the others the number that changed."""
    if not changes:
        return
    findings = [change.finding for change in changes]
    console.print(Text(f"{outcome.capitalize()}: ", "bold") + tally(findings))
    if outcome in ("new", "resolved"):
        console.print()
        print_findings(findings, console, brief=True)
        return
    for change in changes[:_MOST_LINES] if outcome != "unchanged" else ():
        console.print(line(f"  {finding_words(change)}"), overflow="fold")
    if outcome != "unchanged" and len(changes) > _MOST_LINES:
        console.print(line(f"  … and {len(changes) - _MOST_LINES} more"))
    console.print()


def finding_words(change: FindingChange) -> str:
    """Say in one line what became of a finding: its place, its severity, the number it rests on.

    Args:
        change: of one finding.
    """
    finding = change.finding
    facts = [finding.code if about(finding.code) == "model" else f"{finding.code} {finding.where}"]
    if change.before and change.after and change.before.severity != change.after.severity:
        facts.append(f"{change.before.severity} → {change.after.severity}")
    moved = change.before and change.after and change.before.where.layer != change.after.where.layer
    if moved and change.before and change.after and about(finding.code) != "model":
        facts.append(f"from layer {change.before.where.layer} → {change.after.where.layer}")
    if change.numbers is not None:
        name, old, new = change.numbers
        both = change.before is not None and change.after is not None
        before = f"{format_number(old)} → " if both else ""
        facts.append(f"{title(name)} {before}{format_number(new if change.after else old)}")
    return ", ".join(facts)


def _print_places(words: str, places: Sequence[HeadId], console: Console) -> None:
    if not places:
        return
    named = [str(place) if place.head is not None else f"{place}, states" for place in places[:_MOST_PLACES]]
    rest = f" … and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
    console.print(line((f"{words}: ", "bold"), "; ".join(named) + rest, separator=""), overflow="fold")
    console.print()


def _print_layers(changes: Sequence[LayerChange], console: Console) -> None:
    """A row for each layer; each change with how many standard deviations over sequences it is."""
    facts = "in brackets: changes in standard deviations over the sequences"
    for of, measures in _COLUMNS.items():
        rows: dict[tuple[str, int, bool], dict[str, str]] = {}
        for change in changes:
            if change.of == of and change.measure in measures:
                row = rows.setdefault((change.stack, change.layer, change.cross), {})
                row[change.measure] = change_words(change)
        if not any(change.change for change in changes if change.of == of and change.measure in measures):
            continue
        console.print(line((f"Changes by layer, {_MEANS[of]}", "bold"), (facts, "dim")), overflow="fold")
        table = new_table([("layer", False), *((_HEADS[of, name], True) for name in measures)])
        for (stack, layer, cross), row in rows.items():
            name = f"{plain(stack)} {layer}{', cross' if cross else ''}".strip()
            table.add_row(Text(name), *(row.get(measure, "–") for measure in measures))
        console.print(table)
        console.print()


def change_words(change: LayerChange) -> str:
    """A change with its sign, and how many standard deviations over the sequences it is.

    Args:
        change: of a layer.
    """
    signed = f"{'+' if change.change > 0 else ''}{format_number(change.change)}"
    ratio = f" ({abs(change.ratio):.1f})" if math.isfinite(change.ratio) else ""
    return f"{signed}{ratio}"


def _print_changes(changes: Sequence[Change], console: Console) -> None:
    columns = [("place", False), ("measure", False)]
    columns += [(name, True) for name in ("before", "after", "change", "share")]
    facts = "share: of the range that the measure can have there; of a cost, of the model's loss"
    console.print(line(("Largest changes", "bold"), (facts, "dim")), overflow="fold")
    table = new_table(columns)
    for change in changes[:_MOST_CHANGES]:
        table.add_row(*map(Text, _row(change)))
    console.print(table)
    if len(changes) > _MOST_CHANGES:
        console.print(line(f"… and {len(changes) - _MOST_CHANGES} smaller ones"))


def _row(change: Change) -> tuple[str, ...]:
    place = str(change.where) if change.where.head is not None else f"{change.where}, states"
    signed = format_number(change.change)
    signed = f"+{signed}" if change.change > 0 else signed
    before, after = format_number(change.before), format_number(change.after)
    return plain(place), title(change.measure), before, after, signed, f"{100 * change.size:.0f} %"
