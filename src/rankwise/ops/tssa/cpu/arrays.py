"""From tensors to the arrays the loops take."""

from functools import cache, lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu.compiled import CHUNK
from rankwise.ops.tssa.cpu.lanes import LINE
from rankwise.ops.tssa.cpu.threads import threads
from rankwise.ops.tssa.problem import Problem, in_dtype

PIECE = 256
"""Tokens of a piece at least: below that, handing out work costs more than doing it."""
CACHED = 1 << 16
"""Numbers of a piece that a thread takes up more than once: 256 KiB of float32, which its cache holds."""
MOST = 64
"""Pieces a thread at most: what is kept of them does not grow with the text; pieces do, from there on."""


def array(x: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """The numbers of a tensor, without a copy where the dtype is right and the memory in order.

    Args:
        x: on a CPU.
        dtype: wanted, or None for its own.

    Returns:
        An array, contiguous.
    """
    plain = x.detach()
    return np.ascontiguousarray((plain if dtype is None else in_dtype(plain, dtype)).numpy())


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
    return array(x, dtype).reshape(-1, *x.shape[2:])


def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor not yet written, in memory from numpy: it asks the system for large pages, torch does not.

    The first touch of 25 MB in small pages can take longer than all of TSSA on them. It begins with a cache
    line, which numpy does not see to.

    Args:
        shape: of the tensor.
        dtype: of its numbers.

    Returns:
        A tensor.
    """
    size, each = prod(shape), dtype.itemsize
    room = np.empty(size + LINE // each, str(dtype)[6:])
    skipped = -room.__array_interface__["data"][0] % LINE // each
    return torch.from_numpy(room[skipped : skipped + size].reshape(shape))


def powers(
    rate: Tensor | None, heads: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, Literal[True] | None]:
    """λ^0 … λ^CHUNK of every head in the dtype of the sums, and λ in float64; and None without half-lives.

    Loops are compiled by the type of each argument, so None makes loops of their own, which shrink nothing.

    A last row holds what λ lost when it was rounded: in 64 products with a rounded λ that would add up.

    Args:
        rate: λ, or None for 1.
        heads: H.
        dtype: of the sums.

    Returns:
        (CHUNK + 2, H), (H,), and True or None: whether there are half-lives.
    """
    if rate is None:
        return *_ones(heads, dtype), None
    own = rate.detach().double()
    table = own ** torch.arange(CHUNK + 1, dtype=torch.float64)[:, None]
    lost = own - own.to(dtype).double()
    return array(torch.cat([table, lost[None]]), dtype), array(own), True


@cache
def _ones(heads: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The same for λ = 1, which nothing is lost of."""
    table = np.ones((CHUNK + 2, heads), str(dtype)[6:])
    table[-1] = 0
    return table, np.ones(heads)


class Pieces(NamedTuple):
    """Runs of tokens that threads can take.

    Attributes:
        first: first tokens, (P,).
        last: last tokens, not included.
        owner: their sequences.
    """

    first: np.ndarray
    last: np.ndarray
    owner: np.ndarray


def pieces(problem: Problem) -> tuple[Pieces, int]:
    """Pieces to be done at once: as many as keep all threads busy to the end.

    Args:
        problem: the call.

    Returns:
        Pieces, and how many threads.
    """
    workers, total = threads(problem.w.numel()), _total(problem)
    size = max(PIECE, -(-total // (16 * workers))) if workers > 1 else total
    return _cut(problem, size, size), workers


def relay_pieces(problem: Problem) -> tuple[Pieces, int]:
    """Pieces that go on from one another, small enough for a cache; what can be shared out whole stays whole.

    That is rows that give every thread as many, and sequences of less than a quarter of a thread's share.

    Args:
        problem: the call.

    Returns:
        Pieces, and how many threads.
    """
    workers, total = threads(problem.w.numel()), _total(problem)
    size = max(CACHED * total // problem.w.numel(), total // (MOST * workers), 1)
    even = workers == 1 or (problem.bounds is None and problem.w.shape[0] % workers == 0)
    return _cut(problem, -(-size // CHUNK) * CHUNK, total if even else total // (4 * workers)), workers


def _total(problem: Problem) -> int:
    return problem.w.shape[0] * problem.w.shape[1]


def _cut(problem: Problem, size: int, whole: int) -> Pieces:
    batch, tokens = problem.w.shape[:2]
    if problem.bounds is not None:
        return _runs(tuple(problem.bounds.tolist()), size, whole)
    return _even_runs(batch, tokens, size, whole)


@lru_cache(256)
def _even_runs(batch: int, tokens: int, size: int, whole: int) -> Pieces:
    return _runs(tuple(range(0, batch * tokens + 1, tokens)), size, whole)


def _runs(ends: tuple[int, ...], size: int, whole: int) -> Pieces:
    """Sequences of more tokens than ``whole``, in pieces of ``size``."""
    runs = [
        (low, min(low + step, stop), n)
        for n, (start, stop) in enumerate(pairwise(ends))
        for step in [size if stop - start > whole else stop - start]
        for low in range(start, stop, step or 1)
    ]
    return Pieces(*np.array(runs, dtype=np.int64).reshape(-1, 3).T.copy())


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
