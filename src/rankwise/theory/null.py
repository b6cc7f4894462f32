"""The null of one head: the rank its matrix would have if queries and keys were independent noise."""

import math
from itertools import pairwise, product

import torch
from jaxtyping import Bool
from torch import Tensor

from rankwise.errors import RankwiseError, ShapeError
from rankwise.theory._checks import check_count, check_mask_name
from rankwise.theory.random_heads import SimulatedRank, of_masks, of_names

MAX_ENTRIES = 4096 * 4096
"""Largest simulated softmax matrix: one trial takes about 10 seconds of one core and 0.4 GiB."""
MAX_HARDMAX_ENTRIES = 16384 * 16384
"""Largest simulated hardmax matrix: one trial takes about 2 seconds; it is not held whole."""
EXACT_TOKENS = 32
"""Up to this length nothing is interpolated."""


def random_head_rank(
    tokens: int,
    head_dim: int,
    mask: str | Bool[Tensor, "T S"] = "full",
    window: int | None = None,
    temperature: float | None = None,
    delta: float = 1e-2,
    trials: int = 8,
    seed: int = 0,
    sources: int | None = None,
) -> SimulatedRank:
    """Numerical rank of softmax(Q Kᵀ/τ) for Q, K with independent N(0, 1) entries, by simulation.

    Range: [1, min(T, S)] for the usual δ; grows with K towards saturation under the full mask. Unlike
    `rank_barrier`, which is its limit for τ → 0 and K → ∞, it knows the width and temperature of the head.
    For τ → ∞ it is `uniform_rank`.
    Cost: trials × O(T S (K + min(T, S))), once: spectra are kept in memory (for the last 8 boolean masks),
    so that another δ costs a count. A trial takes 5 ms at T = 256, 0.15 s at 1,024 and
    10 s at 4,096, the longest allowed, on one CPU core; τ = 0 needs no decomposition and is allowed up to T =
    16,384. For many lengths, or fewer trials of long ones, ask `interpolated_random_rank`.
    Source: the randomly initialised heads of "On the Limitation and Redundancy of Transformers: A Rank
    Perspective": with orthonormal token states, X Wq and X Wk are such Q and K.

    Args:
        tokens: rows T.
        head_dim: K.
        mask: "full", "causal", or a boolean matrix (T, S), True where row i may see column j.
        window: row i sees column j only if |i − j| is less; with either named mask.
        temperature: τ, by default √K; 0.0 means hardmax, `math.inf` equal weights on all a row may see.
        delta: singular values from here on count.
        trials: matrices simulated.
        seed: of its own generator: PyTorch's global one is neither read nor moved.
        sources: columns S, as many as rows by default.

    Raises:
        ShapeError: if a size is not positive, the sizes do not fit the mask, or the matrix is too large.
        RankwiseError: if the mask has no such name, or τ, δ or trials have no meaning.

    Examples:
        >>> random_head_rank(64, 8, temperature=0.0, trials=4).mean < 64 * (1 - 1 / 2.718)
        True
        >>> small = random_head_rank(64, 64, mask="causal", delta=0.5)
        >>> random_head_rank(64, 64, mask="causal").mean > small.mean
        True
    """
    columns = checked_sources(tokens, sources, mask, window)
    _check_numbers(head_dim, temperature, delta, trials)
    limit = _limit(temperature)
    if tokens * columns > limit:
        raise ShapeError(
            "`tokens`",
            expected=f"at most {limit:,} entries in the matrix, such as T = S = {math.isqrt(limit):,}",
            got=f"{tokens:,} × {columns:,}",
            fix="Simulate a shorter sequence, or use rank_barrier, which needs no simulation.",
        )
    tau = math.sqrt(head_dim) if temperature is None else float(temperature)
    name = mask.cpu().numpy().tobytes() if isinstance(mask, Tensor) else mask
    simulate = of_masks if isinstance(mask, Tensor) else of_names
    key = (tokens, columns, head_dim, name, window, tau, trials, seed)
    spectra = simulate(*key)
    return (spectra if delta >= spectra.least else simulate(*key, precise=True)).rank(delta)


