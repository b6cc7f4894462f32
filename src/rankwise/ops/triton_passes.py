"""Token statistics self-attention (TSSA) by Triton kernels, for GPUs: forward and backward passes.

The docstring of `cpu_passes` contains the formulas. d_x is the gradient of the loss with respect to x.
Kernels compute the sums over each chunk of tokens, and `Chunks.carry` adds them up. In causal TSSA the next
kernel starts each chunk with the sums before it (`base`). Kernels that compute causal gradients run twice:
first they sum over each chunk, then (FINISH) they add sums from later chunks (`d_after`). In bidirectional
TSSA the next kernel visits the chunks again with the sums of whole rows. `triton_chunks` describes arguments
that all kernels share.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS, NORM_EPS
from rankwise.ops.triton_chunks import (
    Chunks,
    ages_of,
    indices,
    memberships,
    power,
    reverse_running,
    running,
    softmax_back,
    triangle,
)


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and `Saved` for the backward pass: memberships, scores and final sums."""
    return (_causal_forward if call.causal else _bidirectional_forward)(call, keep_scores)


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w and temperature and, if causal, of offset and sums before the first token."""
    return (_causal_backward if call.causal else _bidirectional_backward)(call, saved, cotangents)


# --- causal -------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def energy_at(x, base, age, real, rate, c, h, H, K, BK: tl.constexpr, DECAYED: tl.constexpr):
    """Return the running energy of each token of a chunk: the decayed sum of w² up to the token."""
    k = tl.arange(0, BK)
    before = tl.load(base + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
    if DECAYED:
        before = before * power(rate, age, x)[:, None]
    return before + running(x * x, age, real, rate, DECAYED)


@triton.jit
@no_type_check
def moment_at(
    x, pi, base, base_mass, age, real, rate, c, h, H, K, eps, BK: tl.constexpr, DECAYED: tl.constexpr
):
    """Return assigned energy Σ Π w² and mass Σ Π + eps up to each token of a chunk (Π: membership)."""
    k = tl.arange(0, BK)
    before = tl.load(base + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
    mass = tl.load(base_mass + c * H + h)
    if DECAYED:
        before = before * power(rate, age, x)[:, None]
        mass = mass * power(rate, age, x)
        gap, t = age[:, None] - age[None, :], tl.arange(0, x.shape[0])
        below = (gap >= 0) & (t[:, None] >= t[None, :]) & real[None, :]
        weight = power(rate, tl.maximum(gap, 0.0), x) * pi[None, :]
        mass = mass + tl.sum(tl.where(below, weight, 0.0), 1)  # not a product: 0 · NaN = NaN
    else:
        mass = mass + tl.cumsum(pi, 0)
    return before + running(pi[:, None] * x * x, age, real, rate, DECAYED), mass + eps


@triton.jit
@no_type_check
def score_kernel(
    w, mask, first, last, row_of, decay, base, score, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the score Σ_k w²/max(energy, eps) of each token of a chunk, without the offset."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, read, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(score.dtype.element_ty)
    age, rate = ages_of(real, decay, h)
    energy = energy_at(x, base, age, real, rate, c, h, H, K, BK, DECAYED)
    tl.store(score + row, tl.sum(x * x / tl.where(energy < eps, eps, energy), 1), mask=inside)


@triton.jit
@no_type_check
def output_kernel(
    w, mask, first, last, row_of, decay, membership, base, base_mass, out, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the output -Π w mass/(mass + assigned energy) of each token of a chunk (Π: membership)."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, read, written = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(base.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    age, rate = ages_of(real, decay, h)
    moment, mass = moment_at(x, pi, base, base_mass, age, real, rate, c, h, H, K, eps, BK, DECAYED)
    result = -pi[:, None] * x * (mass[:, None] / (mass[:, None] + moment))
    tl.store(out + cell, result.to(out.dtype.element_ty), mask=written)


@triton.jit
@no_type_check
def output_back_kernel(
    w, mask, first, last, row_of, decay, d_output, membership, base, base_mass, d_after, d_after_mass,
    total, total_mass, out, d_membership, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Go backward through the outputs.

    Write gradients of the sums at the chunk's start or, with FINISH, of w and memberships.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, read, written = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(base.dtype.element_ty)
    g = tl.load(d_output + cell, mask=read, other=0.0).to(base.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    age, rate = ages_of(real, decay, h)
    moment, mass = moment_at(x, pi, base, base_mass, age, real, rate, c, h, H, K, eps, BK, DECAYED)
    inverse = 1.0 / (mass[:, None] + moment)
    q = mass[:, None] * inverse
    share = inverse * q * pi[:, None] * g * x
    d_mass = tl.sum(share * (moment / mass[:, None]), 1)
    k = tl.arange(0, BK)
    if not FINISH:
        fade = tl.where(real, 1.0, 0.0).to(x.dtype)
        if DECAYED:
            fade = fade * power(rate, age, x)  # decay from the start of the chunk to each token
        tl.store(total + (c * H + h) * K + k, tl.sum(fade[:, None] * share, 0), mask=k < K)
        tl.store(total_mass + c * H + h, -tl.sum(fade * d_mass, 0))
    else:
        after = tl.load(d_after + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
        after_mass = tl.load(d_after_mass + c * H + h)
        if DECAYED:
            fade = power(rate, tl.max(age, 0) - age, x)
            after = after * fade[:, None]
            after_mass = after_mass * fade
            after_mass = after_mass - tl.sum(triangle(x, age, real, rate, True) * d_mass[None, :], 1)
        else:
            after_mass = after_mass - tl.cumsum(d_mass, 0, reverse=True)
        of_sum = after + reverse_running(share, age, real, rate, DECAYED)
        through = tl.sum(of_sum * x * x - g * x * q, 1) + after_mass
        tl.store(d_membership + row, tl.where(real, through, 0.0), mask=inside)
        result = pi[:, None] * (2.0 * x * of_sum - g * q)
        tl.store(out + cell, tl.where(real[:, None], result, 0.0), mask=written)


@triton.jit
@no_type_check
def score_back_kernel(
    w, mask, first, last, row_of, decay, d_score, base, d_after, total, partial, out, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Go backward through the scores.

    Write gradients of the energy at the chunk's start or, with FINISH, of w.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, read, written = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(base.dtype.element_ty)
    ds = tl.load(d_score + row, mask=real, other=0.0)[:, None]
    age, rate = ages_of(real, decay, h)
    energy = energy_at(x, base, age, real, rate, c, h, H, K, BK, DECAYED)
    inverse = 1.0 / tl.where(energy < eps, eps, energy)
    share = tl.where(energy >= eps, -ds * (x * x * inverse) * inverse, 0.0)
    k = tl.arange(0, BK)
    if not FINISH:
        fade = tl.where(real, 1.0, 0.0).to(x.dtype)
        if DECAYED:
            fade = fade * power(rate, age, x)
        tl.store(total + (c * H + h) * K + k, tl.sum(fade[:, None] * share, 0), mask=k < K)
    else:
        after = tl.load(d_after + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
        if DECAYED:
            after = after * power(rate, tl.max(age, 0) - age, x)[:, None]
        of_sum = after + reverse_running(share, age, real, rate, DECAYED)
        before = tl.load(partial + cell, mask=read, other=0.0)
        result = before + 2.0 * x * (ds * inverse + of_sum)
        tl.store(out + cell, tl.where(read, result, 0.0).to(out.dtype.element_ty), mask=written)


def _causal_forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and `Saved` for the backward pass: memberships, scores and final sums."""
    chunks, start = Chunks(call), call.initial_sums()
    base, energy = chunks.carry(chunks.sums(None)[0], start.energy)
    score = chunks.per_token()
    chunks.launch(score_kernel, base, score, ENERGY_EPS)
    if call.offset is not None:
        score += call.offset
    membership = memberships(score, call.temperature, call.mask, keep_scores)
    total, total_mass = chunks.sums(membership)
    base, assigned = chunks.carry(total, start.assigned)
    base_mass, mass = chunks.carry(total_mass, start.mass[..., None])
    output = torch.empty_like(chunks.w)
    chunks.launch(output_kernel, membership, base, base_mass, output, MASS_EPS)
    return output, Saved(membership, score, Sums(energy, assigned, mass[..., 0]))


