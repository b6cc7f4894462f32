"""Bidirectional TSSA by Triton: sums by chunk, then every chunk by itself."""

import torch
from torch import Tensor

from rankwise.ops.tssa.problem import Problem, Sums
from rankwise.ops.tssa.reference import MASS_EPS, NORM_EPS
from rankwise.ops.tssa.triton.bidirectional_kernels import (
    project_kernel,
    scale_back_kernel,
    scale_kernel,
    token_back_kernel,
)
from rankwise.ops.tssa.triton.chunks import Chunks
from rankwise.ops.tssa.triton.heads import memberships, scores_back


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the sums over all tokens; memory O(B T H) beside w and the output.

    Args:
        problem: a bidirectional call.
        keep: whether scores are wanted; otherwise memberships lie in their place.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    chunks = Chunks(problem)
    energy, _ = _over_tokens(chunks, None)
    score = _project(chunks, _inverse(energy))
    membership = memberships(score, problem.temperature, problem.mask, keep)
    assigned, mass = _over_tokens(chunks, membership)
    output = torch.empty_like(chunks.w)
    chunks.launch(scale_kernel, membership, _factor(assigned, mass), output)
    return output, membership, score, Sums(energy, assigned, mass)


def backward(
    problem: Problem, membership: Tensor, score: Tensor, sums: Sums, given: Tensor, given_membership: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of w and of the temperature.

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
    chunks, mass = Chunks(problem), sums.mass[..., None] + MASS_EPS
    factor, inverse = _factor(sums.assigned, sums.mass), _inverse(sums.energy)
    given, direct = given.contiguous(), chunks.tokens()
    total, _ = chunks.per_chunk()
    chunks.launch(scale_back_kernel, given, membership, factor, direct, total)
    moment = _gather(chunks, total) / mass
    less = (moment * sums.assigned / mass).sum(-1)
    bounds = problem.bounds
    less = less[:, None] if bounds is None else less.repeat_interleave(bounds.diff(), 0)[None]
    asked = _project(chunks, moment) - direct + given_membership - less
    slope, temperature = scores_back(asked, membership, score, problem.temperature)
    energy = -(_over_tokens(chunks, slope)[0] * inverse) * inverse  # inverse² leaves float32
    energy = energy.masked_fill(sums.energy < NORM_EPS**2, 0.0)
    out = torch.empty_like(chunks.w)
    chunks.launch(token_back_kernel, given, membership, slope, factor, moment, inverse, energy, out)
    return out, temperature


def _over_tokens(chunks: Chunks, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    total, mass = chunks.sums(weight)
    return _gather(chunks, total), _gather(chunks, mass[..., None])[..., 0]


def _gather(chunks: Chunks, total: Tensor) -> Tensor:
    start = total.new_zeros(len(chunks.begin) - 1, *total.shape[1:])
    return chunks.carry(total, chunks.ages(), start)[1]


def _project(chunks: Chunks, vector: Tensor) -> Tensor:
    out = chunks.tokens()
    chunks.launch(project_kernel, vector.contiguous(), out)
    return out


def _inverse(energy: Tensor) -> Tensor:
    return 1 / energy.clamp(min=NORM_EPS**2)


def _factor(assigned: Tensor, mass: Tensor) -> Tensor:
    return 1 / (1 + assigned / (mass[..., None] + MASS_EPS))
