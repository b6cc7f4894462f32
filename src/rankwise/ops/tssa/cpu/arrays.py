"""From tensors to the arrays the loops take."""

from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu.compiled import CHUNK
from rankwise.ops.tssa.cpu.threads import threads
from rankwise.ops.tssa.problem import Problem

PIECE = 256
"""Tokens of a piece at least: below that, handing out work costs more than doing it."""


def array(x: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """The numbers of a tensor, without a copy where the dtype is right and the memory in order.

    Args:
        x: on a CPU.
        dtype: wanted, or None for its own.

    Returns:
        An array, contiguous.
    """
    plain = x.detach()
    if dtype is not None and plain.dtype != dtype:
        plain = plain.to(dtype)
    return plain.contiguous().numpy()


def flat(x: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    """The same with batch and tokens as one axis; an empty one of no tokens for None.

    Args:
        x: (B, T, …) or None.
        dtype: wanted.

    Returns:
        (M, …), or (0, 0) or (0,) for None, as the loops expect "none" of that dtype.
    """
    if x is None:
        return np.zeros(0, bool) if dtype == torch.bool else np.zeros((0, 0), str(dtype)[6:])
    return array(x.flatten(0, 1), dtype)


def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor not yet written, in memory from numpy: it asks the system for large pages, torch does not.

    The first touch of 25 MB in small pages can take longer than all of TSSA on them.

    Args:
        shape: of the tensor.
        dtype: of its numbers.

    Returns:
        A tensor.
    """
    return torch.from_numpy(np.empty(shape, str(dtype)[6:]))


def powers(rate: Tensor | None, heads: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """λ^0 … λ^CHUNK of every head in the dtype of the sums, and λ in float64.

    A last row holds what λ lost when it was rounded: in 64 products with a rounded λ that would add up.

    Args:
        rate: λ, or None for 1.
        heads: H.
        dtype: of the sums.

    Returns:
        (CHUNK + 2, H) and (H,).
    """
    if rate is None:
        return _ones(heads, dtype)
    own = rate.detach().double()
    table = own ** torch.arange(CHUNK + 1, dtype=torch.float64)[:, None]
    lost = own - own.to(dtype).double()
    return array(torch.cat([table, lost[None]]), dtype), array(own)


@cache
def _ones(heads: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The same for λ = 1, which nothing is lost of."""
    table = np.ones((CHUNK + 2, heads), str(dtype)[6:])
    table[-1] = 0
    return table, np.ones(heads)


def pieces(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Runs of tokens that threads can take: where each begins and ends, and its sequence.

    Args:
        problem: the call.

    Returns:
        First tokens, last tokens (not included), sequences; and how many threads.
    """
    batch, tokens = problem.w.shape[:2]
    workers = threads(problem.w.numel())
    if problem.packed:
        return *_runs(tuple(problem.bounds.tolist()), workers), workers
    return *_even_runs(batch, tokens, workers), workers


@lru_cache(256)
def _even_runs(batch: int, tokens: int, workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _runs(tuple(range(0, batch * tokens + 1, tokens)), workers)


def _runs(ends: tuple[int, ...], workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size = max(PIECE, -(-ends[-1] // (4 * workers)) if workers > 1 else ends[-1])
    runs = [
        (low, min(low + size, stop), n)
        for n, (start, stop) in enumerate(pairwise(ends))
        for low in range(start, stop, size)
    ]
    first, last, owner = np.array(runs, dtype=np.int64).reshape(-1, 3).T.copy()
    return first, last, owner


@lru_cache(256)
def chunks(runs: tuple[tuple[int, int, int], ...]) -> tuple[np.ndarray, ...]:
    """Pieces cut into chunks of `CHUNK` tokens.

    Args:
        runs: first token, last (not included) and sequence of every piece.

    Returns:
        First tokens, last tokens, sequences of the chunks; first chunk and last chunk of every piece.
    """
    cut = [(at, min(at + CHUNK, last), n) for first, last, n in runs for at in range(first, last, CHUNK)]
    counts = np.array([-(-(last - first) // CHUNK) for first, last, _ in runs], dtype=np.int64)
    high = np.cumsum(counts)
    return *np.array(cut, dtype=np.int64).reshape(-1, 3).T.copy(), high - counts, high
