"""Bidirectional TSSA on a CPU: three reads of w for its statistics, one for the output."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu import bidirectional_back_loops, bidirectional_loops
from rankwise.ops.tssa.cpu.arrays import array, flat, new, pieces
from rankwise.ops.tssa.cpu.heads import score_room, temperatures
from rankwise.ops.tssa.cpu.relay import board, relay
from rankwise.ops.tssa.problem import Problem, Sums, exact, in_dtype
from rankwise.ops.tssa.reference import MASS_EPS, NORM_EPS

EPS = (NORM_EPS**2, MASS_EPS)


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the sums over all tokens; beside them, memory O(1) in T.

    That is two float64 sums for every piece, of which each sequence has one at least. Half-precision w and
    the output of it are there in float32 as well, and w out of order in order.

    Args:
        problem: a bidirectional call.
        keep: whether scores are wanted; otherwise memberships lie in their place.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    w, dtype = problem.w, exact(problem.w.dtype)
    _, _, heads, width = w.shape
    runs, workers = pieces(problem)
    count = len(runs.first)
    x = flat(w, dtype)
    score, membership = score_room(x, keep)
    output = new(w.shape, dtype)
    room = [np.empty((count, heads, each)) for each in (width, width, 1)]
    sums = [np.zeros((problem.sequences, heads, each), x.dtype) for each in (width, width, 1)]
    read = (x, temperatures(problem.temperature, dtype), flat(problem.mask, torch.bool), *runs, *EPS)
    every = (*read, *room, *sums, score, membership, flat(output, dtype), board(count))
    # now, as behind the loops torch's code is in no cache any more
    pi, scores = (torch.from_numpy(part.reshape(w.shape[:3])) for part in (membership, score))
    end = Sums(*map(torch.from_numpy, (*sums[:2], sums[2][..., 0])))

    relay(bidirectional_loops.forward, every, [-1], min(workers, count))
    return in_dtype(output, w.dtype), pi, scores, end


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
    _, _, heads, width = w.shape
    runs, workers = pieces(problem)
    count = len(runs.first)
    per_token = [flat(part, dtype) for part in (w, given, membership, score)]
    read = (*per_token, temperatures(problem.temperature, dtype), flat(given_membership, dtype))
    energy, assigned, mass = map(array, sums)
    room = [np.empty((count, heads, width)) for _ in range(2)]
    slope, of_temperature = np.empty_like(per_token[2]), np.empty((count, heads))
    out = new(w.shape, dtype)
    tokens = (flat(problem.mask, torch.bool), *runs, *EPS, energy, assigned, mass[..., None])
    every = (
        *read, *tokens, *room, np.empty_like(slope), slope, of_temperature, flat(out, dtype), board(count),
    )  # fmt: skip
    relay(bidirectional_back_loops.backward, every, [-1], min(workers, count))
    return in_dtype(out, w.dtype), torch.from_numpy(of_temperature).sum(0).to(dtype)
