"""The gradients of causal TSSA on a CPU."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import causal_back_loops as loops
from rankwise.ops.tssa.cpu.arrays import Pieces, array, chunks, flat, new, pieces
from rankwise.ops.tssa.cpu.carry import Carry, first_sums
from rankwise.ops.tssa.cpu.heads import temperatures
from rankwise.ops.tssa.cpu.threads import spread
from rankwise.ops.tssa.problem import Problem, Sums, exact, in_dtype
from rankwise.ops.tssa.reference import ENERGY_EPS, MASS_EPS


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

    Args:
        problem: the call.
        membership: its Π.
        score: its scores.
        given: gradient of the output.
        given_membership: gradient of Π.
        given_end: gradients of the last sums.

    Returns:
        Gradients.
    """
    w, start, dtype = problem.w, first_sums(problem), exact(problem.w.dtype)
    x, go, pi, dpi = (flat(part, dtype) for part in (w, given, membership, given_membership))
    last = [array(part, dtype) for part in given_end]
    runs, workers = pieces(problem)
    at, to, owner, low, high = chunks(tuple(map(tuple, np.stack(runs, 1).tolist())))
    by_chunk, by_piece, tasks = Carry(problem, Pieces(at, to, owner)), Carry(problem, runs), len(low)
    tokens, heads, width = (*by_piece.tokens, at, to), w.shape[2], w.shape[3]

    def room(pieces: int, *last: int) -> np.ndarray:
        return np.empty((pieces, heads, *last), x.dtype)

    energy, assigned, mass = room(len(at), width), room(len(at), width), np.empty((len(at), heads, 1))
    read = (x, pi, *tokens, energy, assigned, mass[..., 0])
    spread(lambda first, end: loops.chunk_totals(*read, first, end), len(at), workers)
    energy, _ = by_chunk.through(energy, start[0])
    assigned, _ = by_chunk.through(assigned, start[1])
    mass, _ = by_chunk.through(mass, start[2][..., None].astype(np.float64))

    def after(given: np.ndarray) -> np.ndarray:
        """What is asked behind every piece, as far as it is known before the pieces behind it are done."""
        return np.zeros((tasks, *given.shape[1:]), x.dtype) if by_piece.several else given[runs.owner]

    out, asked = new(w.shape, dtype), np.empty_like(pi)
    before, before_mass = room(tasks, width), np.empty((tasks, heads))
    known = (x, go, pi, *tokens, low, high, assigned, mass[..., 0], MASS_EPS, after(last[1]), after(last[2]))
    one = (*known, flat(out, dtype), asked, before, before_mass)
    spread(lambda first, end: loops.output_sweep_back(*one, first, end), tasks, workers)
    until, first_assigned = by_piece.back(before, last[1])
    until_mass, first_mass = by_piece.back(before_mass[..., None], last[2][..., None])

    slope, of_temperature = np.empty_like(asked), np.empty((tasks, heads))
    before = np.empty((tasks if by_piece.several else 0, heads, width))
    given_scores = (x, pi, flat(score, dtype), temperatures(problem.temperature, dtype), dpi)
    two = (
        *given_scores,
        *tokens,
        low,
        high,
        energy,
        ENERGY_EPS,
        until,
        until_mass[..., 0],
        asked,
        slope,
        of_temperature,
        before,
    )
    spread(lambda first, end: loops.slopes(*two, first, end), tasks, workers)

    ask = by_piece.back(before, last[0])[0] if by_piece.several else after(last[0])
    more = until if by_piece.several else until[:0]  # not yet in the gradient of w
    before = room(tasks, width)
    three = (x, slope, pi, *tokens, low, high, energy, ENERGY_EPS, ask, more, flat(out, dtype), before)
    spread(lambda first, end: loops.score_sweep_back(*three, first, end), tasks, workers)
    first_energy = by_piece.firsts(before, last[0])
    sums = Sums(*(torch.from_numpy(part) for part in (first_energy, first_assigned, first_mass[..., 0])))
    tau = torch.from_numpy(of_temperature).sum(0).to(dtype)
    return in_dtype(out, w.dtype), tau, torch.from_numpy(slope).view(score.shape), sums
