"""Causal TSSA by Triton: chunk sums, a scan over chunks, then every chunk by itself; twice."""

import torch
from torch import Tensor

from rankwise.ops.tssa.problem import Problem, Sums
from rankwise.ops.tssa.reference import ENERGY_EPS, MASS_EPS
from rankwise.ops.tssa.triton.causal_back_kernels import output_back_kernel, score_back_kernel
from rankwise.ops.tssa.triton.causal_kernels import output_kernel, score_kernel
from rankwise.ops.tssa.triton.chunks import Chunks
from rankwise.ops.tssa.triton.heads import memberships, scores_back


def forward(problem: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output, memberships, scores and the last sums; memory O(B T H) beside w and the output.

    Args:
        problem: a causal call.
        keep: whether scores are wanted; otherwise memberships lie in their place.

    Returns:
        Output in the dtype of w, the others in that of the sums.
    """
    chunks, start = Chunks(problem), problem.first()
    base, energy = _scan(chunks, None, start.energy)
    score = chunks.tokens()
    chunks.launch(score_kernel, base, score, ENERGY_EPS)
    if problem.offset is not None:
        score += problem.offset
    membership = memberships(score, problem.temperature, problem.mask, keep)
    base, mass_base, assigned, mass = _assigned(chunks, membership, start)
    output = torch.empty_like(chunks.w)
    chunks.launch(output_kernel, membership, base, mass_base, output, MASS_EPS)
    return output, membership, score, Sums(energy, assigned, mass)


def backward(
    problem: Problem,
    membership: Tensor,
    score: Tensor,
    given: Tensor,
    given_membership: Tensor,
    given_end: Sums,
) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Gradients of w, of the temperature, of the scores' offset and of the first sums.

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
    chunks, start = Chunks(problem), problem.first()
    given, age = given.contiguous(), chunks.ages()
    base, mass_base, _, _ = _assigned(chunks, membership, start)
    total, total_mass = chunks.per_chunk()
    partial, asked = torch.empty_like(chunks.w, dtype=chunks.dtype), chunks.tokens()
    fixed = (given, membership, base, mass_base)

    def through_output(later: Tensor, later_mass: Tensor, finish: bool) -> None:
        arrays = (*fixed, later, later_mass, total, total_mass, partial, asked, MASS_EPS)
        chunks.launch(output_back_kernel, *arrays, FINISH=finish)

    through_output(total, total_mass, False)
    later, assigned = chunks.carry(total, age, given_end.assigned, backward=True)
    later_mass, mass = chunks.carry(total_mass[..., None], age, given_end.mass[..., None], backward=True)
    through_output(later, later_mass, True)
    slope, temperature = scores_back(asked + given_membership, membership, score, problem.temperature)

    base, _ = _scan(chunks, None, start.energy)
    out = torch.empty_like(chunks.w)

    def through_score(later: Tensor, finish: bool) -> None:
        chunks.launch(score_back_kernel, slope, base, later, total, partial, out, ENERGY_EPS, FINISH=finish)

    through_score(total, False)
    later, energy = chunks.carry(total, age, given_end.energy, backward=True)
    through_score(later, True)
    return out, temperature, slope, Sums(energy, assigned, mass[..., 0])


def _scan(chunks: Chunks, weight: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor]:
    total, _ = chunks.sums(weight)
    return chunks.carry(total, chunks.ages(), start)


def _assigned(chunks: Chunks, membership: Tensor, start: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, total_mass = chunks.sums(membership)
    age = chunks.ages()
    base, end = chunks.carry(total, age, start.assigned)
    mass_base, mass = chunks.carry(total_mass[..., None], age, start.mass[..., None])
    return base, mass_base, end, mass[..., 0]
