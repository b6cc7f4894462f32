"""Spearman's rank correlation, for numbers that need no torch."""

import math
from collections.abc import Iterable, Sequence


def spearman(first: Iterable[float], second: Iterable[float]) -> float:
    """Spearman's rank correlation of what is finite in both.

    Formula: Pearson's correlation of the ranks; ties share their mean rank.
    Range: [−1, 1]; NaN below three pairs, and where one side is all alike.
    Cost: O(N log N).

    Args:
        first: numbers.
        second: as many.

    Examples:
        >>> spearman([1.0, 2.0, 3.0, float("nan")], [10.0, 30.0, 20.0, 0.0])
        0.5
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < 3:
        return math.nan
    ranks = [_centred(_ranks([float(pair[side]) for pair in pairs])) for side in (0, 1)]
    norm = math.sqrt(math.prod(math.fsum(rank * rank for rank in side) for side in ranks))
    return math.fsum(a * b for a, b in zip(*ranks, strict=True)) / norm if norm > 0 else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for at in order[start:end]:
            ranks[at] = (start + end - 1) / 2
        start = end
    return ranks


def _centred(ranks: Sequence[float]) -> list[float]:
    mean = math.fsum(ranks) / len(ranks)
    return [rank - mean for rank in ranks]
