"""Bidirectional TSSA on a CPU: three reads of w for its statistics, one for the output."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import bidirectional_loops as loops
from rankwise.ops.tssa.cpu.arrays import array, flat, pieces
from rankwise.ops.tssa.cpu.heads import scores_back, uniform
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
    energy = work.energies(None)
    score, membership, assigned, mass = work.assign(_inverse(energy), problem.temperature, problem.mask)
    output = torch.empty(w.shape, dtype=dtype)
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
    factor, inverse = _factor(sums.assigned, sums.mass), _inverse(sums.energy)
    direct, moment = work.outputs_back(flat(given, dtype), membership, factor)
    moment = moment / mass  # now of Σ Π w²
    less = (moment * sums.assigned / mass).sum(-1)
    asked = work.project(moment) - direct + given_membership - work.to_tokens(less)
    slope, temperature = scores_back(asked, membership, score, problem.temperature, work.workers)
    energy = -work.energies(slope) * inverse.square()
    energy = energy.masked_fill(sums.energy < NORM_EPS**2, 0.0)
    out = torch.empty(w.shape, dtype=dtype)
    vectors = [array(v, dtype) for v in (factor, moment, inverse, energy)]
    arrays = (work.x, flat(given, dtype), flat(membership, dtype), flat(slope, dtype), *vectors)
    write = (*arrays, work.mask, *work.runs, out.flatten(0, 1).numpy())
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

    def energies(self, weight: Tensor | None) -> Tensor:
        """Σ_t weight w² of every sequence, (N, H, K)."""
        total, by, x = self._totals(), flat(weight, self.dtype), self.x
        to = total
        if weight is None:  # heads make no difference: one long row a token
            x, to = x.reshape(len(x), 1, -1), total.reshape(len(total), 1, -1)
        run = (x, by, self.mask, *self.runs[:2], to)
        spread(lambda low, high: loops.energies(*run, low, high), self.tasks, self.workers)
        return self._gather(total)

    def project(self, vector: Tensor) -> Tensor:
        """Σ_k vector w² of every token, (B, T, H)."""
        out = torch.empty(self.shape, dtype=self.dtype)
        run = (self.x, array(vector, self.dtype), self.mask, *self.runs, out.flatten(0, 1).numpy())
        spread(lambda low, high: loops.project(*run, low, high), self.tasks, self.workers)
        return out

    def outputs_back(self, given: np.ndarray, membership: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """What Π is asked for directly, (B, T, H), and the gradient of m, (N, H, K)."""
        out, total = torch.empty(self.shape, dtype=self.dtype), self._totals()
        pi, q, to = flat(membership, self.dtype), array(factor, self.dtype), out.flatten(0, 1).numpy()
        run = (self.x, given, pi, q, self.mask, *self.runs, to, total)
        spread(lambda low, high: loops.outputs_back(*run, low, high), self.tasks, self.workers)
        return out, self._gather(total)

    def assign(
        self, inverse: Tensor, temperature: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores and memberships, (B, T, H), and Σ_t Π w² and Σ_t Π of every sequence."""
        score = torch.empty(self.shape, dtype=self.dtype)
        if temperature is None:
            membership, tau = uniform(score, mask), flat(None, self.dtype)[:, :0].ravel()
        else:
            membership, tau = torch.empty_like(score), array(temperature, self.dtype)
        total = self._totals()
        mass = np.empty(total.shape[:2])
        to, pi = score.flatten(0, 1).numpy(), membership.flatten(0, 1).numpy()
        run = (self.x, array(inverse, self.dtype), tau, self.mask, *self.runs, to, pi, total, mass)
        spread(lambda low, high: loops.assign(*run, low, high), self.tasks, self.workers)
        return score, membership, self._gather(total), self._gather(mass)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The number of its sequence for every token, (N, H) → (B, T, H) or (B, 1, H)."""
        if not self.packed:
            return x[:, None]
        return x.repeat_interleave(self.bounds.diff(), 0)[None]

    def _totals(self) -> np.ndarray:
        return np.empty((self.tasks, *self.x.shape[1:]))

    def _gather(self, total: np.ndarray) -> Tensor:
        """Sums over the pieces of every sequence; in numpy, whose small sums wake no threads."""
        owner = self.runs[2]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        out = np.zeros((len(self.bounds) - 1, *total.shape[1:]))
        out[owner[first]] = np.add.reduceat(total, first, axis=0)
        return torch.from_numpy(out).to(self.dtype)


def _inverse(energy: Tensor) -> Tensor:
    return 1 / energy.clamp(min=NORM_EPS**2)


def _factor(assigned: Tensor, mass: Tensor) -> Tensor:
    return 1 / (1 + assigned / (mass[..., None] + MASS_EPS))
