"""Causal TSSA on a CPU: sums by piece, then scores from them, then outputs; and its gradients."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.token_statistics.cpu import causal_back_loops as back_loops
from rankwise.ops.token_statistics.cpu import causal_loops as loops
from rankwise.ops.token_statistics.cpu import sum_loops
from rankwise.ops.token_statistics.cpu.flat_problem import FlatProblem, flat, new, tensor
from rankwise.ops.token_statistics.problem import Problem, Sums, in_dtype
from rankwise.ops.token_statistics.reference import ENERGY_EPS, MASS_EPS


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the last sums; beside them, two sums for every piece.

    Half-precision w and the output of it are there in float32 as well, and w out of order in order.
    """
    work, shape = FlatProblem(problem), problem.w.shape
    x, dtype, start = work.x, work.dtype, work.sums(problem.first())
    score, membership = work.memberships(keep)
    totals, masses = work.room()
    output, where = new(shape, dtype), (*work.tokens, *work.runs[:2])

    work.run(sum_loops.sums, x, flat(None, dtype), *where, totals, masses)
    begin, energy = work.carry(totals, start[0])
    read = (x, flat(problem.offset, dtype), work.temperature, *where, begin, ENERGY_EPS)
    work.run(loops.assign, *read, score, membership, totals, masses)
    begin, assigned = work.carry(totals, start[1])
    begin_mass, mass = work.carry(masses, start[2])
    read = (x, membership, *where, begin, begin_mass, MASS_EPS)
    work.run(loops.outputs, *read, flat(output, dtype))

    pi, scores = (torch.from_numpy(part.reshape(shape[:3])) for part in (membership, score))
    end = Sums(*(tensor(part, dtype) for part in (energy, assigned, mass[..., 0])))
    return in_dtype(output, problem.w.dtype), pi, scores, end


def backward(
    problem: Problem,
    membership: Tensor,
    score: Tensor,
    given: Tensor,
    given_membership: Tensor,
    given_end: Sums,
) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Gradients of w, of the temperature, of the scores' offset and of the first sums.

    Memory beside the gradients: O(B T H), and two sums at the start of every chunk, 1/32 of w.
    """
    work = FlatProblem(problem)
    x, dtype, start = work.x, work.dtype, work.sums(problem.first())
    go, pi, dpi, scores = (flat(part, dtype) for part in (given, membership, given_membership, score))
    last, (chunks, low, high) = work.sums(given_end), work.chunks()
    where = (*work.tokens, *chunks[:2], low, high)

    def before_chunks(weight: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        totals, masses = work.room(len(chunks.first), x.dtype)
        read = (x, weight, *work.tokens, *chunks[:2])
        work.run(sum_loops.sums, *read, totals, masses, tasks=len(chunks.first))
        return work.carry(totals, start, runs=chunks)[0], masses

    out, asked, (before, before_mass) = (
        new(problem.w.shape, dtype),
        np.empty_like(pi),
        work.room(None, x.dtype),
    )
    assigned, masses = before_chunks(pi, start[1])
    known = (assigned, work.carry(masses, start[2], runs=chunks)[0], MASS_EPS)
    found = (flat(out, dtype), asked, before, before_mass)
    work.run(back_loops.output_sweep_back, x, go, pi, *where, *known, *found)
    until, first_assigned = work.carry(before, last[1], backward=True)
    until_mass, first_mass = work.carry(before_mass, last[2], backward=True)

    energy, _ = before_chunks(flat(None, dtype), start[0])
    slope, of_temperature = np.empty_like(asked), np.empty((len(low), pi.shape[1]))
    before, _ = work.room()
    read = (x, pi, scores, work.temperature, dpi, *where, energy, ENERGY_EPS, until, until_mass)
    work.run(back_loops.slopes, *read, asked, slope, of_temperature, before)
    ask, first_energy = work.carry(before, last[0], backward=True)
    energies = (energy, ENERGY_EPS, ask, until)
    work.run(back_loops.score_sweep_back, x, slope, pi, *where, *energies, flat(out, dtype))
    sums = Sums(*(tensor(part, dtype) for part in (first_energy, first_assigned, first_mass[..., 0])))
    tau = tensor(of_temperature.sum(0), dtype)
    return in_dtype(out, problem.w.dtype), tau, torch.from_numpy(slope).view(score.shape), sums
