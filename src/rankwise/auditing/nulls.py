"""The nulls of a head on one sequence: of its own length, under its own mask, at each threshold of a band."""

import math

from rankwise.auditing.masks import Pattern
from rankwise.theory import interpolated_random_rank, uniform_rank

BAND = (10**-0.5, 10**-0.25, 1.0, 10**0.25, 10**0.5)
"""Thresholds at which ranks are counted, as multiples of δ: one decade, from δ/√10 to √10 δ.

That a δ is 0.01 and not 0.02 or 0.005 is a convention: what a reader is told must not hang on it. A wider
band reaches where rank says nothing: at T = 512 and K = 32, random queries and keys give rank 0.996 T at
δ = 1e-4 and 0.07 T at 1e-1. Ranks and nulls fall as δ grows; no two neighbours are more than 1.8 times apart.
"""


def thresholds(delta: float) -> tuple[float, ...]:
    """The thresholds of the band around δ.

    Args:
        delta: the stated threshold, which is one of them.

    Examples:
        >>> [round(threshold, 4) for threshold in thresholds(0.01)]
        [0.0032, 0.0056, 0.01, 0.0178, 0.0316]
    """
    return tuple(delta * factor for factor in BAND)


def random_rank(
    tokens: int, sources: int, seen: Pattern, width: int | None, scale: float | None, delta: float
) -> float:
    """The mean rank that random queries and keys give, or NaN where that is not known.

    Args:
        tokens: rows T.
        sources: columns S.
        seen: the mask.
        width: K; None where the model formed its weights itself.
        scale: what scores are multiplied with.
        delta: singular values from here on count.
    """
    mask = _mask(tokens, sources, seen)
    if mask is None or width is None or scale is None or scale <= 0:
        return math.nan
    columns = None if tokens == sources else sources
    return interpolated_random_rank(
        tokens, width, mask, seen.window, temperature=1 / scale, delta=delta, sources=columns
    ).mean


def uniform_null(tokens: int, sources: int, seen: Pattern, delta: float) -> float:
    """The rank of equal weights on all that a row may see, or NaN where that is not known.

    Args:
        tokens: rows T.
        sources: columns S.
        seen: the mask.
        delta: singular values from here on count.
    """
    mask = _mask(tokens, sources, seen)
    return math.nan if mask is None else uniform_rank(tokens, mask, seen.window, delta, sources)


def _mask(tokens: int, sources: int, seen: Pattern) -> str | None:
    """The name that theory has for it; the window, if any, comes beside it."""
    mask = seen.base if seen.name == "window" else seen.name
    square = tokens == sources
    if mask not in ("full", "causal") or not (square or (mask == "full" and seen.window is None)):
        return None
    return mask
