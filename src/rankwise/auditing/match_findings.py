"""Match the findings of two audits: new, changed, unchanged, resolved."""

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, get_args

from rankwise._internals.records import Record
from rankwise.auditing.findings import FINDING_RULES, about
from rankwise.auditing.records import Finding

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit

Outcome = Literal["new", "changed", "unchanged", "resolved"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

ROUNDING = 2.0**-19
"""Relative difference up to which numbers count as equal: 16 eps of float32."""


class FindingChange(Record):
    """One finding in two audits."""

    outcome: Outcome
    """``changed``: the severity, the place in the stack or the deciding number differs by more than rounding.
    An outcome describes the finding, not the quality of the model."""
    before: Finding | None = None
    after: Finding | None = None

    @property
    def finding(self) -> Finding:
        """The finding in the second audit, or in the first if it is resolved."""
        finding = self.after or self.before
        assert finding is not None
        return finding

    @property
    def numbers(self) -> tuple[str, float, float] | None:
        """Name, old and new value of the deciding number (`Rule.decided_by`). None if both are unknown."""
        if self.finding.code not in FINDING_RULES:
            return None
        name = FINDING_RULES[self.finding.code].decided_by
        both = ({} if finding is None else finding.evidence for finding in (self.before, self.after))
        old, new = (evidence.get(name, math.nan) for evidence in both)
        return None if math.isnan(old) and math.isnan(new) else (name, old, new)


def finding_changes(before: "Audit", after: "Audit") -> list[FindingChange]:
    """Return the outcome of each finding of two audits, in the order of `OUTCOMES`.

    Two findings match if their codes and subjects (`Rule.about`) are equal; numbers and severity may differ.
    Several findings about one subject are matched in order.
    """
    unmatched: dict[Hashable, list[Finding]] = defaultdict(list)
    for finding in before.findings:
        unmatched[_subject(finding, before)].append(finding)
    changes = []
    for new in after.findings:
        same = unmatched[_subject(new, after)]
        old = same.pop(0) if same else None
        change = FindingChange(outcome="new", before=old, after=new)
        changes.append(change if old is None else change.model_copy(update={"outcome": _outcome(change)}))
    resolved = {id(finding) for same in unmatched.values() for finding in same}
    changes += [
        FindingChange(outcome="resolved", before=old) for old in before.findings if id(old) in resolved
    ]
    return sorted(changes, key=lambda change: OUTCOMES.index(change.outcome))


def _subject(finding: Finding, audit: "Audit") -> Hashable:
    """Return the key by which findings match: code and subject, such as a head or a stack."""
    where, kind = finding.where, about(finding.code)
    subject: Hashable = {"model": None, "stack": where.stack, "mixer": where.at(None)}.get(kind, where)
    if kind == "modules":
        modules = (module for module in audit.uncaptured if module.name == where.site)
        subject = next(((module.type, module.reason) for module in modules), where)
    return finding.code, subject


def _outcome(change: FindingChange) -> Outcome:
    """Return the outcome of a finding that both audits have."""
    old, new = change.before, change.after
    assert old is not None
    assert new is not None
    blocks = [finding.evidence.get("blocks") for finding in (old, new)]
    _, *numbers = change.numbers or ("", 0.0, 0.0)
    equal = math.isclose(*numbers, rel_tol=ROUNDING)
    return "unchanged" if equal and old.severity == new.severity and blocks[0] == blocks[1] else "changed"
