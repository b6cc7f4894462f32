"""What heads are worth against what they measure: the numbers of the scatter plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.audit.agreement import estimate_words
from rankwise.audit.consequence import share_words, whole_words
from rankwise.audit.measures import shown
from rankwise.audit.records import AuditRecord
from rankwise.audit.worth_records import HeadWorth, WorthRecord
from rankwise.rank_correlation import spearman
from rankwise.report.pages import short

COST = "removal_cost"


def scatter(audit: AuditRecord, columns: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Name the columns that can stand against the cost of removal, with their rank correlations.

    Args:
        audit: the audit.
        columns: the numbers of its heads, by the measures that have a scale.

    Returns:
        What the page's script draws; None where no head has a cost.
    """
    costs = columns.get(COST)
    if audit.worth is None or costs is None:
        return None
    return {
        "cost": COST,
        "axis": f"cost of removal{'' if _is_exact(audit) else ', estimated'}, {audit.worth.unit}",
        "correlations": {name: spearman(values, costs) for name, values in columns.items() if name != COST},
    }


def head_costs(audit: AuditRecord) -> dict[str, Any] | None:
    """What removing each head costs, for the head that is open: both ways where both are known.

    Args:
        audit: the audit.

    Returns:
        Columns of ``exact`` and ``estimate``; None where worth was not asked for.
    """
    worth = audit.worth
    if worth is None:
        return None
    known = [head.worth or HeadWorth() for head in audit.heads]
    return {
        "unit": worth.unit,
        "reference": None if math.isnan(worth.share(1.0)) else 1 / worth.share(1.0),
        "of": worth.reference_name,
        "exact": [short(one.exact) for one in known],
        "estimate": [short(one.estimate) for one in known],
    }


def _is_exact(audit: AuditRecord) -> bool:
    return all(head.worth is None or head.worth.why_not or head.worth.how == "exact" for head in audit.heads)


def worth_words(audit: AuditRecord) -> dict[str, Any] | None:
    """What the page says of worth: plain text, not escaped.

    Args:
        audit: the audit.

    Returns:
        ``facts`` (pairs of a name and words) and ``blocks`` (rows of a table); None where nothing is known.
    """
    worth = audit.worth
    if worth is None:
        return None
    whole = whole_words(worth)
    known = [head.worth for head in audit.heads if head.worth is not None and not head.worth.why_not]
    costs = sorted({head.how for head in known})
    facts = [
        ("Loss", f"{worth.loss}: {whole}" if whole else worth.loss),
        (
            "Costs of heads",
            f"{' and '.join(costs) or 'not known'}; {worth.removal} in a head's place",
        ),
    ]
    facts += estimate_words([head.worth for head in audit.heads], worth.blocks)
    facts += [("Heads that can go together", words) for words in _set(worth)]
    blocks = [
        (block.stack, block.layer, _estimate(block.estimate), _cost(worth, block.exact))
        for block in worth.blocks
    ]
    return {"facts": facts, "blocks": blocks, "notes": worth.notes}


def _set(worth: WorthRecord) -> list[str]:
    found = worth.removable
    if found is None:
        return []
    if not found.heads:
        return [f"none was found at {found.tolerance:.2%} of {worth.reference_name}"]
    layers: dict[tuple[str, int], list[int]] = {}
    for head in found.heads:
        layers.setdefault((head.stack, head.layer), []).append(head.head)
    where = "; ".join(
        f"layer {layer}: {', '.join(map(str, sorted(heads)))}" for (_, layer), heads in sorted(layers.items())
    )
    count = len(found.heads)
    heads, them = ("1 head", "it") if count == 1 else (f"{count} heads together", "them")
    return [f"removing {heads} {share_words(worth, found.cost)}, by a run without {them} ({where})"]


def _estimate(cost: float) -> str:
    """Without a share: what removing a block costs is far from second order."""
    return "–" if math.isnan(cost) else shown(cost, 4)


def _cost(worth: WorthRecord, cost: float) -> str:
    share = worth.share(cost)
    return "–" if math.isnan(cost) else shown(cost, 4) + ("" if math.isnan(share) else f" ({share:.1%})")
