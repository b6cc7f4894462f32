"""Link each finding to its place in the report: to heads and a measure, or to the token states."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from rankwise._internals.records import format_number
from rankwise.auditing.findings import FINDING_RULES, about
from rankwise.auditing.measure_table import PICTURED, REFERENCES
from rankwise.auditing.records import SEVERITY_ORDER, Finding, Provenance, Severity
from rankwise.auditing.remedies import remedy_text
from rankwise.auditing.result import Audit
from rankwise.auditing.verdict import number_words
from rankwise.report.document import Item
from rankwise.report.format import title
from rankwise.report.heatmap_grid import Grid, HeadIndex

_HEAD_NAMES = {measure.name for measure in PICTURED}
_ALIASES = dict.fromkeys(REFERENCES, "numerical_rank")


@dataclass(frozen=True)
class Target:
    """Place in the report to which a finding is linked."""

    section: Literal["heads", "states", "uncaptured", "provenance"]
    heads: tuple[int, ...] = ()
    """Indices of the heads that the page marks. The page scrolls to the first of these heads."""
    measure: str = ""
    """Measure that the heat map shows. If it is empty, the last chosen measure stays."""
    stack: str = ""
    """Stack whose token states the page marks, at the depth `blocks`."""
    blocks: int | None = None
    about: str = ""
    """Name of the group of heads if the finding is about several heads. Otherwise empty."""


def find_targets(findings: Sequence[Finding], audit: Audit) -> list[Target]:
    """Return the place in the report for each finding.

    A finding about token states is linked to the token states. Other findings are linked to their heads, or
    to all heads of their layer, site or stack. Findings without heads are linked to a section of details.
    """
    layers = HeadIndex([head.id for head in audit.heads])
    return [_target(finding, audit, layers) for finding in findings]


def _target(finding: Finding, audit: Audit, layers: HeadIndex) -> Target:
    where = finding.where
    if about(finding.code) == "modules":
        return Target("uncaptured" if audit.uncaptured else "provenance")
    named = bool(where.stack or where.site) or where.layer is not None or where.head is not None
    heads = layers.at(where) if named else []
    for number in finding.heads:
        spoken_of = layers.at(where.at(number))
        heads += [index for index in spoken_of if index not in heads]
    if finding.code == "REMOVABLE":
        removable = None if audit.importance is None else audit.importance.removable
        heads = [index for place in (removable.heads if removable else ()) for index in layers.at(place)]
    if "blocks" in finding.evidence and any(state.stack == where.stack for state in audit.states):
        return Target("states", stack=where.stack, blocks=int(finding.evidence["blocks"]))
    if not heads:
        return Target("provenance")
    subject = ""  # if a finding is about several heads, the card of each head must name them all
    if len(heads) > 1:
        subject = f"the set of {len(heads)} heads" if finding.code == "REMOVABLE" else _place(finding)
    return Target("heads", tuple(heads), _measure(finding), about=subject)


def _place(finding: Finding) -> str:
    """Return the address of a finding, with all heads that it concerns."""
    if len(finding.heads) < 2:
        return finding.place
    return f"{finding.where.at(None)} {number_words('head', finding.heads)}"


def _measure(finding: Finding) -> str:
    preferred = FINDING_RULES[finding.code].shown_by if finding.code in FINDING_RULES else ""
    named = [_ALIASES.get(name, name) for name in finding.evidence]
    shown = [name for name in named if name in _HEAD_NAMES]
    return preferred if preferred in shown or not shown else shown[0]


def finding_items(
    findings: Sequence[Finding], targets: Sequence[Target], grids: Sequence[Grid], about: Provenance
) -> list[Item]:
    """Return the findings as list items with links to their places on the page."""
    homes = {index: number for number, grid in enumerate(grids) for index in grid.indices}
    stacks = [grid.stack for grid in grids]
    return [
        Item(
            finding.severity,
            finding.code,
            _place(finding),
            [(title(name), format_number(value)) for name, value in finding.evidence.items()],
            finding.meaning,
            "" if finding.remedy is None else remedy_text(finding.remedy, about),
            site=finding.where.site if stacks.count(finding.where.stack) > 1 else "",
            link=f"grid-{homes[target.heads[0]]}" if target.section == "heads" else target.section,
            number=index,
        )
        for index, (finding, target) in enumerate(zip(findings, targets, strict=True))
    ]


def common_notes(findings: Sequence[Finding], targets: Sequence[Target], grid: Grid) -> dict[str, int]:
    """Return the notes that most heads of a grid have, so that they distinguish no head: counts by code."""
    heads, noted = set(grid.indices), dict[str, set[int]]()
    for finding, target in zip(findings, targets, strict=True):
        if finding.severity == "info":
            noted.setdefault(finding.code, set()).update(heads.intersection(target.heads))
    return {code: len(indices) for code, indices in noted.items() if 2 * len(indices) > len(heads)}


def severities_of(
    findings: Sequence[Finding], targets: Sequence[Target], without: Container[str] = ()
) -> dict[int, Severity]:
    """Return the worst severity of the findings about each head, by index of the head.

    Findings with a code in ``without`` do not count.
    """
    severities: dict[int, Severity] = {}
    for finding, target in zip(findings, targets, strict=True):
        for index in target.heads if finding.where.head is not None and finding.code not in without else ():
            both = finding.severity, severities.get(index, finding.severity)
            severities[index] = min(both, key=SEVERITY_ORDER.__getitem__)
    return severities
