"""Match the findings of two audits: new, worse, better, changed, unchanged, resolved."""

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, get_args

from rankwise._internals.records import Record
from rankwise.auditing.findings import FINDING_RULES, about
from rankwise.auditing.records import SEVERITY_ORDER, Finding, HeadRecord, StateRecord

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit

Outcome = Literal["new", "worse", "better", "changed", "unchanged", "resolved"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

ERRORS = 2.0
"""Two numbers count as equal if they differ by at most this many standard errors of the difference."""
ROUNDING = 2.0**-19
"""Relative difference up to which numbers count as equal without a standard error: 16 eps of float32."""


class FindingChange(Record):
    """One finding in two audits."""

    outcome: Outcome
    """``worse``: the finding is more severe, is earlier in the stack, or has a number that is worse by more
    than two standard errors over sequences. ``better``: the opposite. ``changed``: the number differs, and
    neither direction is worse. An outcome describes the finding, not the quality of the model."""
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
    ours, theirs = _Records(before), _Records(after)
    unmatched: dict[Hashable, list[Finding]] = defaultdict(list)
    for finding in before.findings:
        unmatched[ours.subject(finding)].append(finding)
    changes = []
    for new in after.findings:
        same = unmatched[theirs.subject(new)]
        old = next(iter(same), None)
        if old is not None:
            unmatched[theirs.subject(new)].remove(old)
        changes.append(FindingChange(outcome=_outcome(old, new, ours, theirs), before=old, after=new))
    resolved = {id(finding) for same in unmatched.values() for finding in same}
    changes += [
        FindingChange(outcome="resolved", before=old) for old in before.findings if id(old) in resolved
    ]
    return sorted(changes, key=lambda change: OUTCOMES.index(change.outcome))


def _outcome(old: Finding | None, new: Finding, ours: "_Records", theirs: "_Records") -> Outcome:
    if old is None:
        return "new"
    change = float(SEVERITY_ORDER[old.severity] - SEVERITY_ORDER[new.severity])
    rule = FINDING_RULES.get(new.code)
    if not change and about(new.code) != "model":
        change = old.evidence.get("blocks", 0) - new.evidence.get("blocks", 0)  # 0 for a matched block
    if not change and rule is not None:
        numbers = [finding.evidence.get(rule.decided_by, math.nan) for finding in (old, new)]
        if rule.worse == "neither":
            return "unchanged" if math.isclose(*numbers, rel_tol=ROUNDING) else "changed"
        step = (numbers[1] - numbers[0]) * (1 if rule.worse == "higher" else -1)
        error = math.hypot(ours.standard_error(old), theirs.standard_error(new))
        error = max(ERRORS * error, ROUNDING * abs(numbers[0]))
        change = step if abs(step) > error else 0.0  # NaN yields 0.0
    return "worse" if change > 0 else "better" if change < 0 else "unchanged"


class _Records:
    """Records of an audit to which its findings refer."""

    def __init__(self, audit: "Audit") -> None:
        self._heads = {head.id: head for head in audit.heads}
        self._states = audit.states
        self._modules = {module.name: (module.type, module.reason) for module in audit.uncaptured}

    def subject(self, finding: Finding) -> Hashable:
        """Return the key by which findings match: code and subject, such as a head or a stack."""
        where = finding.where
        subjects: dict[str, Hashable] = {
            "model": None, "stack": where.stack, "mixer": where.at(None),
            "modules": self._modules.get(where.site, where),
        }  # fmt: skip
        return finding.code, subjects.get(about(finding.code), where)

    def standard_error(self, finding: Finding) -> float:
        """Return the standard error, over sequences, of the deciding number of a finding; 0 if unknown."""
        where, rule = finding.where, FINDING_RULES[finding.code]
        states = [state for state in self._states if state.stack == where.stack]
        row: HeadRecord | StateRecord | None = next(
            (state for state in states if state.blocks == finding.evidence.get("blocks")), None
        )
        name = rule.decided_by
        if where.head is not None:
            row = self._heads.get(where)
        elif rule.about == "stack":
            finite = [state for state in states if not math.isnan(state.spread)]
            row, name = min(finite, key=lambda state: state.spread, default=None), rule.shown_by
        if row is None or row.sequences < 2:
            return 0.0
        std = row.std.get(name, math.nan)
        return std / math.sqrt(row.sequences) if math.isfinite(std) else 0.0
