"""Causal TSSA on a CPU: scores, memberships, output; each reads w once."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu.arrays import array, flat, head_blocks, powers
from rankwise.ops.tssa.cpu.causal_back_loops import output_sweep_back, score_sweep_back
from rankwise.ops.tssa.cpu.causal_loops import output_sweep, score_sweep
from rankwise.ops.tssa.cpu.heads import memberships, scores_back
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
    w, start, dtype = problem.w, _start(problem), exact(problem.w.dtype)
    blocks, workers = head_blocks(len(problem.bounds) - 1, w.shape[2], w.numel())
    x, common = flat(w, dtype), _common(problem, dtype)
    first = [array(part, dtype) for part in start]
    end = [np.empty_like(part) for part in first]
    score = torch.empty(w.shape[:3], dtype=dtype)
    tasks = (len(problem.bounds) - 1) * blocks

    to = score.flatten(0, 1).numpy()
    scan = (x, *common, first[0], ENERGY_EPS, to, end[0], blocks)
    spread(lambda low, high: score_sweep(*scan, low, high), tasks, workers)
    if problem.offset is not None:
        score += problem.offset
    membership = memberships(score, problem.temperature, problem.mask, workers)
    output = torch.empty(w.shape, dtype=dtype)
    pi, out = flat(membership, dtype), output.flatten(0, 1).numpy()
    write = (x, pi, *common, first[1], first[2], MASS_EPS, out, end[1], end[2], blocks)
    spread(lambda low, high: output_sweep(*write, low, high), tasks, workers)
    return output.to(w.dtype), membership, score, Sums(*(torch.from_numpy(part) for part in end))


def backward(
    problem: Problem,
    membership: Tensor,
    score: Tensor,
    given: Tensor,
    given_membership: Tensor,
    given_end: Sums,
) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Gradients of w, of the temperature, of the scores' offset and of the first sums.

    Memory beside the gradients: O(B T H), and sums at the start of every chunk, 1/64 of w.

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
    w, start, dtype = problem.w, _start(problem), exact(problem.w.dtype)
    blocks, workers = head_blocks(len(problem.bounds) - 1, w.shape[2], w.numel())
    tasks = (len(problem.bounds) - 1) * blocks
    x, go, pi, common = flat(w, dtype), flat(given, dtype), flat(membership, dtype), _common(problem, dtype)
    first, last = [array(part, dtype) for part in start], [array(part, dtype) for part in given_end]
    begin = [np.empty_like(part) for part in first]
    out, asked = torch.empty(w.shape, dtype=dtype), torch.empty_like(score)
    to, ask = out.flatten(0, 1).numpy(), asked.flatten(0, 1).numpy()

    one = (x, go, pi, *common, *first[1:], MASS_EPS, *last[1:], to, ask, *begin[1:], blocks)
    spread(lambda low, high: output_sweep_back(*one, low, high), tasks, workers)
    asked += given_membership
    slope, temperature = scores_back(asked, membership, score, problem.temperature, workers)
    ds, none = flat(slope, dtype), flat(None, dtype)
    two = (x, ds, none, *common, first[0], ENERGY_EPS, last[0], to, begin[0], blocks)
    spread(lambda low, high: score_sweep_back(*two, low, high), tasks, workers)
    return out.to(w.dtype), temperature, slope, Sums(*(torch.from_numpy(part) for part in begin))


def _start(problem: Problem) -> Sums:
    if problem.start is None:
        raise TypeError("a causal call has sums to start from")
    return problem.start


def _common(problem: Problem, dtype: torch.dtype) -> tuple[np.ndarray, ...]:
    table, rate = powers(problem.rate, problem.w.shape[2], dtype)
    return array(problem.bounds), flat(problem.mask, torch.bool), table, rate