def _causal_backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w, temperature, offset and the sums before the first token."""
    membership, score, _ = saved
    chunks, start, d_end = Chunks(call), call.initial_sums(), cotangents.sums
    total, total_mass = chunks.sums(membership)
    base, _ = chunks.carry(total, start.assigned)
    base_mass, _ = chunks.carry(total_mass, start.mass[..., None])
    partial, d_membership = torch.empty_like(chunks.w, dtype=chunks.dtype), chunks.per_token()
    fixed = (cotangents.output.contiguous(), membership, base, base_mass)

    def through_output(d_after: Tensor, d_after_mass: Tensor, finish: bool) -> None:
        arrays = (*fixed, d_after, d_after_mass, total, total_mass, partial, d_membership, MASS_EPS)
        chunks.launch(output_back_kernel, *arrays, FINISH=finish)

    through_output(total, total_mass, False)
    d_after, d_assigned = chunks.carry(total, d_end.assigned, backward=True)
    d_after_mass, d_mass = chunks.carry(total_mass, d_end.mass[..., None], backward=True)
    through_output(d_after, d_after_mass, True)
    d_membership += cotangents.membership
    d_score, d_temperature = softmax_back(d_membership, membership, score, call.temperature)

    base, _ = chunks.carry(chunks.sums(None)[0], start.energy)
    out = torch.empty_like(chunks.w)

    def through_score(d_after: Tensor, finish: bool) -> None:
        chunks.launch(
            score_back_kernel, d_score, base, d_after, total, partial, out, ENERGY_EPS, FINISH=finish
        )

    through_score(total, False)
    d_after, d_energy = chunks.carry(total, d_end.energy, backward=True)
    through_score(d_after, True)
    return Gradients(out, d_temperature, d_score, Sums(d_energy, d_assigned, d_mass[..., 0]))


# --- bidirectional ------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def vector_of(array, row_of, h, H, K, BK: tl.constexpr):
    """Return the vector array[n, h] of K entries, where n is the row of the current chunk."""
    k = tl.arange(0, BK)
    n = tl.load(row_of + tl.program_id(0))
    return tl.load(array + (n * H + h) * K + k, mask=k < K, other=0.0)[None, :]


@triton.jit
@no_type_check
def project_kernel(
    w, mask, first, last, row_of, decay, vector, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write Σ_k vector_k w_k² for each token of a chunk to `out`; the vector depends on row and head."""
    inside, _real, row, cell, read, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(out.dtype.element_ty)
    by = vector_of(vector, row_of, tl.program_id(1), H, K, BK)
    tl.store(out + row, tl.sum(x * x * by, 1), mask=inside)


