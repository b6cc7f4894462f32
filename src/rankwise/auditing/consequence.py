"""What follows from a finding, where it is known what the model loses without the head."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankwise._internals.records import format_number
from rankwise.auditing.importance_records import HeadImportance, ImportanceRecord
from rankwise.auditing.records import Finding, HeadRecord, Place

OF_ONE_HEAD = ("SINK", "CONSTANT", "IDENTITY")
"""Findings that say a head does little: what it is worth says whether that matters."""
OF_RANKS = ("HIGH_RANK", "LOW_RANK")
"""Findings that compare the ranks of a site's heads: how these mix, and nothing about what they are worth."""
EXACTLY = (
    "remove heads one by one, `rankwise audit MODEL --text TEXT --importance exact --out DIR`, in Python "
    '`importance="exact"`'
)
ESTIMATED = "The estimated cost of removal is"
CAUTION = "such estimates sort heads and can fall far short of large costs"
ENTROPY = "the entropy of the predictions"
TOLERANCE = 0.01
"""Of the reference: what counts as within tolerance where no set of heads was looked for."""


PlaceKey = tuple[str, int | None, str, int | None]
"""The stack, the layer, the site and the number of a head."""
Importances = Mapping[PlaceKey, Sequence[HeadImportance | None]]
"""Of the heads at each place: of several where a mixer runs more than once."""


def with_consequences(
    findings: Iterable[Finding], heads: Sequence[HeadRecord], importance: ImportanceRecord
) -> list[Finding]:
    """The findings, and what the model loses without their heads; as they are where that is not known.

    Args:
        findings: of any code.
        heads: records of the heads.
        worth: of the audit.
    """
    importances: dict[PlaceKey, list[HeadImportance | None]] = {}
    for head in heads:
        importances.setdefault((head.stack, head.layer, head.site, head.head), []).append(head.importance)
    return [_with_consequence(finding, importances, importance) for finding in findings]


def _with_consequence(finding: Finding, heads: Importances, importance: ImportanceRecord) -> Finding:
    if finding.code in OF_ONE_HEAD:
        return _of_one(finding, _importance_at(finding.where, finding.where.head, heads), importance)
    if finding.code in OF_RANKS:
        spoken: Sequence[int | None] = finding.heads or [finding.where.head]
        return _of_many(finding, [_importance_at(finding.where, head, heads) for head in spoken], importance)
    if finding.code == "DUPLICATE_HEADS":
        other = finding.evidence.get("nearest_head", math.nan)
        second = None if math.isnan(other) else _importance_at(finding.where, int(other), heads)
        return _of_two(finding, _importance_at(finding.where, finding.where.head, heads), second, importance)
    return finding


def removable(importance: ImportanceRecord) -> Iterator[Finding]:
    """The set of heads that can go together, if there is one.

    Args:
        worth: of the audit.
    """
    found = importance.removable
    if found is None or not found.heads:
        return
    count, (first, *_) = len(found.heads), found.heads
    heads, them = ("this head", "it") if count == 1 else (f"these {count} heads together", "them")
    where = Place()
    if count == 1:
        where = Place(stack=first.stack, layer=first.layer, site=first.site, head=first.head)
    yield Finding(
        code="REMOVABLE",
        severity="info",
        where=where,
        evidence={"heads": count, "cost": found.cost, "relative": found.relative, "loss": found.loss},
        meaning=f"Removing {heads} {share_words(importance, found.cost)}, by a run without {them} on this "
        "audit's batches.",
        remedy=f"rankwise compress MODEL --parts heads --tolerance {found.tolerance:g} --text TEXT --out DIR",
    )


def _of_one(finding: Finding, known: HeadImportance | None, importance: ImportanceRecord) -> Finding:
    if known is None or math.isnan(known.cost):
        return finding
    share = importance.share(known.cost)
    can_go = share <= _tolerance(importance)
    if math.isnan(share):
        remedy = "nothing follows: " + importance.reference_name + ", which costs are compared with, is 0"
    elif known.how == "exact":
        remedy = "take it out" if can_go else "leave it in: the model needs it"
    else:
        remedy = EXACTLY
    shares = _per_cents(importance, known.cost)
    said = f"Without it the loss changes by {shares} ({_change(importance, known.cost)}, exact)"
    if known.how != "exact":
        said = f"{ESTIMATED} {shares}; {CAUTION}"
    return finding.model_copy(
        update={
            "meaning": f"{finding.meaning} {said}.",
            "evidence": {**finding.evidence, "removal_cost": known.cost},
            "remedy": remedy,
        }
    )


