"""Sums carried from piece to piece of a sequence, in either direction."""

import numpy as np
import torch

from rankwise.ops.tssa.cpu.arrays import Pieces, array, flat, powers
from rankwise.ops.tssa.cpu.causal_back_loops import begins
from rankwise.ops.tssa.problem import Problem, exact


def first_sums(problem: Problem) -> list[np.ndarray]:
    """Sums before the first token of a causal call.

    Args:
        problem: the call.

    Returns:
        Energy and assigned (N, H, K), mass (N, H): new arrays.
    """
    dtype, shape = exact(problem.w.dtype), (problem.sequences, *problem.w.shape[2:])
    if problem.start is None:
        return [np.zeros(size, str(dtype)[6:]) for size in (shape, shape, shape[:2])]
    return [array(part, dtype).copy() for part in problem.start]


class Carry:
    """The pieces of one call's sequences.

    Args:
        problem: the call.
        runs: the pieces.

    Attributes:
        tokens: mask, powers of λ, λ, and whether sums decay, as the loops take them.
        several: whether a sequence has more than one piece.
    """

    def __init__(self, problem: Problem, runs: Pieces) -> None:
        self.runs, self.owner = runs, runs.owner
        mask = flat(problem.mask, torch.bool)
        self.tokens = mask, *powers(problem.rate, problem.w.shape[2], exact(problem.w.dtype))
        edges = np.ones(len(self.owner) + 1, bool)
        edges[1:-1] = self.owner[1:] != self.owner[:-1]
        self.several = not edges.all()
        self._first = np.flatnonzero(edges[:-1])

    def back(self, before: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is asked behind every piece, (P, …), and of the sums before every sequence, (N, …).

        Args:
            before: what each piece asks of the sums before it, (P, …): where a sequence has several, as if
                nothing were asked behind it, otherwise all.
            last: what is asked behind every sequence, (N, …).
        """
        if self.several:
            return self.through(before, last, backward=True)
        return last[self.owner], self.firsts(before, last)

    def firsts(self, before: np.ndarray, last: np.ndarray) -> np.ndarray:
        """What the first piece of every sequence asks; without a token, what is asked behind it, (N, …).

        Args:
            before: what each piece and those behind it ask of the sums before it, (P, …).
            last: what is asked behind every sequence, (N, …).
        """
        out = last.copy()
        out[self.owner[self._first]] = before[self._first]
        return out

    def through(
        self, total: np.ndarray, start: np.ndarray, backward: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sums before every piece, (P, H, K), and behind every sequence; backward: the other way round.

        Args:
            total: what each piece adds, (P, H, K).
            start: sums on the side where the way begins, (N, H, K).
            backward: from the last piece to the first.
        """
        mask, _, rate, _ = self.tokens
        begin, end = np.empty(total.shape, start.dtype), start.copy()
        begins(total, start, mask, rate, *self.runs, begin, end, backward)
        return begin, end
