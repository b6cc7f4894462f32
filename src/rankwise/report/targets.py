"""Findings in the report: in groups, and where each leads, to its heads and to the measure that shows it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rankwise._internals.records import format_number
from rankwise.auditing.findings import RULES, about
from rankwise.auditing.measure_table import DRAWN, NULLS, PICTURED
from rankwise.auditing.records import Finding, HeadId, Severity
from rankwise.auditing.result import Audit
from rankwise.report.heatmap_grid import Grid, HeadIndex
from rankwise.report.text import SEVERITIES, pieces, title

Section = Literal["heads", "states", "uncaptured", "provenance"]

_GRAVEST = list(SEVERITIES)
_OPEN = 4
"""Findings of one kind shown before the rest is folded away."""
_HEAD_NAMES = {measure.name for measure in PICTURED}
_STATE_NAMES = {measure.name for measure in DRAWN}
_ALIASES = dict.fromkeys(NULLS, "numerical_rank")


@dataclass(frozen=True)
class Target:
    """A place in the report."""

    section: Section
    heads: tuple[int, ...] = ()
    """Cells to mark, as indices into the audit's heads; the page scrolls to the first."""
    measure: str = ""
    """The measure to show there; empty: leave the reader's choice."""
    stack: str = ""
    layer: int | None = None
    about: str = ""
    """What the finding speaks of, where that is more than a single head, or two of them."""

    def data(self) -> dict[str, Any]:
        """As the page's script reads it."""
        return {
            "section": self.section,
            "heads": list(self.heads),
            "measure": self.measure,
            "stack": self.stack,
            "layer": self.layer,
            "about": self.about,
        }


def find_targets(findings: Sequence[Finding], audit: Audit) -> list[Target]:
    """Say what a reader should see on following each of some findings.

    Args:
        findings: the audit's findings, or some of them.
        audit: the audit.

    Returns:
        Token states if the finding is about them; else its heads, or all heads of its layer, site or stack;
        else the section with the details.
    """
    layers = HeadIndex([head.id for head in audit.heads])
    return [_target(finding, audit, layers) for finding in findings]


def _target(finding: Finding, audit: Audit, layers: HeadIndex) -> Target:
    where = finding.where
    if about(finding.code) == "modules":
        return Target("uncaptured")
    named = bool(where.stack or where.site) or where.layer is not None or where.head is not None
    heads = layers.at(where) if named else []
    for number in finding.heads:
        spoken_of = layers.at(where.at(number))
        heads += [index for index in spoken_of if index not in heads]
    if about(finding.code) == "model":
        heads = [index for place in _removable(audit) for index in layers.at(place)]
    if where.head is None and _is_about_states(finding, audit, heads):
        return Target("states", stack=where.stack, layer=where.layer)
    if not heads:
        return Target("provenance")
    return Target("heads", tuple(heads), _measure(finding), where.stack, where.layer, _about(finding, heads))


def _about(finding: Finding, heads: Sequence[int]) -> str:
    """A finding on many heads can name one of them that is not the one whose page shows it."""
    if about(finding.code) == "group" or len(heads) < 2:
        return ""
    if about(finding.code) == "model":
        return f"the set of {len(heads)} heads"
    return str(finding.where.at(None))


def _removable(audit: Audit) -> list[HeadId]:
    """The heads that can go together."""
    found = None if audit.importance is None else audit.importance.removable
    heads = [] if found is None else found.heads
    return [HeadId(stack=head.stack, layer=head.layer, site=head.site, head=head.head) for head in heads]


def _is_about_states(finding: Finding, audit: Audit, heads: Sequence[int]) -> bool:
    """By its evidence, or by a site that is a block which wrote a state and no mixer."""
    where = finding.where
    known = [state.site for state in audit.layers if (state.stack, state.layer) == (where.stack, where.layer)]
    evident = about(finding.code) == "stack" or bool(finding.evidence.keys() & _STATE_NAMES - _HEAD_NAMES)
    return bool(known) and (evident or (where.site in known and not heads))


def _measure(finding: Finding) -> str:
    own = RULES[finding.code].shown_by if finding.code in RULES else ""
    named = [_ALIASES.get(name, name) for name in finding.evidence]
    shown = [name for name in named if name in _HEAD_NAMES]
    return own if own in shown or not shown else shown[0]


def severity_counts(findings: Sequence[Finding]) -> list[tuple[Severity, int, str]]:
    """Count findings by severity, the worst first, each with its word; none that does not occur."""
    counted = [(severity, sum(f.severity == severity for f in findings)) for severity in SEVERITIES]
    return [(severity, number, SEVERITIES[severity][number > 1]) for severity, number in counted if number]


def finding_groups(
    findings: Sequence[Finding], targets: Sequence[Target], panels: Sequence[Grid]
) -> list[dict[str, Any]]:
    """Put findings of one severity and code together, the worst first."""
    homes = {index: number for number, panel in enumerate(panels) for index in panel.indices}
    stacks = [panel.stack for panel in panels]
    grouped: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for index, (finding, target) in enumerate(zip(findings, targets, strict=True)):
        link = f"panel-{homes[target.heads[0]]}" if target.section == "heads" else target.section
        evidence = [(title(name), format_number(value)) for name, value in finding.evidence.items()]
        where = finding.where
        item = {"index": index, "finding": finding, "place": str(where), "link": link, "evidence": evidence}
        item["remedy"] = pieces(finding.remedy)
        item["site"] = where.site if stacks.count(where.stack) > 1 and where.site != str(where) else ""
        grouped[_GRAVEST.index(finding.severity), finding.code].append(item)
    return [
        {"severity": _GRAVEST[rank], "code": code, "shown": items[:_OPEN], "folded": items[_OPEN:]}
        for (rank, code), items in sorted(grouped.items(), key=lambda group: group[0][0])
    ]


def marks_of(findings: Sequence[Finding], targets: Sequence[Target]) -> dict[int, Severity]:
    """The worst finding of each head that has one of its own, by the index of the head."""
    found: dict[int, Severity] = {}
    for finding, target in zip(findings, targets, strict=True):
        for index in target.heads if finding.where.head is not None else ():
            worst = min(finding.severity, found.get(index, finding.severity), key=_GRAVEST.index)
            found[index] = worst
    return found
