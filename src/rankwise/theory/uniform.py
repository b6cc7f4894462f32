"""The rank of attention that looks at nothing: equal weights on all that a row may see."""

import math
from functools import lru_cache

from rankwise.errors import RankwiseError
from rankwise.theory._checks import check_mask_name
from rankwise.theory.null import MAX_ENTRIES, checked_sources, random_head_rank


@lru_cache(maxsize=4096)
def uniform_rank(
    tokens: int,
    mask: str = "full",
    window: int | None = None,
    delta: float = 1e-2,
    sources: int | None = None,
) -> float:
    """Numerical rank of the matrix whose row i has equal weights on all the columns that it may see.

    Without a mask all rows are the same, and the rank is 1. A mask alone makes rank: under the causal one,
    row i is 1/i up to column i, and at δ = 0.01 the rank is 0.94 T at T = 64 and 0.15 T at T = 1,024.

    Formula: without a mask M = 1 1ᵀ/S has only the singular value √(T/S). The causal M is the inverse of the
    matrix B with i on its diagonal and −(i − 1) below it, so σ_i ≥ δ are the eigenvalues ≤ 1/δ² of the
    tridiagonal BᵀB; the signs of its pivots count them (Sturm). Under a window it is decomposed.
    Range: [0, min(T, S)]; at least 1 where δ ≤ 1 and T = S.
    Cost: O(T) for the causal mask; with a window that of one matrix of `random_head_rank`. Answers are kept.

    Args:
        tokens: rows T.
        mask: "full" or "causal".
        window: row i sees column j only if |i − j| is less.
        delta: singular values from here on count.
        sources: columns S, as many as rows by default; without a mask only.

    Returns:
        The rank; NaN under a window of a sequence that is longer than 4,096.

    Raises:
        ShapeError: if a size is not positive or the sizes do not fit the mask.
        RankwiseError: if the mask has no such name, or δ is not positive.

    Examples:
        >>> uniform_rank(64), uniform_rank(64, "causal"), uniform_rank(1024, "causal")
        (1.0, 60.0, 150.0)
    """
    check_mask_name(mask)
    columns = checked_sources(tokens, sources, mask, window)
    if not (math.isfinite(delta) and delta > 0):
        raise RankwiseError(
            "`delta`",
            expected="a finite number above 0",
            got=str(delta),
            fix="It is the smallest singular value that still counts, such as 0.01.",
        )
    if window is not None and window < tokens:
        if tokens * tokens > MAX_ENTRIES:
            return math.nan
        return random_head_rank(tokens, 1, mask, window, math.inf, delta, trials=1).mean
    if mask == "full":
        return float(delta <= math.sqrt(tokens / columns))
    return float(_causal(tokens, delta))


def _causal(tokens: int, delta: float) -> int:
    """Pivots of BᵀB − I/δ² that are not positive.

    BᵀB has 2j² on its diagonal, T² at its end, and −j(j + 1) beside it. No pivot is so near 0 that the next
    one overflows: Sturm counts computed in floating point are those of a matrix with relative errors of a few
    units in the last place (W. Kahan 1966; J. Demmel, "Applied Numerical Linear Algebra", Section 5.3.4).
    """
    shift, count, beside, pivot = (1 / delta) * (1 / delta), 0, 0.0, 1.0
    for j in range(1, tokens + 1):
        pivot = (2.0 * j * j if j < tokens else float(j) * j) - shift - beside * beside / pivot
        pivot = pivot or -math.ulp(shift)
        count += pivot < 0
        beside = float(j) * (j + 1)
    return count
