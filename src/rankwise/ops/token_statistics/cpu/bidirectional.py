"""Bidirectional TSSA on a CPU: two reads of w for its sums, one for the output; and its gradients."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.token_statistics.cpu import bidirectional_loops as loops
from rankwise.ops.token_statistics.cpu import sum_loops
from rankwise.ops.token_statistics.cpu.flat_problem import FlatProblem, array, flat, new, tensor
from rankwise.ops.token_statistics.problem import Problem, Sums, in_dtype
from rankwise.ops.token_statistics.reference import MASS_EPS, NORM_EPS


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the sums over all tokens; beside them, memory O(1) in T.

    That is four sums for every sequence, and two float64 ones for every piece, of which it has one at least.
    Half-precision w and the output of it are there in float32 as well, and w out of order in order.
    """
    work, shape = FlatProblem(problem), problem.w.shape
    x, dtype, tokens, runs = work.x, work.dtype, work.tokens, work.runs
    score, membership = work.memberships(keep)
    output, (totals, masses) = new(shape, dtype), work.room()

    work.run(sum_loops.sums, x, flat(None, dtype), *tokens, *runs[:2], totals, masses)
    energy = _gathered(work, totals)
    read = (x, _inverse(energy), work.temperature, *tokens, *runs)
    work.run(loops.assign, *read, score, membership, totals, masses)
    assigned, mass = _gathered(work, totals), _gathered(work, masses)
    work.run(loops.outputs, x, membership, _factor(assigned, mass), tokens[0], *runs, flat(output, dtype))
    pi, scores = (torch.from_numpy(part.reshape(shape[:3])) for part in (membership, score))
    sums = Sums(*(tensor(part, dtype) for part in (energy, assigned, mass[..., 0])))
    return in_dtype(output, problem.w.dtype), pi, scores, sums


def backward(
    problem: Problem, membership: Tensor, score: Tensor, sums: Sums, given: Tensor, given_membership: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of w and of the temperature; memory O(B T H) beside them."""
    work = FlatProblem(problem)
    x, dtype, tokens, runs = work.x, work.dtype, work.tokens, work.runs
    go, pi, scores, dpi = (flat(part, dtype) for part in (given, membership, score, given_membership))
    energy, assigned, mass = (array(part, dtype) for part in sums)
    inverse, factor = _inverse(energy), _factor(assigned, mass[..., None])
    totals, masses = work.room()
    asked, slope, of_temperature = np.empty_like(pi), np.empty_like(pi), np.empty((len(totals), pi.shape[1]))
    out = new(problem.w.shape, dtype)

    work.run(loops.outputs_back, x, go, pi, factor, *tokens[::2], *runs, asked, totals)
    with np.errstate(all="ignore"):
        each = 1 / (mass[..., None] + x.dtype.type(MASS_EPS))
        moment = _gathered(work, totals) * each
        less = (moment * (assigned * each)).sum(-1)
    read = (x, pi, scores, work.temperature, dpi, moment, less, *tokens, *runs)
    work.run(loops.slopes, *read, asked, slope, of_temperature, totals, masses)
    with np.errstate(all="ignore"):
        shared = -(_gathered(work, totals) * inverse) * inverse  # inverse² would leave float32
    shared[energy < NORM_EPS**2] = 0
    known = (factor, moment, inverse, shared, tokens[0], *runs)
    work.run(loops.tokens_back, x, go, pi, slope, *known, flat(out, dtype))
    return in_dtype(out, problem.w.dtype), tensor(of_temperature.sum(0), dtype)


def _gathered(work: FlatProblem, totals: np.ndarray) -> np.ndarray:
    """Σ over the pieces of every sequence, (N, H, …), in the dtype of the sums."""
    start = np.zeros((work.problem.sequences, *totals.shape[1:]))
    return work.carry(totals, start)[1].astype(work.x.dtype)


def _inverse(energy: np.ndarray) -> np.ndarray:
    """1/max(Σ w², eps); what is NaN stays so."""
    return 1 / np.maximum(energy, energy.dtype.type(NORM_EPS**2))


def _factor(assigned: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """1/(1 + m), m = Σ Π w²/(Σ Π + eps)."""
    with np.errstate(all="ignore"):
        return 1 / (1 + assigned / (mass + mass.dtype.type(MASS_EPS)))
