"""Bidirectional TSSA by Triton: sums by chunk, then every chunk by itself."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums
from rankwise.ops.reference import MASS_EPS, NORM_EPS
from rankwise.ops.triton_chunks import Chunks, memberships, places, scores_back


@triton.jit
@no_type_check
def vector_of(array, owner, h, H, K, BK: tl.constexpr):
    """The row of (N, H, K) that belongs to a chunk's sequence."""
    k = tl.arange(0, BK)
    n = tl.load(owner + tl.program_id(0))
    return tl.load(array + (n * H + h) * K + k, mask=k < K, other=0.0)[None, :]


@triton.jit
@no_type_check
def project_kernel(
    w, mask, first, last, owner, decay, vector, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Σ_k vector w²."""
    inside, _real, row, cell, known, _ = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(out.dtype.element_ty)
    by = vector_of(vector, owner, tl.program_id(1), H, K, BK)
    tl.store(out + row, tl.sum(x * x * by, 1), mask=inside)


@triton.jit
@no_type_check
def scale_kernel(
    w, mask, first, last, owner, decay, membership, factor, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Out = -Π w factor."""
    _inside, real, row, cell, known, there = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    found = -pi[:, None] * x * vector_of(factor, owner, tl.program_id(1), H, K, BK)
    tl.store(out + cell, found.to(out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def scale_back_kernel(
    w, mask, first, last, owner, decay, given, membership, factor, direct, total,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Direct = Σ_k g w factor; total = Σ_t Π g w factor² of the chunk."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, known, _ = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    g = tl.load(given + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    q = vector_of(factor, owner, h, H, K, BK)
    k = tl.arange(0, BK)
    tl.store(direct + row, tl.sum(g * x * q, 1), mask=inside)
    tl.store(total + (c * H + h) * K + k, tl.sum(pi[:, None] * g * x * q * q, 0), mask=k < K)


@triton.jit
@no_type_check
def token_back_kernel(
    w, mask, first, last, owner, decay, given, membership, slope, factor, moment, inverse, energy, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Gradient of w: 2w (moment Π + slope inverse + energy) - Π g factor."""
    h = tl.program_id(1)
    _inside, real, row, cell, known, there = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    g = tl.load(given + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)[:, None]
    ds = tl.load(slope + row, mask=real, other=0.0)[:, None]
    of_energy = vector_of(moment, owner, h, H, K, BK) * pi + vector_of(inverse, owner, h, H, K, BK) * ds
    of_energy += vector_of(energy, owner, h, H, K, BK)
    found = 2.0 * x * of_energy - pi * g * vector_of(factor, owner, h, H, K, BK)
    tl.store(out + cell, tl.where(known, found, 0.0).to(out.dtype.element_ty), mask=there)


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Output, memberships, scores and the sums over all tokens; memory O(B T H) beside w and the output."""
    chunks = Chunks(call)
    energy, _ = _over_tokens(chunks, None)
    score = _project(chunks, _inverse(energy))
    membership = memberships(score, call.temperature, call.mask, keep_scores)
    assigned, mass = _over_tokens(chunks, membership)
    output = torch.empty_like(chunks.w)
    chunks.launch(scale_kernel, membership, _factor(assigned, mass), output)
    return output, Saved(membership, score, Sums(energy, assigned, mass))


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Gradients of w and of the temperature."""
    membership, score, sums = saved
    given, given_membership = cotangents[:2]
    chunks, mass = Chunks(call), sums.mass[..., None] + MASS_EPS
    factor, inverse = _factor(sums.assigned, sums.mass), _inverse(sums.energy)
    given, direct = given.contiguous(), chunks.tokens()
    total, _ = chunks.per_chunk()
    chunks.launch(scale_back_kernel, given, membership, factor, direct, total)
    moment = _gather(chunks, total) / mass
    less = (moment * sums.assigned / mass).sum(-1)
    bounds = call.bounds
    less = less[:, None] if bounds is None else less.repeat_interleave(bounds.diff(), 0)[None]
    asked = _project(chunks, moment) - direct + given_membership - less
    slope, temperature = scores_back(asked, membership, score, call.temperature)
    energy = -(_over_tokens(chunks, slope)[0] * inverse) * inverse  # inverse² leaves float32
    energy = energy.masked_fill(sums.energy < NORM_EPS**2, 0.0)
    out = torch.empty_like(chunks.w)
    chunks.launch(token_back_kernel, given, membership, slope, factor, moment, inverse, energy, out)
    empty = [score.new_empty(0) for _ in range(4)]
    return Gradients(out, temperature, empty[0], Sums(*empty[1:]))


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
