"""Causal TSSA on a CPU: sums by piece, then scores from them, then outputs; and its gradients."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.token_statistics.cpu import causal_back_loops as back_loops
from rankwise.ops.token_statistics.cpu import causal_loops as loops
from rankwise.ops.token_statistics.cpu import sum_loops
from rankwise.ops.token_statistics.cpu.call import Call, flat, new, tensor
from rankwise.ops.token_statistics.problem import Problem, Sums, in_dtype
from rankwise.ops.token_statistics.reference import ENERGY_EPS, MASS_EPS


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the last sums; beside them, two sums for every piece.

    Half-precision w and the output of it are there in float32 as well, and w out of order in order.
    """
    call, shape = Call(problem), problem.w.shape
    x, dtype, start = call.x, call.dtype, call.sums(problem.first())
    score, membership = call.memberships(keep)
    totals, masses = call.room()
    output, where = new(shape, dtype), (*call.tokens, *call.runs[:2])

    call.run(sum_loops.sums, x, flat(None, dtype), *where, totals, masses)
    begin, energy = call.carry(totals, start[0])
    read = (x, flat(problem.offset, dtype), call.temperature, *where, begin, ENERGY_EPS)
    call.run(loops.assign, *read, score, membership, totals, masses)
    begin, assigned = call.carry(totals, start[1])
    begin_mass, mass = call.carry(masses, start[2])
    read = (x, membership, *where, begin, begin_mass, MASS_EPS)
    call.run(loops.outputs, *read, flat(output, dtype))

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
    call = Call(problem)
    x, dtype, start = call.x, call.dtype, call.sums(problem.first())
    go, pi, dpi, scores = (flat(part, dtype) for part in (given, membership, given_membership, score))
    last, (chunks, low, high) = call.sums(given_end), call.chunks()
    where = (*call.tokens, *chunks[:2], low, high)

    def before_chunks(weight: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        totals, masses = call.room(len(chunks.first), x.dtype)
        read = (x, weight, *call.tokens, *chunks[:2])
        call.run(sum_loops.sums, *read, totals, masses, tasks=len(chunks.first))
        return call.carry(totals, start, runs=chunks)[0], masses

    out, asked, (before, before_mass) = (
        new(problem.w.shape, dtype),
        np.empty_like(pi),
        call.room(None, x.dtype),
    )
    assigned, masses = before_chunks(pi, start[1])
    known = (assigned, call.carry(masses, start[2], runs=chunks)[0], MASS_EPS)
    found = (flat(out, dtype), asked, before, before_mass)
    call.run(back_loops.output_sweep_back, x, go, pi, *where, *known, *found)
    until, first_assigned = call.carry(before, last[1], backward=True)
    until_mass, first_mass = call.carry(before_mass, last[2], backward=True)

    energy, _ = before_chunks(flat(None, dtype), start[0])
    slope, of_temperature = np.empty_like(asked), np.empty((len(low), pi.shape[1]))
    before, _ = call.room()
    read = (x, pi, scores, call.temperature, dpi, *where, energy, ENERGY_EPS, until, until_mass)
    call.run(back_loops.slopes, *read, asked, slope, of_temperature, before)
    ask, first_energy = call.carry(before, last[0], backward=True)
    energies = (energy, ENERGY_EPS, ask, until)
    call.run(back_loops.score_sweep_back, x, slope, pi, *where, *energies, flat(out, dtype))
    sums = Sums(*(tensor(part, dtype) for part in (first_energy, first_assigned, first_mass[..., 0])))
    tau = tensor(of_temperature.sum(0), dtype)
    return in_dtype(out, problem.w.dtype), tau, torch.from_numpy(slope).view(score.shape), sums
