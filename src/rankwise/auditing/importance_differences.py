"""Whether what two audits were asked for compares: costs of removal, and measures at fresh weights."""

import math
from collections.abc import Iterator, Sequence

from rankwise.auditing.measures import HEAD_MEASURES
from rankwise.auditing.records import AuditRecord

COST = "removal_cost"
"""The measure of heads that has the unit of a loss, and no range of its own."""


def importance_differences(before: AuditRecord, after: AuditRecord) -> list[str]:
    """In what the worth of two audits differs, a sentence each; none where their costs compare.

    Args:
        before: one audit.
        after: the other.
    """
    return [f"{words} The changes leave costs of removal out." for words in _differences(before, after)]


FRESH = tuple(measure.name for measure in HEAD_MEASURES if measure.name.startswith("init_"))
"""The measures of heads that an audit without a baseline does not have."""


def baseline_differences(before: AuditRecord, after: AuditRecord) -> list[str]:
    """That one of two audits alone was held against fresh weights, in a sentence; none where that is not so.

    Args:
        before: one audit.
        after: the other.
    """
    if (before.baseline is None) == (after.baseline is None):
        return []
    alone, other = ("after", "before") if before.baseline is None else ("before", "after")
    return [
        f"Only the audit {alone} has a baseline: the changes leave what heads measure at fresh weights out. "
        f"Its HIGH_RANK and LOW_RANK are against fresh weights, those of the audit {other} against the "
        "nulls."
    ]


def cost_quantity(audit: AuditRecord) -> str:
    """What costs of removal are of, in words that two audits share where their costs compare; empty of none.

    Args:
        audit: the audit.
    """
    importance = audit.importance
    if importance is None or not _kinds(audit):
        return ""
    how = " and ".join(sorted(_kinds(audit)))
    return f"{importance.loss} ({importance.unit}), {how}, {importance.removal} in a head's place"


def history_differences(audits: Sequence[AuditRecord], names: Sequence[str]) -> list[str]:
    """In what several audits do not compare, a sentence each.

    Args:
        audits: in order.
        names: of the audits.
    """
    found: list[str] = []
    quantities = list(dict.fromkeys(filter(None, map(cost_quantity, audits))))
    if len(quantities) > 1:
        said = "; ".join(quantities)
        found.append(
            f"Costs of removal are of {len(quantities)} quantities, and no curve leads from one to another: "
            f"{said}."
        )
    for what, has in (
        ("importance", [x.importance is not None for x in audits]),
        ("a baseline", [x.baseline is not None for x in audits]),
    ):
        some = [name for name, is_there in zip(names, has, strict=True) if is_there]
        if 0 < len(some) < len(audits):
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            found.append(f"Only in {', '.join(some[:3])}{more}: {what}.")
    return found


def cost_scale(before: AuditRecord, after: AuditRecord) -> float:
    """The larger loss of the two whole models; 1 where it is 0, how far an output moves: a share by itself.

    Args:
        before: one audit.
        after: the other.
    """
    losses = [abs(audit.importance.value) for audit in (before, after) if audit.importance is not None]
    known = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    return max(known, default=1.0)


def _differences(before: AuditRecord, after: AuditRecord) -> Iterator[str]:
    old, other = before.importance, after.importance
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
    known = [head.importance for head in audit.heads if head.importance is not None]
    return {importance.how for importance in known if math.isfinite(importance.cost)}
