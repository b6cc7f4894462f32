"""A problem as the loops see it: a flat list of tokens, in pieces that threads take at once.

Batch rows and packed sequences are both runs of that list; a sequence is cut into pieces where there are
threads to take them. What a piece needs of those before it is a sum, carried from piece to piece.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.token_statistics.cpu import sum_loops
from rankwise.ops.token_statistics.cpu.compiled import CHUNK, Loop
from rankwise.ops.token_statistics.cpu.tasks import run_tasks, threads_for
from rankwise.ops.token_statistics.problem import Problem, Sums, exact, in_dtype

NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.bool: np.bool_}
PIECE = 256
"""Tokens of a piece at least: below that, handing out work costs more than doing it."""


def array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """The numbers of a tensor, without a copy where the dtype is right and the memory in order."""
    return np.ascontiguousarray(in_dtype(x.detach(), dtype).numpy())


def flat(x: Tensor | None, dtype: torch.dtype, axes: int = 2) -> np.ndarray:
    """(B, T, …) as (M, …), M the tokens of all rows; None as an empty array of so many axes."""
    if x is None:
        return np.zeros((0,) * axes, NUMPY[dtype])
    return array(x, dtype).reshape(-1, *x.shape[2:])


def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor not yet written, in memory from numpy: it asks the system for large pages, torch does not.

    The first touch of 25 MB in small pages can take longer than all of TSSA on them.
    """
    return torch.from_numpy(np.empty(shape, NUMPY[dtype]))


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A small array as a tensor of that dtype."""
    return torch.from_numpy(np.ascontiguousarray(x, NUMPY[dtype]))


class Pieces(NamedTuple):
    """Runs of tokens first ≤ t < last, and their sequences; each (P,)."""

    first: np.ndarray
    last: np.ndarray
    owner: np.ndarray


class FlatProblem:
    """Arrays, pieces and number of threads of a problem.

    Attributes:
        dtype: of the sums.
        x: w in that dtype, (M, H, K).
        temperature: (H,), or (0,) for uniform memberships.
        tokens: the mask, (M,) or (0,); λ^0 … λ^CHUNK of every head in the dtype of the sums, and what λ lost
            when it was rounded, as that would add up in 64 products, (CHUNK + 2, H); λ in float64, (H,).
        runs: the pieces.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dtype = problem, exact(problem.w.dtype)
        # a copy: torch does not free memory that an array shares, as FSDP2 must with weights between passes
        weights = None if problem.temperature is None else problem.temperature.clone()
        self.x, self.temperature = flat(problem.w, self.dtype), flat(weights, self.dtype, axes=1)
        rate = np.ones(self.x.shape[1]) if problem.rate is None else array(problem.rate, torch.float64)
        self.tokens = (flat(problem.mask, torch.bool, axes=1), _powers(rate, self.dtype), rate)
        self.workers = threads_for(self.x.size)
        self.runs = _pieces(problem, self.workers)

    def room(self, pieces: int | None = None, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
        """Room for what pieces add up: (P, H, K), and one number a head in float64, (P, H, 1)."""
        count = len(self.runs.first) if pieces is None else pieces
        return np.empty((count, *self.x.shape[1:]), dtype), np.empty((count, self.x.shape[1], 1))

    def memberships(self, keep: bool) -> tuple[np.ndarray, np.ndarray]:
        """Room for scores and for memberships: the same where scores are not to be kept."""
        membership = np.empty(self.x.shape[:2], self.x.dtype)
        return np.empty_like(membership) if keep else membership, membership

    def run(self, loop: Loop, *given: Any, tasks: int | None = None) -> None:
        """Run a loop over all pieces, or as many tasks."""
        run_tasks(loop, given, len(self.runs.first) if tasks is None else tasks, self.workers)

    @staticmethod
    def sums(sums: Sums) -> list[np.ndarray]:
        """Sums of every sequence in float64: (N, H, K) twice and (N, H, 1)."""
        energy, assigned, mass = (array(part, torch.float64) for part in sums)
        return [energy, assigned, mass[..., None]]

    def carry(
        self, total: np.ndarray, start: np.ndarray, backward: bool = False, runs: Pieces | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sums before every piece and after every sequence; backward: the other way round.

        Of what each piece adds, (P, H, …), to sums where the way begins, (N, H, …).
        """
        mask, _, rate = self.tokens
        begin, end = np.empty_like(total), start.copy()
        sum_loops.carry(total, start, mask, rate, *(runs or self.runs), begin, end, backward)
        return begin, end

    def chunks(self) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Chunks, as smaller pieces; first chunk and last chunk (not included) of every piece."""
        runs, piece = self.runs, np.arange(len(self.runs.first))
        cut = _runs((*runs.first.tolist(), len(self.x)), CHUNK)
        low, high = (np.searchsorted(cut.owner, piece, side) for side in ("left", "right"))
        return cut._replace(owner=runs.owner[cut.owner]), low, high


def _powers(own: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    table = own ** np.arange(CHUNK + 1)[:, None]
    lost = own - own.astype(NUMPY[dtype])
    return np.concatenate([table, lost[None]]).astype(NUMPY[dtype])


def _pieces(problem: Problem, workers: int) -> Pieces:
    """As many as keep all threads busy to the end."""
    batch, tokens = problem.w.shape[:2]
    size = max(PIECE, -(-batch * tokens // (16 * workers))) if workers > 1 else batch * tokens
    bounds = range(0, batch * tokens + 1, tokens) if problem.bounds is None else problem.bounds.tolist()
    return _runs(tuple(bounds), size)


@lru_cache(256)
def _runs(ends: tuple[int, ...], size: int) -> Pieces:
    runs = [
        (low, min(low + size, stop), n)
        for n, (start, stop) in enumerate(pairwise(ends))
        for low in range(start, stop, size)
    ]
    return Pieces(*np.array(runs, np.int64).reshape(-1, 3).T.copy())
