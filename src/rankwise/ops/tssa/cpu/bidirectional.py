"""Bidirectional TSSA on a CPU: three reads of w for its statistics, one for the output."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import bidirectional_loops as loops
from rankwise.ops.tssa.cpu.arrays import array, flat, new, pieces
from rankwise.ops.tssa.cpu.heads import membership_room, temperatures
from rankwise.ops.tssa.cpu.threads import spread
from rankwise.ops.tssa.problem import Problem, Sums, exact
from rankwise.ops.tssa.reference import MASS_EPS, NORM_EPS


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the sums over all tokens; memory O(B T H) beside w and the output.

    Args:
        problem: a bidirectional call.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    w, dtype = problem.w, exact(problem.w.dtype)
    work = _Work(problem)
    energy = work.energies()
    score, membership, assigned, mass = work.assign(_inverse(energy), problem.temperature, problem.mask)
    output = new(w.shape, dtype)
    to, pi, factor = (
        output.flatten(0, 1).numpy(),
        flat(membership, dtype),
        array(_factor(assigned, mass), dtype),
    )
    write = (work.x, pi, factor, work.mask, *work.runs, to)
    spread(lambda low, high: loops.outputs(*write, low, high), work.tasks, work.workers)
    return output.to(w.dtype), membership, score, Sums(energy, assigned, mass)


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
    w, dtype = problem.w, exact(problem.w.dtype)
    work, mass = _Work(problem), sums.mass[..., None] + MASS_EPS
    factor, inverse, go = _factor(sums.assigned, sums.mass), _inverse(sums.energy), flat(given, dtype)
    asked, moment = work.outputs_back(go, membership, factor)
    moment = moment / mass  # now of Σ Π w²
    less = (moment * sums.assigned / mass).sum(-1)
    slope, temperature, energy = work.slopes(
        asked, flat(given_membership, dtype), moment, less, membership, score, problem.temperature
    )
    energy = -(energy * inverse) * inverse  # inverse² leaves float32 where channels are tiny
    energy = energy.masked_fill(sums.energy < NORM_EPS**2, 0.0)
    out = new(w.shape, dtype)
    vectors = [array(v, dtype) for v in (factor, moment, inverse, energy)]
    arrays = (work.x, go, flat(membership, dtype), slope, *vectors)
    write = (*arrays, work.mask, *work.runs, flat(out, dtype))
    spread(lambda low, high: loops.tokens_back(*write, low, high), work.tasks, work.workers)
    return out.to(w.dtype), temperature


class _Work:
    """One call's tokens, cut into pieces for the threads."""

    def __init__(self, problem: Problem) -> None:
        w = problem.w
        self.shape, self.dtype, self.bounds = w.shape[:3], exact(w.dtype), problem.bounds
        self.packed = problem.packed
        self.x, self.mask = flat(w, self.dtype), flat(problem.mask, torch.bool)
        *self.runs, self.workers = pieces(problem)
        self.tasks = len(self.runs[0])

    def energies(self) -> Tensor:
        """Σ_t w² of every sequence, (N, H, K)."""
        total = self._totals()
        rows, to = self.x.reshape(len(self.x), 1, -1), total.reshape(len(total), 1, -1)  # heads do not matter
        run = (rows, self.mask, *self.runs[:2], to)
        spread(lambda low, high: loops.energies(*run, low, high), self.tasks, self.workers)
        return self._gather(total)

    def outputs_back(
        self, given: np.ndarray, membership: Tensor, factor: Tensor
    ) -> tuple[np.ndarray, Tensor]:
        """What Π is asked for directly, (M, H), and the gradient of m, (N, H, K)."""
        pi, q, total = flat(membership, self.dtype), array(factor, self.dtype), self._totals()
        out = np.empty_like(pi)
        run = (self.x, given, pi, q, self.mask, *self.runs, out, total)
        spread(lambda low, high: loops.outputs_back(*run, low, high), self.tasks, self.workers)
        return out, self._gather(total)

    def assign(
        self, inverse: Tensor, temperature: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores and memberships, (B, T, H), and Σ_t Π w² and Σ_t Π of every sequence."""
        score = torch.empty(self.shape, dtype=self.dtype)
        tau, membership = membership_room(score, temperature, mask)
        total = self._totals()
        mass = np.empty((*total.shape[:2], 1))
        to, pi = score.flatten(0, 1).numpy(), membership.flatten(0, 1).numpy()
        run = (self.x, array(inverse, self.dtype), tau, self.mask, *self.runs, to, pi, total, mass[..., 0])
        spread(lambda low, high: loops.assign(*run, low, high), self.tasks, self.workers)
        return score, membership, self._gather(total), self._gather(mass)[..., 0]

    def slopes(
        self,
        asked: np.ndarray,
        given: np.ndarray,
        moment: Tensor,
        less: Tensor,
        membership: Tensor,
        score: Tensor,
        temperature: Tensor | None,
    ) -> tuple[np.ndarray, Tensor, Tensor]:
        """Gradients of the scores, (M, H), and of the temperature, and Σ_t slope w² of each sequence."""
        slope, total = np.empty_like(asked), self._totals()
        each = np.empty((self.tasks, self.shape[2]))
        per_token = (flat(membership, self.dtype), flat(score, self.dtype))
        per_head = (array(moment, self.dtype), array(less, self.dtype))
        known = (self.x, *per_token, temperatures(temperature, self.dtype), given, *per_head)
        run = (*known, self.mask, *self.runs, asked, slope, each, total)
        spread(lambda low, high: loops.slopes(*run, low, high), self.tasks, self.workers)
        return slope, torch.from_numpy(each.sum(0)).to(self.dtype), self._gather(total)

    def _totals(self) -> np.ndarray:
        return np.empty((self.tasks, *self.x.shape[1:]))

    def _gather(self, total: np.ndarray) -> Tensor:
        """Sums over the pieces of every sequence."""
        out = np.zeros((len(self.bounds) - 1, *total.shape[1:]))
        loops.gather(total, self.runs[2], out)
        return torch.from_numpy(out).to(self.dtype)


def _inverse(energy: Tensor) -> Tensor:
    return 1 / energy.clamp(min=NORM_EPS**2)


def _factor(assigned: Tensor, mass: Tensor) -> Tensor:
    return 1 / (1 + assigned / (mass[..., None] + MASS_EPS))
