"""A comparison of two audits on the console."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from rankwise.audit.comparison import Change, Comparison
from rankwise.audit.measures import shown
from rankwise.audit.records import Place
from rankwise.report.terminal import line, new_table, print_findings, spelled_out, tally
from rankwise.report.text import count, plain, title

_MOST_CHANGES = 20
_MOST_PLACES = 5


def render_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print what changed between two audits: warnings, findings gone and new, and the largest changes.

    Args:
        comparison: what `rankwise.audit.compare` returned.
        console: where to print; the standard output where there is none.
    """
    with spelled_out(console or Console()) as out:
        _print_header(comparison, out)
        for name, findings in (("Gone: ", comparison.gone), ("New: ", comparison.new)):
            if findings:
                out.print(Text(name, "bold") + tally(findings))
                out.print()
                print_findings(findings, out, brief=True)
        for words, places in (("before", comparison.only_before), ("after", comparison.only_after)):
            _print_places(f"Only in the audit {words}", places, out)
        if comparison.changes:
            _print_changes(comparison.changes, out)
        if comparison.is_empty:
            out.print(Text("No difference.", "bold green"))


def _print_header(comparison: Comparison, console: Console) -> None:
    names = [plain(about.model) for about in (comparison.before, comparison.after)]
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


def _print_places(words: str, places: Sequence[Place], console: Console) -> None:
    if not places:
        return
    named = [str(place) if place.head is not None else f"{place}, states" for place in places[:_MOST_PLACES]]
    rest = f" … and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
    console.print(line((f"{words}: ", "bold"), "; ".join(named) + rest, separator=""), overflow="fold")
    console.print()


def _print_changes(changes: Sequence[Change], console: Console) -> None:
    columns = [("place", False), ("measure", False)]
    columns += [(name, True) for name in ("before", "after", "change", "share")]
    facts = "share: of the range that the measure can have there"
    console.print(line(("Largest changes", "bold"), (facts, "dim")), overflow="fold")
    table = new_table(columns)
    for change in changes[:_MOST_CHANGES]:
        table.add_row(*map(Text, _row(change)))
    console.print(table)
    if len(changes) > _MOST_CHANGES:
        console.print(line(f"… and {len(changes) - _MOST_CHANGES} smaller ones"))


def _row(change: Change) -> tuple[str, ...]:
    place = str(change.where) if change.where.head is not None else f"{change.where}, states"
    signed = shown(change.change)
    signed = f"+{signed}" if change.change > 0 else signed
    before, after = shown(change.before), shown(change.after)
    return plain(place), title(change.measure), before, after, signed, f"{100 * change.size:.0f} %"
