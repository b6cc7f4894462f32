"""What heads are worth against what they measure: the numbers of the scatter plot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise._internals.records import format_number
from rankwise._internals.statistics import spearman
from rankwise.auditing.importance_findings import estimate_words, share_words, whole_words
from rankwise.auditing.result import Audit
from rankwise.importance.records import HeadImportance, ImportanceRecord
from rankwise.report.pages import short

COST = "removal_cost"


def scatter(audit: Audit, columns: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Name the columns that can stand against the cost of removal, with their rank correlations.

    Args:
        audit: the audit.
        columns: the numbers of its heads, by the measures that have a scale.

    Returns:
        What the page's script draws; None where no head has a cost.
    """
    costs = columns.get(COST)
    if audit.importance is None or costs is None:
        return None
    return {
        "cost": COST,
        "axis": f"cost of removal{'' if _is_exact(audit) else ', estimated'}, {audit.importance.unit}",
        "correlations": {name: spearman(values, costs) for name, values in columns.items() if name != COST},
    }


def head_costs(audit: Audit) -> dict[str, Any] | None:
    """What removing each head costs, for the head that is open: both ways where both are known.

    Args:
        audit: the audit.

    Returns:
        Columns of ``exact`` and ``estimate``; None where worth was not asked for.
    """
    importance = audit.importance
    if importance is None:
        return None
    known = [head.importance or HeadImportance() for head in audit.heads]
    return {
        "unit": importance.unit,
        "reference": None if math.isnan(importance.share(1.0)) else 1 / importance.share(1.0),
        "of": importance.reference_name,
        "exact": [short(one.exact) for one in known],
        "estimate": [short(one.estimate) for one in known],
    }


def _is_exact(audit: Audit) -> bool:
    return all(
        head.importance is None or head.importance.why_not or head.importance.method == "exact"
        for head in audit.heads
    )


def importance_words(audit: Audit) -> dict[str, Any] | None:
    """What the page says of worth: plain text, not escaped.

    Args:
        audit: the audit.

    Returns:
        ``facts`` (pairs of a name and words) and ``blocks`` (rows of a table); None where nothing is known.
    """
    importance = audit.importance
    if importance is None:
        return None
    whole = whole_words(importance)
    known = [
        head.importance for head in audit.heads if head.importance is not None and not head.importance.why_not
    ]
    costs = sorted({head.method for head in known})
    facts = [
        ("Loss", f"{importance.loss}: {whole}" if whole else importance.loss),
        (
            "Costs of heads",
            f"{' and '.join(costs) or 'not known'}; {importance.ablation} in a head's place",
        ),
    ]
    facts += estimate_words([head.importance for head in audit.heads], importance.blocks)
    facts += [("Heads that can go together", words) for words in _set(importance)]
    blocks = [
        (block.stack, block.layer, _estimate(block.estimate), _cost(importance, block.exact))
        for block in importance.blocks
    ]
    return {"facts": facts, "blocks": blocks, "notes": importance.notes}


def _set(importance: ImportanceRecord) -> list[str]:
    found = importance.removable
    if found is None:
        return []
    if not found.heads:
        return [f"none was found at {found.tolerance:.2%} of {importance.reference_name}"]
    layers: dict[tuple[str, int | None], list[str]] = {}
    for head in sorted(found.heads, key=lambda head: head.sort_key):
        layers.setdefault((head.stack, head.layer), []).append(str(head.head))
    where = "; ".join(f"layer {layer}: {', '.join(heads)}" for (_, layer), heads in layers.items())
    count = len(found.heads)
    heads, them = ("1 head", "it") if count == 1 else (f"{count} heads together", "them")
    return [f"removing {heads} {share_words(importance, found.cost)}, by a run without {them} ({where})"]


def _estimate(cost: float) -> str:
    """Without a share: what removing a block costs is far from second order."""
    return "–" if math.isnan(cost) else format_number(cost, 4)


def _cost(importance: ImportanceRecord, cost: float) -> str:
    share = importance.share(cost)
    return (
        "–" if math.isnan(cost) else format_number(cost, 4) + ("" if math.isnan(share) else f" ({share:.1%})")
    )
