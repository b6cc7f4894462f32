"""Causal TSSA on a CPU, in one way through the tokens."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import causal_loops as loops
from rankwise.ops.tssa.cpu.arrays import flat, new, powers, relay_pieces
from rankwise.ops.tssa.cpu.carry import first_sums
from rankwise.ops.tssa.cpu.causal_back import backward as backward
from rankwise.ops.tssa.cpu.heads import score_room, temperatures
from rankwise.ops.tssa.cpu.relay import board, relay
from rankwise.ops.tssa.problem import Problem, Sums, exact, in_dtype
from rankwise.ops.tssa.reference import ENERGY_EPS, MASS_EPS


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the last sums; beside them, two sums for every piece, O(1) in T.

    Half-precision w and the output of it are there in float32 as well, and w out of order in order.

    Args:
        problem: a causal call.
        keep: whether scores are wanted; otherwise memberships lie in their place.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    w, dtype, heads = problem.w, exact(problem.w.dtype), problem.w.shape[2]
    runs, workers = relay_pieces(problem)
    x = flat(w, dtype)
    score, pi = score_room(x, keep)
    energy, assigned, mass = first_sums(problem)
    output, places, count = new(w.shape, dtype), board(len(runs.first)), len(runs.first)
    behind = [np.empty((count, heads, width)) for width in (w.shape[3], w.shape[3], 1)]
    read = (x, flat(problem.offset, dtype), temperatures(problem.temperature, dtype))
    tokens = (flat(problem.mask, torch.bool), *powers(problem.rate, heads, dtype), *runs)
    sums = (ENERGY_EPS, MASS_EPS, workers > 2, energy, assigned, mass[..., None], *behind)
    every = (*read, *tokens, *sums, score, pi, flat(output, dtype), places)
    # now, as behind the loops torch's code is in no cache any more
    membership, scores = (torch.from_numpy(part.reshape(w.shape[:3])) for part in (pi, score))
    end = Sums(*(torch.from_numpy(part) for part in (energy, assigned, mass)))

    relay(loops.forward, every, [-1, 0], min(workers, count))
    return in_dtype(output, w.dtype), membership, scores, end
