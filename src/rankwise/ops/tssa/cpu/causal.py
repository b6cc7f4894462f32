"""Causal TSSA on a CPU: sums of pieces, scores with memberships, output; each reads w once."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import causal_loops as loops
from rankwise.ops.tssa.cpu.arrays import flat, new, pieces
from rankwise.ops.tssa.cpu.carry import Carry, first_sums
from rankwise.ops.tssa.cpu.causal_back import backward as backward
from rankwise.ops.tssa.cpu.heads import membership_room
from rankwise.ops.tssa.cpu.threads import spread
from rankwise.ops.tssa.problem import Problem, Sums, exact
from rankwise.ops.tssa.reference import ENERGY_EPS, MASS_EPS


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the last sums; memory O(B T H) beside w and the output.

    Args:
        problem: a causal call.

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
    score = new(w.shape[:3], dtype)
    tau, membership = membership_room(score, problem.temperature, problem.mask)
    assigned, mass = np.empty_like(totals), np.empty((len(totals), w.shape[2], 1))
    pi, after = flat(membership, dtype), np.empty((tasks, *x.shape[1:]), x.dtype)
    scan = (x, flat(problem.offset, dtype), tau, *tokens, carry.begins(totals, start[0]), ENERGY_EPS)
    write = (flat(score, dtype), pi, after, assigned, mass[..., 0])
    spread(lambda low, high: loops.score_sweep(*scan, *write, low, high), tasks, workers)
    end = [carry.ends(after, start[0])]

    output, after_mass = new(w.shape, dtype), np.empty((tasks, w.shape[2]), x.dtype)
    begin = carry.begins(assigned, start[1]), carry.begins(mass, start[2][..., None])[..., 0]
    known, to = (x, pi, *tokens, *begin, MASS_EPS), (flat(output, dtype), after, after_mass)
    spread(lambda low, high: loops.output_sweep(*known, *to, low, high), tasks, workers)
    end += [carry.ends(after, start[1]), carry.ends(after_mass, start[2])]
    return output.to(w.dtype), membership, score, Sums(*(torch.from_numpy(part) for part in end))