def _of_many(
    finding: Finding, known: Sequence[HeadImportance | None], importance: ImportanceRecord
) -> Finding:
    sure = [head for head in known if head is not None and not math.isnan(head.cost)]
    if not sure or len(sure) < len(known):
        return finding
    costs = [head.cost for head in sure]
    exact = all(head.how == "exact" for head in sure)
    alone = len(costs) == 1
    shares = _per_cents(importance, *([costs[0]] if alone else [min(costs), max(costs)]), joined=" to ")
    if exact:
        said = f"Without {'it' if alone else 'one of them'} the loss changes by {shares} (exact)"
    else:
        said = f"{ESTIMATED} {shares}{'' if alone else ' each'}; {CAUTION}"
    return finding.model_copy(
        update={
            "meaning": f"{finding.meaning} {said}.",
            "evidence": {
                **finding.evidence,
                "least_removal_cost": min(costs),
                "most_removal_cost": max(costs),
            },
            "remedy": "nothing: the rank is no fault, and its price is known" if exact else EXACTLY,
        }
    )


def _of_two(
    finding: Finding,
    first: HeadImportance | None,
    second: HeadImportance | None,
    importance: ImportanceRecord,
) -> Finding:
    if first is None or second is None or math.isnan(first.cost) or math.isnan(second.cost):
        return finding
    shares = [importance.share(head_importance.cost) for head_importance in (first, second)]
    within = [share <= _tolerance(importance) for share in shares]
    if first.how == second.how == "exact":
        said = (
            f"Without the one the loss changes by {_per_cents(importance, first.cost)}, without the other by "
        )
        said += f"{_per_cents(importance, second.cost)} (exact)"
        said += ": the pair can lose either" if all(within) else ""
    else:
        both = _per_cents(importance, first.cost, second.cost, joined=" and ")
        said = f"{ESTIMATED} {both}; {CAUTION}"
    return finding.model_copy(
        update={
            "meaning": f"{finding.meaning} {said}.",
            "evidence": {**finding.evidence, "removal_cost": first.cost, "other_cost": second.cost},
        }
    )


def _importance_at(where: Place, head: int | None, heads: Importances) -> HeadImportance | None:
    """Of one head; None where two calls of one mixer have it, or nothing is known."""
    mine = heads.get((where.stack, where.layer, where.site, head), ())
    return mine[0] if len(mine) == 1 else None


def _tolerance(importance: ImportanceRecord) -> float:
    return TOLERANCE if importance.removable is None else importance.removable.tolerance


def share_words(importance: ImportanceRecord, cost: float) -> str:
    """What removing some heads does to the loss: the verb, the share, and what the loss becomes.

    Args:
        worth: of the audit.
        cost: in the unit of its loss; below 0 the loss falls.
    """
    verb = "lowers the loss by" if cost < 0 else "costs"
    return f"{verb} {abs(importance.share(cost)):.2%}{_of(importance)} ({_change(importance, cost)})"


def whole_words(importance: ImportanceRecord) -> str:
    """The loss of the whole model, and what costs are shares of where that is something else.

    Args:
        worth: of the audit.
    """
    if importance.value:
        return f"{format_number(importance.value)} {importance.unit}"
    if _of(importance):
        return f"{importance.unit}, {format_number(importance.reference)} in {importance.reference_name}"
    return "" if importance.unit.startswith("of ") else importance.unit  # a relative loss has said of what


def _of(importance: ImportanceRecord) -> str:
    """What a share is of, where it is neither the loss nor a squared norm that the loss is of already."""
    return f" of {importance.reference_name}" if importance.reference_name == ENTROPY else ""


def _per_cents(importance: ImportanceRecord, *costs: float, joined: str = "") -> str:
    """Costs as shares with as many decimals each; in the loss's unit where there is nothing to divide by."""
    shares = [importance.share(cost) for cost in costs]
    if any(map(math.isnan, shares)):
        return joined.join(f"{cost:+.2g}" for cost in costs) + f" {importance.unit}"
    digits = 2 if max(map(abs, shares)) < 0.1 else 1
    return joined.join(f"{share:+.{digits}%}" for share in shares) + _of(importance)


def _change(importance: ImportanceRecord, cost: float) -> str:
    if importance.value:
        return f"{importance.unit} {importance.value:.4g} → {importance.value + cost:.4g}"
    return f"{importance.loss} {cost:.2g}" + (f" {importance.unit}" if _of(importance) else "")
