"""What became of each finding from one audit to another: unchanged, changed, better, worse, gone or new."""

import math
from collections.abc import Sequence
from typing import Literal

from rankwise._internals.records import Record
from rankwise.auditing.records import SEVERITY_ORDER, AuditRecord, Finding, HeadRecord, LayerRecord
from rankwise.auditing.same_finding import OF_THE_MODEL, paired_findings

Outcome = Literal["new", "worse", "better", "changed", "unchanged", "gone"]
OUTCOMES: tuple[Outcome, ...] = ("new", "worse", "better", "changed", "unchanged", "gone")

RESTS_ON = {
    "COLLAPSE": ("relative_spread_lowest", -1),
    "INACTIVE_BLOCK": ("turn", -1),
    "SINK": ("max_token_mass", 1),
    "CONSTANT": ("row_distance", -1),
    "IDENTITY": ("identity_distance", -1),
    "DUPLICATE_HEADS": ("nearest_distance", -1),
    "HIGH_RANK": ("heads", 1),
    "LOW_RANK": ("heads", 1),
    "NONFINITE": ("heads", 1),
    "NOT_CAPTURED": ("modules", 1),
    "OVERSIZED_HEADS": ("heads", 0),
    "REMOVABLE": ("heads", 0),
}
"""The number that a finding stands or falls by, and the way in which it says more; 0 where neither way does:
heads and widths that can be spared are room for compression and no fault."""
MEASURED = {"relative_spread_lowest": "relative_spread"}
"""The measure that a piece of evidence is one of, where the names differ."""
ERRORS = 2.0
"""Standard errors of the difference within which a number counts as the same."""


class FindingChange(Record):
    """One finding before and after."""

    outcome: Outcome
    """``worse``: the same is said, and graver, earlier in the stack, of more heads, or by a number that is
    farther beyond its threshold, by more than two standard errors over the sequences; ``better`` the other
    way; ``changed``: its number is another, and neither way is worse. It speaks of the finding, not of what
    the model is worth."""
    before: Finding | None = None
    after: Finding | None = None

    @property
    def finding(self) -> Finding:
        """As it is now; as it was, where it is gone."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def numbers(self) -> tuple[str, float, float] | None:
        """The evidence it rests on, before and after; None where it has none."""
        name, _ = RESTS_ON.get(self.finding.code, ("", 0))
        old, new = (
            math.nan if finding is None else finding.evidence.get(name, math.nan)
            for finding in (self.before, self.after)
        )
        return (name, old, new) if name and not (math.isnan(old) and math.isnan(new)) else None


def finding_changes(before: AuditRecord, after: AuditRecord) -> list[FindingChange]:
    """What became of every finding, in the order of `OUTCOMES`.

    Args:
        before: one audit.
        after: the other.
    """
    records = _Records(before), _Records(after)
    changes = [
        FindingChange(outcome=_outcome(old, new, *records), before=old, after=new)
        for old, new in paired_findings(before, after)
    ]
    return sorted(changes, key=lambda change: OUTCOMES.index(change.outcome))


def _outcome(old: Finding | None, new: Finding | None, before: "_Records", after: "_Records") -> Outcome:
    if old is None:
        return "new"
    if new is None:
        return "gone"
    more = _more(old, new, before, after)
    if more:
        return "worse" if more > 0 else "better"
    name, way = RESTS_ON.get(new.code, ("", 0))
    moved = bool(name) and not way and old.evidence.get(name) != new.evidence.get(name)
    return "changed" if moved else "unchanged"


def _more(old: Finding, new: Finding, before: "_Records", after: "_Records") -> float:
    """Above 0 where the second says more than the first, below it where less, 0 where the same."""
    graver = SEVERITY_ORDER[old.severity] - SEVERITY_ORDER[new.severity]
    of_the_model = new.code in OF_THE_MODEL
    earlier = 0 if of_the_model else (old.where.layer or 0) - (new.where.layer or 0)  # of a stack alone
    if graver or earlier:
        return float(graver or earlier)
    name, way = RESTS_ON.get(new.code, ("", 0))
    step = way * (new.evidence.get(name, math.nan) - old.evidence.get(name, math.nan))
    error = math.hypot(_error(old, name, before), _error(new, name, after))
    return step if abs(step) > ERRORS * error else 0.0  # NaN is never larger


def _error(finding: Finding, name: str, records: "_Records") -> float:
    """Standard error over sequences of the number a finding rests on; 0 for counts and where unknown."""
    measure = MEASURED.get(name, name)
    record = records.of(finding)
    if record is None or record.sequences < 2:
        return 0.0
    spread = record.spread.get(measure, math.nan)
    return spread / math.sqrt(record.sequences) if math.isfinite(spread) else 0.0


class _Records:
    """The records of an audit that findings rest on, by their place."""

    def __init__(self, audit: AuditRecord) -> None:
        self._heads: dict[tuple[str, int | None, str, int | None], HeadRecord] = {}
        for head in audit.heads:
            self._heads.setdefault((head.stack, head.layer, head.site, head.head), head)
        self._states = audit.layers

    def of(self, finding: Finding) -> HeadRecord | LayerRecord | None:
        """The head, or the states, that a finding is placed at; of a collapse the lowest states.

        Args:
            finding: of this audit.
        """
        where = finding.where
        if where.head is not None:
            return self._heads.get((where.stack, where.layer, where.site, where.head))
        if finding.code == "COLLAPSE":
            return _lowest([layer for layer in self._states if layer.stack == where.stack])
        return next((y for y in self._states if (y.stack, y.layer) == (where.stack, where.layer)), None)


def _lowest(layers: Sequence[LayerRecord]) -> LayerRecord | None:
    known = [layer for layer in layers if math.isfinite(layer.relative_spread)]
    return min(known, key=lambda layer: layer.relative_spread, default=None)
