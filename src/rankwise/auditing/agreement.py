"""How far estimated costs of removal agree with exact ones: in their order, and in their size."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rankwise._internals.records import format_number
from rankwise._internals.statistics import spearman
from rankwise.auditing.importance_records import HeadImportance

AN_ORDER = "estimates of second order sort heads and can fall far short of large costs"
"""Said wherever an estimate is shown as a number and no exact cost is known."""
OF_BLOCKS = "an order at most: removing a block is a large change, of which estimates can fall far short"


@dataclass(frozen=True)
class Agreement:
    """Of the costs that are known both ways."""

    count: int
    spearman: float
    median: float
    """Of estimate over exact, over those whose exact cost is above 0."""
    costliest: float
    """Estimate over exact where the exact cost is largest."""

    def __str__(self) -> str:
        return (
            f"Spearman {format_number(self.spearman, 2)}; estimate over exact "
            f"{format_number(self.median, 2)} at the median, "
            f"{format_number(self.costliest, 2)} at the costliest"
        )


def agreement(importances: Iterable[HeadImportance | None]) -> Agreement | None:
    """Hold estimates against exact costs.

    Args:
        worths: of heads, or of blocks.

    Returns:
        None where fewer than three are known both ways.

    Examples:
        >>> both = [(1.0, 1.0), (2.0, 4.0), (3.0, 12.0)]
        >>> str(agreement(HeadImportance(estimate=estimate, exact=exact) for estimate, exact in both))
        'Spearman 1.00; estimate over exact 0.50 at the median, 0.25 at the costliest'
    """
    known = [
        (importance.estimate, importance.exact)
        for importance in importances
        if importance is not None and math.isfinite(importance.estimate) and math.isfinite(importance.exact)
    ]
    if len(known) < 3:
        return None
    ratios = [estimate / exact for estimate, exact in known if exact > 0]
    estimate, exact = max(known, key=lambda pair: pair[1])
    return Agreement(
        count=len(known),
        spearman=spearman([estimate for estimate, _ in known], [exact for _, exact in known]),
        median=median(ratios) if ratios else math.nan,
        costliest=estimate / exact if exact > 0 else math.nan,
    )


def estimate_words(
    heads: Sequence[HeadImportance | None], blocks: Sequence[HeadImportance | None]
) -> list[tuple[str, str]]:
    """What to say of estimates: how they agree with exact costs, or that they are an order; a name and words.

    Args:
        heads: the worth of heads.
        blocks: the worth of blocks.
    """
    said = []
    for name, importances, caution in (("heads", heads, AN_ORDER), ("blocks", blocks, OF_BLOCKS)):
        found = agreement(importances)
        estimated = any(
            importance is not None and importance.how == "estimated" and math.isfinite(importance.cost)
            for importance in importances
        )
        if found is not None:
            said.append((f"Estimated against exact, {name}", str(found)))
        elif estimated:
            said.append((f"Estimated costs of {name}", caution))
    return said
