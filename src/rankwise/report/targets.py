"""Where a finding leads in the report: its heads, and the measure that is its evidence."""

from dataclasses import dataclass
from typing import Literal

from rankwise.audit.measures import DRAWN, NULLS, PICTURED
from rankwise.audit.records import AuditRecord, Finding
from rankwise.report.panels import heads_at

Section = Literal["heads", "states", "unseen", "provenance"]

_HEAD_NAMES = {measure.name for measure in PICTURED}
_STATE_NAMES = {measure.name for measure in DRAWN}
_ALIASES = dict.fromkeys(NULLS, "numerical_rank")
_BY_CODE = {
    "SINK": "peak_mass",
    "CONSTANT": "row_distance",
    "IDENTITY": "identity_distance",
    "TWINS": "nearest_distance",
    "ABOVE_NULL": "numerical_rank",
    "BELOW_NULL": "numerical_rank",
}


@dataclass(frozen=True)
class Target:
    """A place in the report."""

    section: Section
    heads: tuple[int, ...] = ()
    """Cells to mark, as indices into the audit's heads; the first is the one to scroll to."""
    measure: str = ""
    """The measure to show there; empty: leave the reader's choice."""
    stack: str = ""
    layer: int | None = None


def find_target(finding: Finding, audit: AuditRecord) -> Target:
    """Say what a reader should see on following a finding.

    Args:
        finding: one of the audit's findings.
        audit: the audit.

    Returns:
        Token states for a finding on them; else its head (with its nearest one for twins), or all heads of
        its layer, site or stack; else the section that tells more.
    """
    where = finding.where
    if finding.code == "UNSEEN":
        return Target("unseen")
    if where.head is None and _is_about_states(finding, audit):
        return Target("states", stack=where.stack, layer=where.layer)
    named = bool(where.stack or where.site) or where.layer is not None or where.head is not None
    heads = heads_at(where, audit.heads) if named else []
    if not heads:
        return Target("provenance")
    if finding.code == "TWINS" and where.head is not None:
        heads += _twins(heads, audit)
    return Target("heads", tuple(heads), _measure(finding), where.stack, where.layer)


def _is_about_states(finding: Finding, audit: AuditRecord) -> bool:
    """By its evidence, or by a site that is a block which wrote a state and no mixer."""
    where = finding.where
    known = [state.site for state in audit.layers if (state.stack, state.layer) == (where.stack, where.layer)]
    evident = finding.code == "COLLAPSE" or bool(finding.evidence.keys() & _STATE_NAMES - _HEAD_NAMES)
    return bool(known) and (evident or (where.site in known and not heads_at(where, audit.heads)))


def _twins(heads: list[int], audit: AuditRecord) -> list[int]:
    first = audit.heads[heads[0]]
    return [
        index
        for index, head in enumerate(audit.heads)
        if (head.stack, head.site, head.layer, head.cross)
        == (first.stack, first.site, first.layer, first.cross)
        and head.head == first.nearest_head
        and index not in heads
    ]


def _measure(finding: Finding) -> str:
    own = _BY_CODE.get(finding.code, "")
    named = [_ALIASES.get(name, name) for name in finding.evidence]
    shown = [name for name in named if name in _HEAD_NAMES]
    return own if own in shown or not shown else shown[0]
