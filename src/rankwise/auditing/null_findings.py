"""Heads with more or less rank than heads that know nothing: HIGH_RANK and LOW_RANK."""

import math
from collections.abc import Iterator, Sequence

from rankwise.auditing.head_findings import MIN_TOKENS, grouped, place_of, site_of
from rankwise.auditing.measures import NULLS
from rankwise.auditing.mixer_kinds import mixer_kind
from rankwise.auditing.records import Finding, HeadRecord, RankAt

HIGH_RANK, LOW_RANK = 1.25, 0.5
"""Rank relative to every null that is known, at every threshold of the band; the spread of a hardmax rank at
T ≥ 32 is below 8 % of it. Random winners, random queries and keys at the head's scale, and equal weights are
heads that know nothing, at a temperature of 0, of the head, and without end: a rank between two of them is
that of such a head at another temperature. Without a mask equal weights have rank 1, which no rank is below.
"""

NULL_REMEDY = "see what training did: `rw.audit(model, batches, baseline=True)`"
"""No null knows the weights a model starts with."""
BASELINE_REMEDY = "see what the model loses without it: `rw.audit(model, batches, importance=True)`"
"""More or less rank than at the start is what training did, and no fault."""


def baseline_findings(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """HIGH_RANK and LOW_RANK, once a layer and direction, against the same heads at fresh weights.

    Args:
        heads: all heads of the audit.
    """
    for _, group in grouped(heads, site_of):
        site = [head for head in group if _is_long_enough(head) and has_baseline(head)]
        for code, words in (("HIGH_RANK", "more"), ("LOW_RANK", "less")):
            found = [head for head in site if beyond_null(head) == code]
            if not found:
                continue
            extreme = max(found, key=_distance_from_baseline)
            known = extreme.baseline
            assert known is not None
            low, at, high = (known.band[number] for number in (0, len(known.band) // 2, -1))
            fresh = (at.rank_low + at.rank_high) / 2
            yield Finding(
                code=code,
                severity="info",
                where=place_of(extreme),
                evidence={
                    "heads": len(found),
                    "of": len(site),
                    "numerical_rank": _middle_rank(extreme),
                    "baseline": fresh,
                    "baseline_std": at.std,
                    "difference": (at.difference_low + at.difference_high) / 2,
                    "margin": at.margin,
                    "pairs": at.pairs,
                    "seeds": known.seeds,
                    **extreme.band[len(extreme.band) // 2].nulls,
                    "delta_low": low.delta,
                    "delta_high": high.delta,
                },
                meaning=f"{len(found)} of {len(site)} heads have {words} rank than the same heads at fresh "
                f"weights on the same data: head {extreme.head} has {_middle_rank(extreme):.0f} of "
                f"{extreme.smaller:.0f}, fresh {fresh:.0f}; over sequences and seeds the difference varies "
                f"by ±{at.margin:.2g}. So it is for δ from {low.delta:.2g} to {high.delta:.2g}.",
                remedy=BASELINE_REMEDY,
                heads=[head.head for head in found],
            )


def has_baseline(head: HeadRecord) -> bool:
    """Whether the head is held against fresh weights: their spread is known, and the scale of its matrix.

    Args:
        head: the head.
    """
    return mixer_kind(head.kind).scale_is_known and head.baseline is not None and head.baseline.judged


def _is_long_enough(head: HeadRecord) -> bool:
    return min(head.tokens, head.sources) >= MIN_TOKENS


def _distance_from_baseline(head: HeadRecord) -> float:
    """At δ, on a scale of ratios."""
    assert head.baseline is not None
    at = head.baseline.band[len(head.baseline.band) // 2]
    return abs(math.log((_middle_rank(head) + 1) / ((at.rank_low + at.rank_high) / 2 + 1)))


def null_findings(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """HIGH_RANK and LOW_RANK against nulls that need no model, once a layer and direction.

    Most heads of a trained model lie on one side or the other.

    Args:
        heads: all heads of the audit.
    """
    for _, group in grouped(heads, site_of):
        site = [head for head in group if _is_long_enough(head) and _judged(head) and not has_baseline(head)]
        for code, words in (("HIGH_RANK", f"over {HIGH_RANK:g} times"), ("LOW_RANK", "less than half")):
            found = [head for head in site if beyond_null(head) == code]
            if not found:
                continue
            extreme = max(found, key=_distance_from_nulls)
            low, at, high = (extreme.band[number] for number in (0, len(extreme.band) // 2, -1))
            said = ", ".join(f"{NULLS[name]} {null:.0f}" for name, null in at.nulls.items())
            yield Finding(
                code=code,
                severity="info",
                where=place_of(extreme),
                evidence={
                    "heads": len(found),
                    "of": len(site),
                    "numerical_rank": _middle_rank(extreme),
                    **at.nulls,
                    "delta_low": low.delta,
                    "delta_high": high.delta,
                },
                meaning=f"{len(found)} of {len(site)} heads have {words} the rank of each reference "
                f"(of {extreme.tokens:.0f}: {said}), whatever δ from {low.delta:.2g} to {high.delta:.2g}.",
                remedy=NULL_REMEDY,
                heads=[head.head for head in found],
            )


def beyond_null(head: HeadRecord) -> str | None:
    """HIGH_RANK or LOW_RANK where that holds at every threshold of the band.

    Against the same head at fresh weights, where the spread of those is known; else against every known null.

    Args:
        head: the head.
    """
    if head.baseline is not None and has_baseline(head):
        at = head.baseline.band
        if all(point.difference_low > point.margin for point in at):
            return "HIGH_RANK"
        return "LOW_RANK" if all(-point.difference_high > point.margin for point in at) else None
    points = _judged(head)
    if points and all(point.rank_low > HIGH_RANK * max(point.nulls.values()) for point in points):
        return "HIGH_RANK"
    if points and all(point.rank_high < LOW_RANK * min(point.nulls.values()) for point in points):
        return "LOW_RANK"
    return None


def _judged(head: HeadRecord) -> list[RankAt]:
    """The thresholds of the band; none where one of them has no null."""
    return head.band if all(point.nulls for point in head.band) else []


def _distance_from_nulls(head: HeadRecord) -> float:
    """How far beyond the nearest null, at δ, on a scale of ratios."""
    nulls = head.band[len(head.band) // 2].nulls.values()
    return min(abs(math.log((_middle_rank(head) + 1) / (null + 1))) for null in nulls)


def _middle_rank(head: HeadRecord) -> float:
    """The numerical rank; the middle of its interval where an estimate can only bound it."""
    return (head.least_rank + head.most_rank) / 2 if math.isnan(head.numerical_rank) else head.numerical_rank
