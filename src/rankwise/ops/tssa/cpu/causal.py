"""Causal TSSA on a CPU: sums of pieces, scores with memberships, output; each reads w once."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import causal_loops as loops
from rankwise.ops.tssa.cpu.arrays import flat, new, pieces
from rankwise.ops.tssa.cpu.carry import Carry, first_sums
from rankwise.ops.tssa.cpu.causal_back import backward as backward
from rankwise.ops.tssa.cpu.heads import score_room, temperatures
from rankwise.ops.tssa.cpu.threads import spread
from rankwise.ops.tssa.problem import Problem, Sums, exact
from rankwise.ops.tssa.reference import ENERGY_EPS, MASS_EPS


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the last sums; beside them, memory O(1) in T.

    Half-precision w and the output of it are there in float32 as well, and w out of order in order.

    Args:
        problem: a causal call.
        keep: whether scores are wanted; otherwise memberships lie in their place.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    w, dtype = problem.w, exact(problem.w.dtype)
    x, start = flat(w, dtype), first_sums(problem)
    *runs, workers = pieces(problem)
    carry, tasks = Carry(problem, runs), len(runs[0])
    tokens = (*carry.tokens, *runs[:2])
    totals = np.empty((tasks if carry.several else 0, *x.shape[1:]))
    if carry.several:
        read = (x, *tokens, totals)
        spread(lambda low, high: loops.totals(*read, low, high), tasks, workers)
    score, pi = score_room(x, keep)
    assigned, mass = np.empty_like(totals), np.empty((len(totals), w.shape[2], 1))
    after, offset = np.empty((tasks, *x.shape[1:]), x.dtype), flat(problem.offset, dtype)
    begin = carry.begins(totals, start[0])
    scan = (x, offset, temperatures(problem.temperature, dtype), *tokens, begin, ENERGY_EPS)
    write = (score, pi, after, assigned, mass[..., 0])
    spread(lambda low, high: loops.score_sweep(*scan, *write, low, high), tasks, workers)
    end = [carry.ends(after, start[0])]

    output, after_mass = new(w.shape, dtype), np.empty((tasks, w.shape[2]), x.dtype)
    first = carry.begins(assigned, start[1]), carry.begins(mass, start[2][..., None])[..., 0]
    known, to = (x, pi, *tokens, *first, MASS_EPS), (flat(output, dtype), after, after_mass)
    spread(lambda low, high: loops.output_sweep(*known, *to, low, high), tasks, workers)
    end += [carry.ends(after, start[1]), carry.ends(after_mass, start[2])]
    membership, scores = (torch.from_numpy(part).view(w.shape[:3]) for part in (pi, score))
    return output.to(w.dtype), membership, scores, Sums(*map(torch.from_numpy, end))
