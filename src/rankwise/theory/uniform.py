"""Numerical rank of uniform attention (equal weights on all visible columns) under a mask."""

import math
from functools import lru_cache

from rankwise._internals.statistics import check_delta
from rankwise.theory.random_rank import MAX_ENTRIES, check_sizes, random_head_rank


@lru_cache(maxsize=4096)
def uniform_rank(
    tokens: int,
    mask: str = "full",
    window: int | None = None,
    delta: float = 1e-2,
    sources: int | None = None,
) -> float:
    """Return the numerical rank of uniform attention: equal weights on all columns that a row sees.

    Without a mask all rows are equal, and the rank is 1. A mask alone increases the rank: under the causal
    mask, row i (counted from 1) has the entries 1/i up to column i. For δ = 0.01 and the causal mask, the
    rank is 0.94 T at T = 64 and 0.15 T at T = 1,024.

    Formula: without a mask, M = 1 1ᵀ/S has one nonzero singular value, √(T/S). The causal M is the inverse of
    a matrix B with i on the diagonal of row i and −(i − 1) below the diagonal. So each singular value ≥ δ of
    M corresponds to an eigenvalue ≤ 1/δ² of the tridiagonal BᵀB. The signs of pivots count these eigenvalues
    (Sturm). Under a window, the singular values of M are computed.
    Range: [0, min(T, S)]; at least 1 if δ ≤ 1 and T = S. NaN if T > 4,096 and the window is shorter than T.
    Cost: O(T) time for the causal mask; one trial of `random_head_rank` with a window. Results are cached.

    Args:
        tokens: number of rows T.
        mask: "full" or "causal".
        window: number w such that row i sees column j only if |i − j| < w.
        delta: threshold δ; singular values ≥ δ are counted.
        sources: number of columns S; T by default. S ≠ T is allowed only without a mask.

    Raises:
        ShapeError: if the sizes do not match the mask.
        InputError: if a size or δ is not positive, or the name of the mask is unknown.

    Examples:
        >>> uniform_rank(64), uniform_rank(64, "causal"), uniform_rank(1024, "causal")
        (1.0, 60.0, 150.0)
    """
    columns = check_sizes(tokens, sources, mask, window)
    check_delta(delta)
    if window is not None and window < tokens:
        if tokens * tokens > MAX_ENTRIES:
            return math.nan
        return random_head_rank(tokens, 1, mask, window, math.inf, delta, trials=1).mean
    if mask == "full":
        return float(delta <= math.sqrt(tokens / columns))
    return float(_causal(tokens, delta))


def _causal(tokens: int, delta: float) -> int:
    """Return the numerical rank under the causal mask: the number of negative pivots of BᵀB − I/δ².

    The tridiagonal BᵀB, with B as in `uniform_rank`, has diagonal entries 2j², but T² at the end, and
    −j(j + 1) next to the diagonal. A pivot of 0 is replaced by a tiny negative number. The count in floating
    point is exact for a matrix whose entries differ from BᵀB by a few ulp (W. Kahan 1966; J. Demmel,
    "Applied Numerical Linear Algebra", 5.3.4).
    """
    shift, count, beside, pivot = (1 / delta) * (1 / delta), 0, 0.0, 1.0  # not 1/δ², because δ² may underflow
    for j in range(1, tokens + 1):
        pivot = (2.0 * j * j if j < tokens else float(j) * j) - shift - beside * beside / pivot
        pivot = pivot or -math.ulp(shift)
        count += pivot < 0
        beside = float(j) * (j + 1)
    return count
