"""Bidirectional token statistics self-attention (TSSA) by Triton kernels, for GPUs.

The docstring of `cpu_bidirectional` contains the formulas. d_x is the gradient of the loss with respect to x.
Kernels first sum over each chunk of tokens, and then visit the chunks again with the sums of whole sequences.
`triton_chunks` describes arguments that kernels share.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums
from rankwise.ops.reference import MASS_EPS, NORM_EPS
from rankwise.ops.triton_chunks import Chunks, indices, memberships, softmax_back


@triton.jit
@no_type_check
def vector_of(array, sequence, h, H, K, BK: tl.constexpr):
    """Return the vector array[n, h] of K entries, where n is the sequence of the current chunk."""
    k = tl.arange(0, BK)
    n = tl.load(sequence + tl.program_id(0))
    return tl.load(array + (n * H + h) * K + k, mask=k < K, other=0.0)[None, :]


@triton.jit
@no_type_check
def project_kernel(
    w, mask, first, last, sequence, decay, vector, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write Σ_k vector_k w_k² for each token of a chunk to `out`; the vector depends on sequence and head."""
    inside, _real, row, cell, known, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(out.dtype.element_ty)
    by = vector_of(vector, sequence, tl.program_id(1), H, K, BK)
    tl.store(out + row, tl.sum(x * x * by, 1), mask=inside)


@triton.jit
@no_type_check
def scale_kernel(
    w, mask, first, last, sequence, decay, membership, factor, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the output -Π w factor of each token of a chunk (Π: membership, w: projection)."""
    _inside, real, row, cell, known, there = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    found = -pi[:, None] * x * vector_of(factor, sequence, tl.program_id(1), H, K, BK)
    tl.store(out + cell, found.to(out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def scale_back_kernel(
    w, mask, first, last, sequence, decay, d_output, membership, factor, direct, total,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write minus d_Π through the outputs to `direct`, and a chunk's part of d_moment to `total`."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, known, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    g = tl.load(d_output + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    q = vector_of(factor, sequence, h, H, K, BK)
    k = tl.arange(0, BK)
    tl.store(direct + row, tl.sum(g * x * q, 1), mask=inside)
    tl.store(total + (c * H + h) * K + k, tl.sum(pi[:, None] * g * x * q * q, 0), mask=k < K)


@triton.jit
@no_type_check
def token_back_kernel(
    w, mask, first, last, sequence, decay, d_output, membership, d_score, factor, d_moment, inverse, d_energy,
    out, H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of w: 2w (d_moment Π + d_score inverse + d_energy) - Π d_output factor.

    Π is the membership, and d_x the gradient of the loss with respect to x.
    """
    h = tl.program_id(1)
    _inside, real, row, cell, known, there = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    g = tl.load(d_output + cell, mask=known, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)[:, None]
    ds = tl.load(d_score + row, mask=real, other=0.0)[:, None]
    of_energy = (
        vector_of(d_moment, sequence, h, H, K, BK) * pi + vector_of(inverse, sequence, h, H, K, BK) * ds
    )
    of_energy += vector_of(d_energy, sequence, h, H, K, BK)
    found = 2.0 * x * of_energy - pi * g * vector_of(factor, sequence, h, H, K, BK)
    tl.store(out + cell, tl.where(known, found, 0.0).to(out.dtype.element_ty), mask=there)


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and memberships, scores and sums for the backward pass."""
    chunks = Chunks(call)
    energy = chunks.total(chunks.sums(None)[0])
    score = _project(chunks, _inverse(energy))
    membership = memberships(score, call.temperature, call.mask, keep_scores)
    assigned, mass = (chunks.total(x) for x in chunks.sums(membership))
    output = torch.empty_like(chunks.w)
    chunks.launch(scale_kernel, membership, _factor(assigned, mass), output)
    return output, Saved(membership, score, Sums(energy, assigned, mass[..., 0]))


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w and of the temperature."""
    membership, score, (energy, assigned, mass) = saved
    chunks, mass = Chunks(call), mass[..., None]
    factor, inverse = _factor(assigned, mass), _inverse(energy)
    d_output, direct = cotangents.output.contiguous(), chunks.per_token()
    total, _ = chunks.per_chunk()
    chunks.launch(scale_back_kernel, d_output, membership, factor, direct, total)
    d_moment = chunks.total(total) / (mass + MASS_EPS)
    d_mass = (d_moment * assigned / (mass + MASS_EPS)).sum(-1)
    bounds = call.bounds
    d_mass = d_mass[:, None] if bounds is None else d_mass.repeat_interleave(bounds.diff(), 0)[None]
    d_membership = _project(chunks, d_moment) - direct + cotangents.membership - d_mass
    d_score, temperature = softmax_back(d_membership, membership, score, call.temperature)
    d_energy = -(chunks.total(chunks.sums(d_score)[0]) * inverse) * inverse  # inverse² would overflow float32
    d_energy = d_energy.masked_fill(energy < NORM_EPS**2, 0.0)
    out = torch.empty_like(chunks.w)
    chunks.launch(token_back_kernel, d_output, membership, d_score, factor, d_moment, inverse, d_energy, out)
    empty = [score.new_empty(0) for _ in range(4)]
    return Gradients(out, temperature, empty[0], Sums(*empty[1:]))


def _project(chunks: Chunks, vector: Tensor) -> Tensor:
    out = chunks.per_token()
    chunks.launch(project_kernel, vector.contiguous(), out)
    return out


def _inverse(energy: Tensor) -> Tensor:
    return 1 / energy.clamp(min=NORM_EPS**2)


def _factor(assigned: Tensor, mass: Tensor) -> Tensor:
    return 1 / (1 + assigned / (mass + MASS_EPS))
