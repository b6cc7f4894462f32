"""Whether costs of removal in two audits are of one quantity, and how large a change of them is."""

import math
from collections.abc import Iterator

from rankwise.audit.records import AuditRecord

COST = "removal_cost"
"""The measure of heads that has the unit of a loss, and no range of its own."""


def worth_differences(before: AuditRecord, after: AuditRecord) -> list[str]:
    """In what the worth of two audits differs, a sentence each; none where their costs compare.

    Args:
        before: one audit.
        after: the other.
    """
    return [f"{words} The changes leave costs of removal out." for words in _differences(before, after)]


def cost_scale(before: AuditRecord, after: AuditRecord) -> float:
    """The larger loss of the two whole models; 1 where it is 0, how far an output moves: a share by itself.

    Args:
        before: one audit.
        after: the other.
    """
    losses = [abs(audit.worth.value) for audit in (before, after) if audit.worth is not None]
    known = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    return max(known, default=1.0)


def _differences(before: AuditRecord, after: AuditRecord) -> Iterator[str]:
    old, other = before.worth, after.worth
    if old is None or other is None:
        if old is not other:
            which = "after" if old is None else "before"
            yield f"Only the audit {which} measured worth: the other was not asked for removable heads."
        return
    if (old.loss, old.unit) != (other.loss, other.unit):
        yield f"The loss of worth differs: {old.loss} ({old.unit}) before, {other.loss} ({other.unit}) after."
    if old.removal != other.removal:
        yield f"What takes a removed head's place differs: {old.removal} before, {other.removal} after."
    kinds = [_kinds(audit) for audit in (before, after)]
    if kinds[0] != kinds[1]:
        said = [" and ".join(sorted(kind)) or "unknown" for kind in kinds]
        yield f"Costs of removal are {said[0]} before, {said[1]} after."


def _kinds(audit: AuditRecord) -> set[str]:
    known = [head.worth for head in audit.heads if head.worth is not None]
    return {worth.how for worth in known if math.isfinite(worth.cost)}
