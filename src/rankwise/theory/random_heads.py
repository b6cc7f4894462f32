"""Heads of independent noise: what the null of a real head is simulated with."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise.theory.hardmax import winning_columns

ROWS = 512
"""Rows of a hardmax matrix scored at once."""


class NullRank(NamedTuple):
    """Rank of simulated matrices."""

    mean: float
    """Mean over trials; NaN where nothing could be simulated."""
    std: float
    """Sample standard deviation over trials, NaN from fewer than two: how far one such matrix may lie."""
    trials: int
    """Matrices simulated."""


def summarized(ranks: list[int]) -> NullRank:
    """Mean and spread of the ranks of several trials.

    Args:
        ranks: one for each trial, at least one.

    Examples:
        >>> summarized([2, 4, 6])
        NullRank(mean=4.0, std=2.0, trials=3)
    """
    mean = sum(ranks) / len(ranks)
    squares = sum((rank - mean) ** 2 for rank in ranks)
    return NullRank(mean, math.sqrt(squares / (len(ranks) - 1)) if len(ranks) > 1 else math.nan, len(ranks))


def simulated(
    tokens: int,
    sources: int,
    head_dim: int,
    mask: str | bytes,
    window: int | None,
    temperature: float,
    delta: float,
    trials: int,
    seed: int,
) -> NullRank:
    """Ranks of heads whose queries and keys are independent N(0, 1), from a generator of its own.

    Args:
        tokens: rows T.
        sources: columns S.
        head_dim: K.
        mask: "full", "causal", or the bytes of a boolean matrix (T, S).
        window: row i sees column j only if |i − j| is less.
        temperature: τ; 0 means hardmax.
        delta: singular values from here on count.
        trials: matrices.
        seed: of the generator.

    Examples:
        >>> simulated(1, 1, 8, "full", None, 1.0, 0.01, trials=2, seed=0)
        NullRank(mean=1.0, std=0.0, trials=2)
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = []
    seen = _Seen(sources, mask, window)
    for _ in range(trials):
        query, key = (
            torch.randn(n, head_dim, dtype=torch.float64, generator=generator) for n in (tokens, sources)
        )
        ranks.append(
            _winners(query, key, seen)
            if temperature == 0
            else rank_of_stochastic(_softmax(query, key, seen.rows(0, tokens), temperature), delta)
        )
    return summarized(ranks)


of_names = lru_cache(maxsize=4096)(simulated)
of_masks = lru_cache(maxsize=8)(simulated)


class _Seen(NamedTuple):
    """What rows may see."""

    sources: int
    mask: str | bytes
    window: int | None

    def rows(self, start: int, stop: int) -> Bool[Tensor, "R S"] | None:
        if isinstance(self.mask, bytes):
            part = self.mask[start * self.sources : stop * self.sources]
            return torch.frombuffer(bytearray(part), dtype=torch.bool).view(-1, self.sources)
        if self.mask == "full" and self.window is None:
            return None
        ahead = torch.arange(self.sources) - torch.arange(start, stop)[:, None]
        seen = ahead <= (0 if self.mask == "causal" else self.sources)
        return seen if self.window is None else seen & (ahead.abs() < self.window)


def _softmax(
    query: Float64[Tensor, "T K"], key: Float64[Tensor, "S K"], seen: Tensor | None, temperature: float
) -> Float64[Tensor, "T S"]:
    scores = query @ key.mT
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    scores -= scores.amax(-1, keepdim=True)  # before it is divided: no temperature is too low
    matrix = scores.div_(temperature).softmax(-1)
    return matrix if seen is None else matrix.masked_fill_(~seen, 0)  # also rows that see nothing


def _winners(query: Float64[Tensor, "T K"], key: Float64[Tensor, "S K"], seen: _Seen) -> int:
    hit = torch.zeros(len(key), dtype=torch.bool)
    for start in range(0, len(query), ROWS):
        block = query[start : start + ROWS]
        hit |= winning_columns(block @ key.mT, seen.rows(start, start + len(block)))
    return int(hit.sum())


def rank_of_stochastic(matrix: Float64[Tensor, "T S"], delta: float) -> int:
    """Singular values ≥ δ of a matrix without negative entries: eigenvalues of M Mᵀ − δ² that are ≥ 0.

    By Sylvester's law of inertia an LDLᵀ factorisation has as many positive pivots, a fifth of the time of
    the eigenvalues; of a 2×2 pivot one eigenvalue is positive. Safe while δ² is far above the rounding of the
    Gram matrix, n·u·‖M‖², ‖M‖² ≤ ‖M‖_1·‖M‖_∞; else the singular values are computed.

    Args:
        matrix: its entries are at least 0.
        delta: singular values from here on count.

    Examples:
        >>> rank_of_stochastic(torch.eye(3, dtype=torch.float64), 0.01)
        3
    """
    smaller = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    size = matrix.sum(0).max() * matrix.sum(1).max()  # no entry is negative
    if delta**2 < 64 * max(matrix.shape) * torch.finfo(torch.float64).eps * size:
        return int((torch.linalg.svdvals(matrix) >= delta).sum())
    shifted = smaller @ smaller.mT
    shifted.diagonal().sub_(delta**2)
    factors, pivots, _ = torch.linalg.ldl_factor_ex(shifted)
    paired = pivots < 0
    return int(((factors.diagonal() >= 0) & ~paired).sum() + paired.sum() // 2)