@triton.jit
@no_type_check
def scale_kernel(
    w, mask, first, last, row_of, decay, membership, factor, out,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the output -Π w factor of each token of a chunk (Π: membership, w: projection)."""
    _inside, real, row, cell, read, written = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    result = -pi[:, None] * x * vector_of(factor, row_of, tl.program_id(1), H, K, BK)
    tl.store(out + cell, result.to(out.dtype.element_ty), mask=written)


@triton.jit
@no_type_check
def scale_back_kernel(
    w, mask, first, last, row_of, decay, d_output, membership, factor, direct, total,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write -d_Π through the outputs to `direct`, and a chunk's part of d_moment to `total`."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, read, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(membership.dtype.element_ty)
    g = tl.load(d_output + cell, mask=read, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    q = vector_of(factor, row_of, h, H, K, BK)
    k = tl.arange(0, BK)
    tl.store(direct + row, tl.sum(g * x * q, 1), mask=inside)
    tl.store(total + (c * H + h) * K + k, tl.sum(pi[:, None] * g * x * q * q, 0), mask=k < K)


@triton.jit
@no_type_check
def token_back_kernel(
    w, mask, first, last, row_of, decay, d_output, membership, d_score, factor, d_moment, inverse, d_energy,
    out, H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of w: 2w (d_moment Π + d_score inverse + d_energy) - Π d_output factor."""
    h = tl.program_id(1)
    _inside, real, row, cell, read, written = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(membership.dtype.element_ty)
    g = tl.load(d_output + cell, mask=read, other=0.0).to(membership.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)[:, None]
    ds = tl.load(d_score + row, mask=real, other=0.0)[:, None]
    of_energy = vector_of(d_moment, row_of, h, H, K, BK) * pi + vector_of(inverse, row_of, h, H, K, BK) * ds
    of_energy += vector_of(d_energy, row_of, h, H, K, BK)
    result = 2.0 * x * of_energy - pi * g * vector_of(factor, row_of, h, H, K, BK)
    tl.store(out + cell, tl.where(read, result, 0.0).to(out.dtype.element_ty), mask=written)


def _bidirectional_forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and `Saved` for the backward pass: memberships, scores and sums."""
    chunks = Chunks(call)
    energy = chunks.total(chunks.sums(None)[0])
    score = _project(chunks, _inverse(energy))
    membership = memberships(score, call.temperature, call.mask, keep_scores)
    assigned, mass = (chunks.total(x) for x in chunks.sums(membership))
    output = torch.empty_like(chunks.w)
    chunks.launch(scale_kernel, membership, _factor(assigned, mass), output)
    return output, Saved(membership, score, Sums(energy, assigned, mass[..., 0]))


def _bidirectional_backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w and of the temperature."""
    membership, score, (energy, assigned, mass) = saved
    chunks, mass = Chunks(call), mass[..., None]
    factor, inverse = _factor(assigned, mass), _inverse(energy)
    d_output, direct = cotangents.output.contiguous(), chunks.per_token()
    total = torch.empty((chunks.count, *energy.shape[1:]), dtype=chunks.dtype, device=energy.device)
    chunks.launch(scale_back_kernel, d_output, membership, factor, direct, total)
    d_moment = chunks.total(total) / (mass + MASS_EPS)
    d_mass = (d_moment * assigned / (mass + MASS_EPS)).sum(-1)
    d_membership = _project(chunks, d_moment) - direct + cotangents.membership - d_mass[:, None]
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
