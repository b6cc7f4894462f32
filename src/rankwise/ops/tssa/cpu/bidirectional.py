"""Bidirectional TSSA on a CPU: three reads of w for its statistics, one for the output."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import bidirectional_loops as loops
from rankwise.ops.tssa.cpu.arrays import array, flat, new, pieces
from rankwise.ops.tssa.cpu.heads import score_room, temperatures
from rankwise.ops.tssa.cpu.threads import spread
from rankwise.ops.tssa.problem import Problem, Sums, exact
from rankwise.ops.tssa.reference import MASS_EPS, NORM_EPS


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the sums over all tokens; beside them, memory O(1) in T.

    Half-precision w and the output of it are there in float32 as well, and w out of order in order.

    Args:
        problem: a bidirectional call.
        keep: whether scores are wanted; otherwise memberships lie in their place.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    with np.errstate(all="ignore"):  # what is not finite shows in the output
        work = _Work(problem)
        energy = work.energies()
        score, membership, assigned, mass = work.assign(_inverse(energy), problem.temperature, keep)
        output = work.outputs(membership, _factor(assigned, mass)).to(problem.w.dtype)
        sums = Sums(*map(torch.from_numpy, (energy, assigned, mass)))
        return output, work.tokens(membership), work.tokens(score), sums


def backward(
    problem: Problem, membership: Tensor, score: Tensor, sums: Sums, given: Tensor, given_membership: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of w and of the temperature; memory O(B T H) beside them.

    Args:
        problem: the call.
        membership: its Π.
        score: its scores.
        sums: over all tokens.
        given: gradient of the output.
        given_membership: gradient of Π.

    Returns:
        Gradients.
    """
    with np.errstate(all="ignore"):  # what is not finite shows in the output
        work, (energy, assigned, mass) = _Work(problem), map(array, sums)
        go, pi, s, dpi = (flat(part, work.dtype) for part in (given, membership, score, given_membership))
        factor, inverse, each = _factor(assigned, mass), _inverse(energy), 1 / (mass[..., None] + MASS_EPS)
        asked, moment = work.outputs_back(go, pi, factor)
        moment = moment * each  # now of Σ Π w²
        less = (moment * (assigned * each)).sum(-1)
        slope, temperature, share = work.slopes((pi, s), problem.temperature, (dpi, moment, less), asked)
        share = -(share * inverse) * inverse  # inverse² leaves float32 where channels are tiny
        share[energy < NORM_EPS**2] = 0
        out = work.tokens_back(go, pi, slope, factor, moment, inverse, share)
        return out.to(problem.w.dtype), torch.from_numpy(temperature)


class _Work:
    """One call's tokens, M in all, cut into pieces for the threads; sums by sequence are (N, H, K)."""

    def __init__(self, problem: Problem) -> None:
        self.shape, self.dtype = problem.w.shape, exact(problem.w.dtype)
        self.x, self.mask = flat(problem.w, self.dtype), flat(problem.mask, torch.bool)
        self.runs, self.workers = pieces(problem)
        self.tasks, self.sequences = len(self.runs.first), problem.sequences

    def energies(self) -> np.ndarray:
        """Σ_t w² of every sequence."""
        total = self._totals()
        rows, to = self.x.reshape(len(self.x), 1, -1), total.reshape(len(total), 1, -1)  # heads do not matter
        run = (rows, self.mask, *self.runs[:2], to)
        spread(lambda low, high: loops.energies(*run, low, high), self.tasks, self.workers)
        return self._gather(total)

    def assign(
        self, inverse: np.ndarray, temperature: Tensor | None, keep: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Scores and memberships, (M, H), and Σ_t Π w² and Σ_t Π of every sequence."""
        tau, total = temperatures(temperature, self.dtype), self._totals()
        score, pi = score_room(self.x, keep)
        mass = np.empty((*total.shape[:2], 1))
        run = (self.x, inverse, tau, self.mask, *self.runs, score, pi, total, mass[..., 0])
        spread(lambda low, high: loops.assign(*run, low, high), self.tasks, self.workers)
        return score, pi, self._gather(total), self._gather(mass)[..., 0]

    def outputs(self, membership: np.ndarray, factor: np.ndarray) -> Tensor:
        """-Π w factor, of the shape of w."""
        out = new(self.shape, self.dtype)
        run = (self.x, membership, factor, self.mask, *self.runs, flat(out, self.dtype))
        spread(lambda low, high: loops.outputs(*run, low, high), self.tasks, self.workers)
        return out

    def outputs_back(
        self, given: np.ndarray, membership: np.ndarray, factor: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What Π is asked for directly, (M, H), and the gradient of m of every sequence."""
        out, total = np.empty_like(membership), self._totals()
        run = (self.x, given, membership, factor, self.mask, *self.runs, out, total)
        spread(lambda low, high: loops.outputs_back(*run, low, high), self.tasks, self.workers)
        return out, self._gather(total)

    def slopes(
        self,
        per_token: tuple[np.ndarray, ...],
        temperature: Tensor | None,
        per_head: tuple[np.ndarray, ...],
        asked: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gradients of the scores, (M, H), and of the temperature, and Σ_t slope w² of every sequence."""
        slope, total, each = np.empty_like(asked), self._totals(), np.empty((self.tasks, self.x.shape[1]))
        known = (self.x, *per_token, temperatures(temperature, self.dtype), *per_head)
        run = (*known, self.mask, *self.runs, asked, slope, each, total)
        spread(lambda low, high: loops.slopes(*run, low, high), self.tasks, self.workers)
        return slope, each.sum(0).astype(self.x.dtype), self._gather(total)

    def tokens_back(self, *known: np.ndarray) -> Tensor:
        """Gradient of w from those of everything it goes into."""
        out = new(self.shape, self.dtype)
        run = (self.x, *known, self.mask, *self.runs, flat(out, self.dtype))
        spread(lambda low, high: loops.tokens_back(*run, low, high), self.tasks, self.workers)
        return out

    def tokens(self, x: np.ndarray) -> Tensor:
        """(M, H) as (B, T, H)."""
        return torch.from_numpy(x).view(self.shape[:3])

    def _totals(self) -> np.ndarray:
        return np.empty((self.tasks, *self.x.shape[1:]))

    def _gather(self, total: np.ndarray) -> np.ndarray:
        """Sums over the pieces of every sequence."""
        out = np.zeros((self.sequences, *total.shape[1:]), self.x.dtype)
        loops.gather(total, self.runs.owner, out)
        return out


def _inverse(energy: np.ndarray) -> np.ndarray:
    return 1 / np.maximum(energy, NORM_EPS**2)


def _factor(assigned: np.ndarray, mass: np.ndarray) -> np.ndarray:
    return 1 / (1 + assigned / (mass[..., None] + MASS_EPS))
