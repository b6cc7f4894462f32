"""Numerical rank of an attention head with random queries and keys, by simulation or interpolation."""

import math
from itertools import pairwise, product

from rankwise._internals.statistics import check_delta
from rankwise.errors import ShapeError, in_range, one_of, whole_number
from rankwise.theory.barrier import MASKS
from rankwise.theory.random_heads import SimulatedRank, simulate_spectra

MAX_ENTRIES = 4096 * 4096
"""Largest T·S of a simulated softmax matrix; a trial then takes about 10 s on one core and 0.4 GiB."""
MAX_HARDMAX_ENTRIES = 16384 * 16384
"""Largest T·S of a simulated hardmax matrix; a trial then takes 2 s, in blocks of rows."""
ALWAYS_SIMULATED = 32
"""Largest sequence length that is always simulated and never interpolated."""


def random_head_rank(
    tokens: int,
    head_dim: int,
    mask: str = "full",
    window: int | None = None,
    temperature: float | None = None,
    delta: float = 1e-2,
    trials: int | None = None,
    seed: int = 0,
    sources: int | None = None,
    interpolate: bool = False,
) -> SimulatedRank:
    """Return the numerical rank of softmax(Q Kᵀ/τ) for independent N(0, 1) queries Q and keys K.

    The rank depends on the head width K and the temperature τ. For τ → 0 and K → ∞, the rank tends to the
    value of `rank_barrier`; for τ → ∞, to the value of `uniform_rank`.

    ``interpolate`` is for sequences of many different lengths. Only lengths up to 32, lengths 32·2^(i/2) and
    the first four multiples of the window are simulated. The rank at any other length is interpolated: if T
    exceeds the window, linearly in T, otherwise on logarithmic scales of rank and T (and of S, if S ≠ T).
    Compared with simulation, the error is below 1 % for K ≥ 4 and 4 % for K < 4, plus noise of the trials.

    Range: [1, min(T, S)] for the usual δ. The rank grows with K, and saturates under the full mask.
    Cost: trials × O(T S (K + min(T, S))) time. Spectra are cached, so another δ only takes a count. On one
    CPU core a trial takes 5 ms at T = 256, 0.15 s at 1,024 and 10 s at 4,096, the maximum. Hardmax (τ = 0)
    needs no decomposition and is allowed up to T = 16,384. With ``interpolate``, all lengths up to 1,024
    together take about 2 s, and all lengths up to 4,096 about 30 s.
    Source: the randomly initialized heads of "On the Limitation and Redundancy of Transformers: A Rank
    Perspective". If token states X are orthonormal, X Wq and X Wk have the distribution of Q and K.

    Args:
        tokens: number of rows T.
        head_dim: head width K.
        mask: "full" or "causal".
        window: number w such that row i sees column j only if |i − j| < w; with either mask.
        temperature: τ, √K by default; 0.0 means hardmax, `math.inf` equal weights on all visible columns.
        delta: threshold δ; singular values ≥ δ are counted.
        trials: number of simulated matrices, 8 by default. Interpolated lengths T > 1,024 take fewer, at
            least 2, to save time, because their ranks vary by less than 1 %.
        seed: random seed of a local generator; the global generator of torch is not used.
        sources: number of columns S; T by default.
        interpolate: True to interpolate between simulated lengths.

    Returns:
        Mean and standard deviation over trials. If ``interpolate`` is True and the length exceeds the
        maximum, both are NaN, and the number of trials is 0.

    Raises:
        ShapeError: if sizes and mask do not match, or the matrix is too large to be simulated.
        InputError: if the name of the mask is unknown, or a number is out of range.

    Examples:
        >>> random_head_rank(64, 8, temperature=0.0, trials=4).mean < 64 * (1 - 1 / 2.718)
        True
        >>> random_head_rank(181, 16).mean == random_head_rank(181, 16, interpolate=True).mean
        True
        >>> random_head_rank(100_000, 16, interpolate=True)
        SimulatedRank(mean=nan, std=nan, trials=0)
    """
    columns = check_sizes(tokens, sources, mask, window)
    whole_number("`head_dim`", head_dim)
    if trials is not None:
        whole_number("`trials`", trials)
    tau = math.sqrt(head_dim) if temperature is None else float(temperature)
    hint = "0 means hardmax, None √K, infinity equal weights."
    in_range("`temperature`", tau, "[0, inf]", fix=hint)
    check_delta(delta)
    limit = MAX_HARDMAX_ENTRIES if tau == 0 else MAX_ENTRIES

    def simulate(rows: int, columns: int, trials: int) -> SimulatedRank:
        key = (rows, columns, head_dim, mask, window, tau, trials, seed)
        spectra = simulate_spectra(*key)
        return (spectra if delta >= spectra.least_delta else simulate_spectra(*key, precise=True)).rank(delta)

    if not interpolate:
        if tokens * columns > limit:
            raise ShapeError(
                "`tokens`",
                expected=f"at most {limit:,} entries in the matrix, such as T = S = {math.isqrt(limit):,}",
                got=f"{tokens:,} × {columns:,}",
                fix="Simulate a shorter sequence, or use rank_barrier, which needs no simulation.",
            )
        return simulate(tokens, columns, 8 if trials is None else trials)
    nodes = [(rows, rows, weight) for rows, weight in _nodes(tokens, window)]
    if columns != tokens:
        pairs = product(_nodes(tokens, window), _nodes(columns, None))
        nodes = [(rows, other, weight * share) for (rows, weight), (other, share) in pairs]
    if any(rows * other > limit for rows, other, _ in nodes):
        return SimulatedRank(math.nan, math.nan, 0)
    counts = [trials or max(2, min(8, 2**23 // (rows * other))) for rows, other, _ in nodes]
    points = [simulate(rows, other, count) for (rows, other, _), count in zip(nodes, counts, strict=True)]
    # Beyond the window, each further token adds about the same rank, so the rank is linear in T.
    linear = window is not None and tokens > window
    return _between(points, [weight for *_, weight in nodes], linear)


def check_sizes(tokens: int, sources: int | None, mask: str, window: int | None) -> int:
    """Return the number of columns S, which is T by default; raise if sizes, mask and window do not match."""
    for name, size in (("tokens", tokens), ("sources", sources), ("window", window)):
        if size is not None:
            whole_number(f"`{name}`", size)
    one_of("`mask`", mask, MASKS)
    if sources not in (None, tokens) and (mask == "causal" or window is not None):
        raise ShapeError(
            "`sources`",
            expected=f"{tokens}, as many as tokens, under the causal mask or a window",
            got=str(sources),
            fix="Leave it out.",
        )
    return sources or tokens


def _nodes(size: int, window: int | None) -> list[tuple[int, float]]:
    """Return (length, weight) of the simulated lengths next to ``size``; [(size, 1)] if it is simulated."""
    if size <= ALWAYS_SIMULATED:
        return [(size, 1.0)]
    steps = 2 * math.ceil(math.log2(size / ALWAYS_SIMULATED)) + 1
    grid = {round(ALWAYS_SIMULATED * 2 ** (step / 2)) for step in range(steps)}
    if window is not None:  # as a function of T, the rank has kinks at these multiples of the window
        grid |= {number * window for number in range(1, 5) if ALWAYS_SIMULATED < number * window < max(grid)}
    if size in grid:
        return [(size, 1.0)]
    below, above = next(pair for pair in pairwise(sorted(grid)) if pair[0] < size < pair[1])
    if window is not None and size > window:
        weight = (size - below) / (above - below)
    else:
        weight = math.log(size / below) / math.log(above / below)
    return [(below, 1 - weight), (above, weight)]


def _between(points: list[SimulatedRank], weights: list[float], linear: bool) -> SimulatedRank:
    if len(points) == 1:
        return points[0]
    means = [point.mean for point in points]
    if linear or 0 in means:  # 0 has no logarithm: no singular value reaches δ
        mean = sum(w * m for w, m in zip(weights, means, strict=True))
    else:
        mean = math.exp(sum(w * math.log(m) for w, m in zip(weights, means, strict=True)))
    std = sum(w * point.std for w, point in zip(weights, points, strict=True))
    return SimulatedRank(mean, std, min(point.trials for point in points))