def interpolated_random_rank(
    tokens: int,
    head_dim: int,
    mask: str = "full",
    window: int | None = None,
    temperature: float | None = None,
    delta: float = 1e-2,
    trials: int | None = None,
    seed: int = 0,
    sources: int | None = None,
) -> SimulatedRank:
    """`random_head_rank` for whatever length comes, simulated at few: for sequences that differ in length.

    Lengths up to 32, 32·2^(i/2) and the first four multiples of a window are simulated. Between two of them
    log rank is taken as linear in log T (and in log S, where S is given), beyond a window rank as linear in
    T. Against direct simulation that is off by less than 1 % for K ≥ 4 and 4 % for fewer, besides the noise
    of the trials.
    Cost: `random_head_rank` at two lengths (four with ``sources``), the first time; on one CPU core all
    lengths up to 1,024 together take about 2 seconds, those up to 4,096 about 30.

    Args:
        tokens: rows T.
        head_dim: K.
        mask: "full" or "causal".
        window: as in `random_head_rank`.
        temperature: as in `random_head_rank`.
        delta: as in `random_head_rank`.
        trials: matrices at each simulated length; by default 8 up to T = S = 1,024, then fewer for the same
            time, at least 2: the mean of a long one varies by less than 1 % of it.
        seed: as in `random_head_rank`.
        sources: columns S, as many as rows by default.

    Returns:
        The null, or NaN with no trials where `random_head_rank` would refuse a length as too long.

    Raises:
        ShapeError: as `random_head_rank`, but for the length.
        RankwiseError: as `random_head_rank`.

    Examples:
        >>> random_head_rank(181, 16).mean == interpolated_random_rank(181, 16).mean
        True
        >>> interpolated_random_rank(100_000, 16)
        SimulatedRank(mean=nan, std=nan, trials=0)
    """
    if isinstance(mask, Tensor):
        raise RankwiseError(
            "`mask` of `interpolated_random_rank`",
            expected="'full' or 'causal'",
            got="a tensor, which has one length",
            fix="Give it to random_head_rank.",
        )
    checked_sources(tokens, sources, mask, window)
    _check_numbers(head_dim, temperature, delta, 1 if trials is None else trials)
    square = sources is None or sources == tokens
    rows, columns = _nodes(tokens, window), [(0, 1.0)] if square else _nodes(sources or tokens, None)
    corners = [(r, r if square else c, weight * other) for (r, weight), (c, other) in product(rows, columns)]
    if any(r * c > _limit(temperature) for r, c, _ in corners):
        return SimulatedRank(math.nan, math.nan, 0)
    points = []
    for r, c, _ in corners:
        count = max(2, min(8, 2**23 // (r * c))) if trials is None else trials
        points.append(random_head_rank(r, head_dim, mask, window, temperature, delta, count, seed, c))
    weights = [weight for _, _, weight in corners]
    return _between(points, weights, linear=_banded(tokens, window))


def _nodes(size: int, window: int | None) -> list[tuple[int, float]]:
    """The simulated lengths on either side, with their weights."""
    if size <= EXACT_TOKENS:
        return [(size, 1.0)]
    steps = 2 * math.ceil(math.log2(size / EXACT_TOKENS)) + 1
    grid = {round(EXACT_TOKENS * 2 ** (step / 2)) for step in range(steps)}
    if window is not None:  # the curve bends where the window, and a few times it, fits in
        grid |= {at * window for at in range(1, 5) if EXACT_TOKENS < at * window < max(grid)}
    if size in grid:
        return [(size, 1.0)]
    below, above = next(pair for pair in pairwise(sorted(grid)) if pair[0] < size < pair[1])
    if _banded(size, window):
        weight = (size - below) / (above - below)
    else:
        weight = math.log(size / below) / math.log(above / below)
    return [(below, 1 - weight), (above, weight)]


def _banded(size: int, window: int | None) -> bool:
    """Whether a window is shorter than the sequence: each further token then adds about as much rank."""
    return window is not None and size > window


def _between(points: list[SimulatedRank], weights: list[float], linear: bool) -> SimulatedRank:
    if len(points) == 1:
        return points[0]
    means = [point.mean for point in points]
    if linear or 0 in means:  # zero: a δ that no singular value reaches
        mean = sum(w * m for w, m in zip(weights, means, strict=True))
    else:
        mean = math.exp(sum(w * math.log(m) for w, m in zip(weights, means, strict=True)))
    std = sum(w * point.std for w, point in zip(weights, points, strict=True))
    return SimulatedRank(mean, std, min(point.trials for point in points))


def _limit(temperature: float | None) -> int:
    return MAX_HARDMAX_ENTRIES if temperature == 0 else MAX_ENTRIES


def checked_sources(tokens: int, sources: int | None, mask: str | Tensor, window: int | None) -> int:
    """S, once sizes and mask fit together."""
    for name, size in (("tokens", tokens), ("sources", sources), ("window", window)):
        if size is not None:
            check_count(name, size)
    columns = tokens if sources is None else sources
    if isinstance(mask, Tensor):
        columns = mask.shape[-1] if sources is None and mask.ndim else columns
        if mask.dtype != torch.bool or mask.shape != (tokens, columns) or columns == 0 or window is not None:
            raise ShapeError(
                "`mask`",
                expected=f"torch.bool of shape ({tokens}, {columns}) and no window beside it",
                got=f"{mask.dtype} of shape {tuple(mask.shape)} and window={window}",
                fix="True where row i may see column j, one matrix for all heads.",
            )
    else:
        check_mask_name(mask, "'full', 'causal' or a boolean tensor")
        if columns != tokens and (mask == "causal" or window is not None):
            raise ShapeError(
                "`sources`",
                expected=f"{tokens}, as many as tokens, under the causal mask or a window",
                got=str(columns),
                fix="Say which columns each row sees with a boolean mask.",
            )
    return columns


def _check_numbers(head_dim: int, temperature: float | None, delta: float, trials: int) -> None:
    check_count("head_dim", head_dim)
    check_count("trials", trials)
    if temperature is not None and not temperature >= 0:
        raise RankwiseError(
            "`temperature`",
            expected="a number, at least 0",
            got=str(temperature),
            fix="Scores are divided by it; 0 means hardmax, None means √K, infinity equal weights.",
        )
    if not (math.isfinite(delta) and delta > 0):
        raise RankwiseError(
            "`delta`",
            expected="a finite number above 0",
            got=str(delta),
            fix="It is the smallest singular value that still counts, such as 0.01.",
        )
