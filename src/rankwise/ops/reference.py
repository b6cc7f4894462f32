"""TSSA in plain torch, as the formulas say it: the oracle of every other implementation."""

from contextlib import nullcontext
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.ops.arguments import Problem, Solution, Sums, check_ends, exact
from rankwise.ops.decay import running_sum

NORM_EPS = 1e-12
"""Bidirectional: a channel's norm over the tokens is at least this."""
ENERGY_EPS = 1e-12
"""Causal: a channel's running energy is at least this."""
MASS_EPS = 1e-8
"""Added to ΣΠ before dividing by it."""


def bidirectional(
    w: Float[Tensor, "B T H K"],
    temperature: Float[Tensor, " H"] | None,
    mask: Bool[Tensor, "B T"] | None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H"]]:
    """Bidirectional TSSA. Memory and time O(B T H K): a handful of tensors of the size of w.

    Args:
        w: tokens in the heads' subspaces, in the dtype of the sums.
        temperature: of each head, or None for uniform memberships.
        mask: real tokens.

    Returns:
        Output and memberships.
    """
    w = _hide(w, mask)
    energy = w.square()
    total = energy.sum(1, keepdim=True).clamp(min=NORM_EPS**2)
    score = (energy / total).sum(-1)
    membership = _membership(score, temperature, mask)
    mass = membership.sum(1) + MASS_EPS
    moment = (membership[..., None] * energy).sum(1) / mass[..., None]
    return -w * membership[..., None] / (1 + moment[:, None]), membership


def causal(
    w: Float[Tensor, "B T H K"],
    temperature: Float[Tensor, " H"] | None,
    offset: Float[Tensor, "B T H"] | None,
    mask: Bool[Tensor, "B T"] | None,
    start: Sums,
    rate: Float[Tensor, " H"] | None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H"], Sums]:
    """Causal TSSA from a state on. Memory and time O(B T H K).

    Args:
        w: tokens in the heads' subspaces, in the dtype of the sums.
        temperature: of each head, or None for uniform memberships.
        offset: K times the learned bias at each token's position.
        mask: real tokens.
        start: sums of the tokens before these.
        rate: λ of each head, or None for λ = 1.

    Returns:
        Output, memberships and the sums after the last token.
    """
    w = _hide(w, mask)
    energy = w.square()
    total = running_sum(energy, start.energy, rate, mask)
    score = (energy / total.clamp(min=ENERGY_EPS)).sum(-1)
    if offset is not None:
        score = score + offset
    membership = _membership(score, temperature, mask)
    mass = running_sum(membership[..., None], start.mass[..., None], rate, mask)
    assigned = running_sum(membership[..., None] * energy, start.assigned, rate, mask)
    output = -w * membership[..., None] / (1 + assigned / (mass + MASS_EPS))
    return output, membership, Sums(total[:, -1], assigned[:, -1], mass[:, -1, :, 0])


def solve(problem: Problem) -> Solution:
    """Run the formulas, sequence by sequence where several are packed in one row."""
    kind = problem.w.device.type
    known = torch.amp.autocast_mode.is_autocast_available(kind)
    with torch.autocast(kind, enabled=False) if known else nullcontext():
        if problem.bounds is None:
            return _solve(problem)
        ends = problem.bounds.tolist()
        check_ends(ends, problem.w.shape[1])  # a compiled call comes here unchecked
        parts = [_solve(_sequence(problem, n, low, high)) for n, (low, high) in enumerate(pairwise(ends))]
    output = torch.cat([part.output for part in parts], 1)
    membership = torch.cat([part.membership for part in parts], 1)
    if not problem.causal:
        return Solution(output, membership, None)
    sums = [part.end for part in parts if part.end is not None]
    energy, assigned, mass = (torch.cat([end[i] for end in sums]) for i in range(3))
    return Solution(output, membership, Sums(energy, assigned, mass))


def _sequence(problem: Problem, n: int, low: int, high: int) -> Problem:
    def tokens(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, low:high]

    start = None if problem.start is None else Sums(*(part[n : n + 1] for part in problem.start))
    cut = problem._replace(offset=tokens(problem.offset), mask=tokens(problem.mask), start=start)
    return cut._replace(w=problem.w[:, low:high], bounds=None)


def _solve(problem: Problem) -> Solution:
    w, temperature, offset, mask, _, rate = problem[:6]
    wide, start = w.to(exact(w.dtype)), problem.first() if problem.causal else None
    if w.shape[1] == 0:
        return Solution(w, wide[..., 0], start)
    if start is None:
        output, membership = bidirectional(wide, temperature, mask)
        return Solution(output.to(w.dtype), membership, None)
    output, membership, end = causal(wide, temperature, offset, mask, start, rate)
    return Solution(output.to(w.dtype), membership, end)


def _hide(w: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros for padding, whatever lies there."""
    return w if mask is None else w.masked_fill(~mask[..., None, None], 0.0)


def _membership(score: Tensor, temperature: Tensor | None, mask: Tensor | None) -> Tensor:
    if temperature is None:
        membership = torch.full_like(score, 1 / score.shape[-1])
    else:
        membership = (temperature * score).softmax(-1)
    return membership if mask is None else membership.masked_fill(~mask[..., None], 0.0)
