"""Heads of random queries and keys: the matrices that the null of a real head is simulated with."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64
from numpy.typing import NDArray
from torch import Tensor

from rankwise._internals.threads import map_threads, numpy_is_on_one_thread
from rankwise.theory.hardmax import wins

ROWS = 512
"""Rows of a hardmax matrix scored at once."""
UNDER_WAY_BYTES = 2**29
"""Float64 matrices decomposed beside each other, or one where that takes more."""


class SimulatedRank(NamedTuple):
    """Rank of simulated matrices."""

    mean: float
    """Mean over trials; NaN where nothing could be simulated."""
    std: float
    """Sample standard deviation over trials, NaN from fewer than two: how far one such matrix may lie."""
    trials: int
    """Matrices simulated."""


def summarized(ranks: list[int]) -> SimulatedRank:
    """Mean and spread of the ranks of several trials.

    Args:
        ranks: one for each trial, at least one.

    Examples:
        >>> summarized([2, 4, 6])
        SimulatedRank(mean=4.0, std=2.0, trials=3)
    """
    mean = sum(ranks) / len(ranks)
    squares = sum((rank - mean) ** 2 for rank in ranks)
    return SimulatedRank(
        mean, math.sqrt(squares / (len(ranks) - 1)) if len(ranks) > 1 else math.nan, len(ranks)
    )


class Spectra(NamedTuple):
    """Singular values of simulated matrices, from which ranks at any δ are counted."""

    values: NDArray[np.float64]
    """(trials, N)."""
    least: float
    """The smallest δ at which rounding cannot matter."""

    def rank(self, delta: float) -> SimulatedRank:
        """Count singular values ≥ δ.

        Args:
            delta: at least ``least``.
        """
        return summarized([int(count) for count in (self.values >= delta).sum(-1)])


def simulated(
    tokens: int,
    sources: int,
    head_dim: int,
    mask: str | bytes,
    window: int | None,
    temperature: float,
    trials: int,
    seed: int,
    precise: bool = False,
) -> Spectra:
    """Spectra of heads whose queries and keys are independent N(0, 1), from a generator of its own.

    Args:
        tokens: rows T.
        sources: columns S.
        head_dim: K.
        mask: "full", "causal", or the bytes of a boolean matrix (T, S).
        window: row i sees column j only if |i − j| is less.
        temperature: τ; 0 means hardmax, ∞ equal weights.
        trials: matrices.
        seed: of the generator.
        precise: whether singular values are wanted down to rounding, at eight times the price.

    Examples:
        >>> simulated(1, 1, 8, "full", None, 1.0, trials=2, seed=0).rank(0.01)
        SimulatedRank(mean=1.0, std=0.0, trials=2)
    """
    generator = torch.Generator().manual_seed(seed)
    seen = _Seen(sources, mask, window)

    def spectrum(drawn: tuple[Tensor, ...]) -> tuple[NDArray[np.float64], float]:
        query, key = drawn
        if temperature == 0:  # a single 1 in each row: MᵀM is diagonal
            return _wins(query, key, seen).sqrt().numpy(), 0.0
        return singular_values_of_stochastic(_softmax(query, key, seen.rows(0, tokens), temperature), precise)

    drawn = [
        tuple(torch.randn(n, head_dim, dtype=torch.float64, generator=generator) for n in (tokens, sources))
        for _ in range(trials)
    ]
    at_once = max(1, UNDER_WAY_BYTES // (8 * tokens * sources))
    spectra = map_threads(spectrum, drawn, at_once)
    return Spectra(np.stack([values for values, _ in spectra]), max(least for _, least in spectra))


of_names = lru_cache(maxsize=1024)(simulated)
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
    even = math.isinf(temperature)
    scores = query.new_zeros(len(query), len(key)) if even else query @ key.mT
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    scores -= scores.amax(-1, keepdim=True)  # before it is divided: no temperature is too low
    matrix = (scores if even else scores.div_(temperature)).softmax(-1)
    return matrix if seen is None else matrix.masked_fill_(~seen, 0)  # also rows that see nothing


def _wins(query: Float64[Tensor, "T K"], key: Float64[Tensor, "S K"], seen: _Seen) -> Float64[Tensor, " S"]:
    count = torch.zeros(len(key), dtype=torch.float64)
    for start in range(0, len(query), ROWS):
        block = query[start : start + ROWS]
        count += wins(block @ key.mT, seen.rows(start, start + len(block)))
    return count


def singular_values_of_stochastic(
    matrix: Float64[Tensor, "T S"], precise: bool
) -> tuple[NDArray[np.float64], float]:
    """Singular values of a matrix without negative entries, and the smallest δ they may be compared with.

    Eigenvalues of the Gram matrix of the shorter side, an eighth of the time of an SVD, are off by some
    n·u·‖M‖², and ‖M‖² ≤ ‖M‖_1·‖M‖_∞. δ² has to lie far above that.

    Args:
        matrix: its entries are at least 0.
        precise: take the SVD, which is good for any δ.

    Examples:
        >>> singular_values_of_stochastic(torch.eye(3, dtype=torch.float64), precise=True)[0].tolist()
        [1.0, 1.0, 1.0]
    """
    if precise:
        return torch.linalg.svdvals(matrix).numpy(), 0.0
    smaller = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    size = float(matrix.sum(0).max() * matrix.sum(1).max())  # no entry is negative
    gram = smaller @ smaller.mT
    # on one thread numpy's LAPACK takes 2/3 of the time of torch's (docs/decisions/004-fast-ranks.md)
    numpys = numpy_is_on_one_thread()
    eigenvalues = np.linalg.eigvalsh(gram.numpy()) if numpys else torch.linalg.eigvalsh(gram).numpy()
    least = math.sqrt(64 * max(matrix.shape) * float(np.finfo(np.float64).eps) * size)
    return np.sqrt(np.maximum(eigenvalues, 0)), least


def rank_of_stochastic(matrix: Float64[Tensor, "T S"], delta: float) -> int:
    """Singular values ≥ δ of a matrix without negative entries, by its Gram matrix where that can tell.

    Args:
        matrix: its entries are at least 0.
        delta: singular values from here on count.

    Examples:
        >>> rank_of_stochastic(torch.eye(3, dtype=torch.float64), 0.01)
        3
    """
    values, least = singular_values_of_stochastic(matrix, precise=False)
    if delta < least:
        values, _ = singular_values_of_stochastic(matrix, precise=True)
    return int((values >= delta).sum())
