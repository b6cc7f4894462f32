"""Costs of removal in findings, and the words for such costs; no torch."""

import math
from collections.abc import Mapping, Sequence

from rankwise._internals.records import format_number
from rankwise.auditing.records import Finding, HeadId, HeadRecord
from rankwise.importance.records import HeadImportance, ImportanceRecord, RemovableSet, agreement

EXACTLY = (
    "remove heads one by one, `rankwise audit MODEL --text TEXT --importance exact --out DIR`, in Python "
    '`importance="exact"`'
)
ESTIMATED = "The estimated cost of removal is"
CAUTION = "such estimates sort heads and can fall far short of large costs"
ENTROPY = "the entropy of the predictions"
TOLERANCE = 0.01
"""Largest share of the reference that counts as removable, if no set of heads was searched for."""


def with_removal_costs(
    findings: Sequence[Finding],
    about: Mapping[str, str],
    heads: Sequence[HeadRecord],
    importance: ImportanceRecord,
) -> list[Finding]:
    """Return findings that state the cost of removing their heads, if all these costs are known.

    Args:
        findings: findings with any codes.
        about: subject (``head``, ``group`` or ``mixer``) of the codes that state costs.
        heads: records of all heads.
        importance: reference of the costs.
    """
    known = {head.id: head.importance for head in heads}
    return [
        _with_removal_cost(finding, about[finding.code], known, importance)
        if finding.code in about
        else finding
        for finding in findings
    ]


def _with_removal_cost(
    finding: Finding, about: str, known: Mapping[HeadId, HeadImportance | None], importance: ImportanceRecord
) -> Finding:
    costs, exact = [], True
    numbers: Sequence[int | None] = finding.heads or [finding.where.head]
    for number in numbers:
        head = known.get(finding.where.at(number))
        if head is None or math.isnan(head.cost):
            return finding
        costs.append(head.cost)
        exact = exact and head.method == "exact"
    low, high, alone = min(costs), max(costs), len(costs) == 1
    within = importance.share(high) <= _tolerance(importance)
    shares = _percent(importance, low) if alone else _percent(importance, low, high)
    if exact:
        change = f"{_change(importance, low)}, " if about == "head" else ""
        said = f"Without {'it' if alone else 'one of them'} the loss changes by {shares} ({change}exact)"
        said += ": any one of them can be removed" if about == "group" and within else ""
    else:
        said = f"{ESTIMATED} {shares}{'' if alone else ' each'}; {CAUTION}"
    remedy = EXACTLY
    if about == "group":
        remedy = finding.remedy
    elif about == "head" and math.isnan(importance.share(low)):
        remedy = f"nothing follows: {importance.reference_name}, which costs are compared with, is 0"
    elif about == "head" and exact:
        remedy = "take it out" if within else "leave it in: the model needs it"
    elif exact:
        remedy = "nothing: the rank is no fault, and its price is known"
    price = {"least_removal_cost": low, "most_removal_cost": high}
    price = {"removal_cost": low} if about == "head" else price
    meaning, evidence = f"{finding.meaning} {said}.", finding.evidence | price
    return finding.model_copy(update={"meaning": meaning, "evidence": evidence, "remedy": remedy})


def describe_removable(importance: ImportanceRecord, found: RemovableSet) -> str:
    """Return a sentence on the cost of removing a set of heads."""
    count = len(found.heads)
    heads, them = ("this head", "it") if count == 1 else (f"these {count} heads together", "them")
    return (
        f"Removing {heads} {share_words(importance, found.cost)}, by a run without {them} on this audit's "
        "batches."
    )


def share_words(importance: ImportanceRecord, cost: float) -> str:
    """Return what a cost of removal does to the loss: a verb, the share, and the loss before and after.

    Args:
        importance: reference of the cost.
        cost: cost in the unit of the loss; below 0 the loss falls.
    """
    verb = "lowers the loss by" if cost < 0 else "costs"
    return f"{verb} {abs(importance.share(cost)):.2%}{_of(importance)} ({_change(importance, cost)})"


def whole_words(importance: ImportanceRecord) -> str:
    """Return the loss of the whole model, and the reference of costs if that is something else."""
    if importance.value:
        return f"{format_number(importance.value)} {importance.unit}"
    if _of(importance):
        return f"{importance.unit}, {format_number(importance.reference)} in {importance.reference_name}"
    return "" if importance.unit.startswith("of ") else importance.unit  # a relative loss names it


def _tolerance(importance: ImportanceRecord) -> float:
    return TOLERANCE if importance.removable is None else importance.removable.tolerance


def _of(importance: ImportanceRecord) -> str:
    """Return the reference of a share, unless it is the loss or the loss already names it."""
    return f" of {importance.reference_name}" if importance.reference_name == ENTROPY else ""


def _percent(importance: ImportanceRecord, *costs: float) -> str:
    """Return costs as shares with equally many decimals, or in the unit of the loss if the reference is 0."""
    shares = [importance.share(cost) for cost in costs]
    if any(map(math.isnan, shares)):
        return " to ".join(f"{cost:+.2g}" for cost in costs) + f" {importance.unit}"
    digits = 2 if max(map(abs, shares)) < 0.1 else 1
    return " to ".join(f"{share:+.{digits}%}" for share in shares) + _of(importance)


def _change(importance: ImportanceRecord, cost: float) -> str:
    if importance.value:
        return f"{importance.unit} {importance.value:.4g} → {importance.value + cost:.4g}"
    return f"{importance.loss} {cost:.2g}" + (f" {importance.unit}" if _of(importance) else "")


HEAD_CAUTION = "estimates of second order sort heads and can fall far short of large costs"
"""Caution for estimates of heads without exact costs."""
BLOCK_CAUTION = "an order at most: removing a block is a large change, of which estimates can fall far short"


def estimate_words(
    heads: Sequence[HeadImportance | None], blocks: Sequence[HeadImportance | None]
) -> list[tuple[str, str]]:
    """Return a name and words for estimates: their agreement with exact costs, or a caution."""
    words = []
    for name, importances, caution in (("heads", heads, HEAD_CAUTION), ("blocks", blocks, BLOCK_CAUTION)):
        found = agreement(importances)
        estimated = any(
            importance is not None and importance.method == "estimated" and math.isfinite(importance.cost)
            for importance in importances
        )
        if found is not None:
            words.append((f"Estimated against exact, {name}", str(found)))
        elif estimated:
            words.append((f"Estimated costs of {name}", caution))
    return words
