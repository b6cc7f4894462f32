"""Simulated heads: attention matrices from random queries and keys, and their singular values."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from rankwise._internals.threads import PARALLEL_BYTES, map_threads
from rankwise.errors import ShapeError

ROWS = 512
"""Number of rows of a hardmax matrix whose scores are in memory at once."""


class SimulatedRank(NamedTuple):
    """Mean and standard deviation of a rank over simulated matrices (trials)."""

    mean: float
    """Mean over trials; NaN if no matrix was simulated."""
    std: float
    """Sample standard deviation over trials; NaN for fewer than two trials."""
    trials: int
    """Number of simulated matrices."""


def mean_and_std(ranks: list[int]) -> SimulatedRank:
    """Return mean and standard deviation of a nonempty list of ranks, one per trial."""
    mean = sum(ranks) / len(ranks)
    squares = sum((rank - mean) ** 2 for rank in ranks)
    std = math.sqrt(squares / (len(ranks) - 1)) if len(ranks) > 1 else math.nan
    return SimulatedRank(mean, std, len(ranks))


class Spectra(NamedTuple):
    """Singular values of simulated matrices, from which ranks at any threshold δ can be counted."""

    values: NDArray[np.float64]
    """Singular values, (trials, N), where N = S for hardmax, otherwise min(T, S)."""
    least_delta: float
    """Smallest threshold δ at which rounding errors of the singular values cannot change a rank."""

    def rank(self, delta: float) -> SimulatedRank:
        """Return mean and deviation of the number of singular values ≥ δ; exact for δ ≥ ``least_delta``."""
        return mean_and_std([int(count) for count in (self.values >= delta).sum(-1)])


@lru_cache(maxsize=1024)
def simulate_spectra(
    tokens: int,
    sources: int,
    head_dim: int,
    mask: str,
    window: int | None,
    temperature: float,
    trials: int,
    seed: int,
    precise: bool = False,
) -> Spectra:
    """Return singular values of simulated attention matrices with independent N(0, 1) queries and keys.

    A temperature of 0 means hardmax, and ∞ means equal weights. By default, the singular values are square
    roots of eigenvalues of a Gram matrix. If ``precise``, an SVD is computed, which is more accurate but
    takes eight times as long.
    """
    generator = torch.Generator().manual_seed(seed)

    def spectrum(drawn: tuple[Tensor, ...]) -> tuple[NDArray[np.float64], float]:
        query, key = drawn
        if temperature == 0:  # each row has a single 1, so MᵀM is diagonal and no decomposition is needed
            return _hardmax_wins(query, key, mask, window).sqrt().numpy(), 0.0
        seen = _seen_rows(0, tokens, sources, mask, window)
        return singular_values_of_stochastic(_softmax(query, key, seen, temperature), precise)

    drawn = [
        tuple(torch.randn(n, head_dim, dtype=torch.float64, generator=generator) for n in (tokens, sources))
        for _ in range(trials)
    ]
    at_once = max(1, PARALLEL_BYTES // (8 * tokens * sources))
    spectra = map_threads(spectrum, drawn, at_once)
    return Spectra(np.stack([values for values, _ in spectra]), max(least for _, least in spectra))


def _seen_rows(
    start: int, stop: int, sources: int, mask: str, window: int | None
) -> Bool[Tensor, "R S"] | None:
    """Return rows ``start`` to ``stop`` of a mask (True = visible); return None if nothing is masked."""
    if mask == "full" and window is None:
        return None
    ahead = torch.arange(sources) - torch.arange(start, stop)[:, None]
    seen = ahead <= (0 if mask == "causal" else sources)
    return seen if window is None else seen & (ahead.abs() < window)


def _softmax(
    query: Float64[Tensor, "T K"], key: Float64[Tensor, "S K"], seen: Tensor | None, temperature: float
) -> Float64[Tensor, "T S"]:
    even = math.isinf(temperature)
    scores = query.new_zeros(len(query), len(key)) if even else query @ key.mT
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    scores -= scores.amax(-1, keepdim=True)  # dividing first by a small temperature could overflow
    return (scores if even else scores.div_(temperature)).softmax(-1)


def _hardmax_wins(
    query: Float64[Tensor, "T K"], key: Float64[Tensor, "S K"], mask: str, window: int | None
) -> Float64[Tensor, " S"]:
    count = torch.zeros(len(key), dtype=torch.float64)
    for start in range(0, len(query), ROWS):
        block = query[start : start + ROWS]
        seen = _seen_rows(start, start + len(block), len(key), mask, window)
        count += count_wins(block @ key.mT, seen)
    return count


def count_wins(
    scores: Float[Tensor, "*batch T S"], mask: Bool[Tensor, "..."] | None = None
) -> Int64[Tensor, "*batch S"]:
    """Return, for each column, the number of rows in which the column has the largest visible score."""
    *batch, _, sources = scores.shape
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    winner = scores.argmax(-1)
    if mask is not None:  # rows that see no column are counted in an extra column, which is dropped
        winner = winner.masked_fill(~mask.expand(scores.shape).any(-1), sources)
    count = torch.zeros(*batch, sources + 1, dtype=torch.int64, device=scores.device)
    return count.scatter_add_(-1, winner, torch.ones_like(winner))[..., :sources]


def hardmax_rank(
    scores: Float[Tensor, "*batch T S"], mask: Bool[Tensor, "..."] | None = None
) -> Int64[Tensor, "*batch"]:
    """Return the rank of the hardmax matrix, in which each row has a single 1 at its largest score.

    Formula: the number of columns that contain the largest score of at least one row. A column that has the
    largest score of n rows has the singular value √n, so the numerical rank is the same for any δ ≤ 1.
    Range: [1, min(T, S)]; 0 if no row sees a column. If a row has several largest scores, only one counts.
    Cost: O(T S) time.

    Args:
        scores: Q Kᵀ, which may be multiplied by any positive number.
        mask: True if row i sees column j, broadcastable to the scores; a row that sees no column is zero.

    Raises:
        ShapeError: if the scores contain NaN, or the mask does not broadcast to them.

    Examples:
        >>> import torch
        >>> hardmax_rank(torch.tensor([[3.0, 1.0], [2.0, 1.0]])).item(), hardmax_rank(torch.eye(4)).item()
        (1, 4)
    """
    fits = scores.ndim >= 2 and scores.shape[-1] > 0 and not bool(scores.isnan().any())
    if fits and mask is not None:
        pairs = list(zip(reversed(mask.shape), reversed(scores.shape), strict=False))
        fits = mask.dtype == torch.bool and mask.ndim <= scores.ndim and all(m in (1, n) for m, n in pairs)
    if not fits:
        masked = "" if mask is None else f", mask {mask.dtype} {tuple(mask.shape)}"
        raise ShapeError(
            "`hardmax_rank`",
            expected="scores (..., T, S) without NaN, S ≥ 1, and a boolean mask that broadcasts to them",
            got=f"scores {tuple(scores.shape)}{masked}",
            fix="Remove NaN; an additive mask becomes a boolean one with mask == 0.",
        )
    return (count_wins(scores, mask) > 0).sum(-1)


def singular_values_of_stochastic(
    matrix: Float64[Tensor, "T S"], precise: bool
) -> tuple[NDArray[np.float64], float]:
    """Return the singular values of a non-negative matrix M, and the smallest δ at which ranks are exact.

    By default, the singular values are square roots of eigenvalues of the smaller Gram matrix (M Mᵀ or MᵀM),
    which take an eighth of the time of an SVD. An eigenvalue has a rounding error of about
    max(T, S)·2⁻⁵²·‖M‖_1·‖M‖_∞, so ranks are exact only if δ² is far larger. If ``precise``, the SVD is
    computed, and the smallest δ is 0.
    """
    if precise:
        return torch.linalg.svdvals(matrix).numpy(), 0.0
    smaller = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    size = float(matrix.sum(0).max() * matrix.sum(1).max())  # ‖M‖_1·‖M‖_∞, as entries are not negative
    eigenvalues = torch.linalg.eigvalsh(smaller @ smaller.mT).numpy()
    least = math.sqrt(64 * max(matrix.shape) * float(np.finfo(np.float64).eps) * size)
    return np.sqrt(np.maximum(eigenvalues, 0)), least
