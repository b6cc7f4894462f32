"""What the console reports share: how findings look, and what to do on a console without Unicode."""

from collections import defaultdict
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankwise._internals.records import format_number
from rankwise.auditing.records import Finding, Severity
from rankwise.report.console import line
from rankwise.report.text import SEVERITIES, count, is_command, title

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}

_MOST_OF_A_KIND = 3
"""Findings of one severity and code that are printed before the rest is only counted."""

_INDENT = 9


def tally(findings: Sequence[Finding]) -> Text:
    """Count findings by severity, the worst first."""
    numbers = {severity: sum(f.severity == severity for f in findings) for severity in SEVERITIES}
    words = [
        (count(number, *SEVERITIES[severity]), _STYLES[severity])
        for severity, number in numbers.items()
        if number
    ]
    return line(*words, separator=", ") if words else Text("No findings", "bold green")


def print_findings(findings: Sequence[Finding], console: Console, *, brief: bool = False) -> None:
    """Print findings, the worst first; of many of one kind the first few and how many more there are.

    Args:
        findings: the findings.
        console: where to print.
        brief: leave out what they mean and what to do about them.
    """
    kinds: dict[tuple[Severity, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.severity, finding.code].append(finding)
    for severity in SEVERITIES:
        for kind in [found for (worst, _), found in kinds.items() if worst == severity]:
            for finding in kind[:_MOST_OF_A_KIND]:
                _print_finding(finding, console, brief)
            _print_rest(len(kind) - _MOST_OF_A_KIND, kind[0].code, console, brief)


def _print_finding(finding: Finding, console: Console, brief: bool) -> None:
    severity = (SEVERITIES[finding.severity][0].ljust(_INDENT - 2), _STYLES[finding.severity])
    head = line(severity, (finding.code, "bold"), str(finding.where), separator="  ")
    evidence = line(*(f"{title(name)} {format_number(value)}" for name, value in finding.evidence.items()))
    console.print(head, overflow="fold")
    for text in (evidence,) if brief else (evidence, line(finding.meaning)):
        if text:
            console.print(Padding(text, (0, 0, 0, _INDENT), expand=False), overflow="fold")
    if not brief:
        _print_remedy(finding.remedy, console)
    console.print()


def _print_remedy(remedy: str, console: Console) -> None:
    arrow = line("→ ", separator="")
    if is_command(remedy):  # not wrapped, so that it can be copied in one piece
        console.print(line(" " * _INDENT, separator="") + arrow + line((remedy, "cyan")), soft_wrap=True)
    elif remedy:
        console.print(Padding(arrow + line(remedy), (0, 0, 0, _INDENT), expand=False), overflow="fold")


def _print_rest(more: int, code: str, console: Console, brief: bool) -> None:
    if more > 0:
        where = "" if brief else " (see the report)"
        console.print(line(f"{' ' * _INDENT}… and {more} more of {code}{where}", separator=""))
        console.print()


def new_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """Start a table.

    Args:
        columns: their titles, and whether they hold numbers.

    Returns:
        A table without rows.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column, number in columns:
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table
