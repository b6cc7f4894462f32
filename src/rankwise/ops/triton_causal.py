"""Causal token statistics self-attention (TSSA) by Triton kernels, for GPUs.

The docstring of `cpu_causal` contains the formulas. Kernels compute the sums over each chunk of tokens,
`Chunks.carry` adds them up, and the next kernel starts each chunk with the sums before it (`base`). d_x is
the gradient of the loss with respect to x. Kernels that compute gradients run twice: first they sum over each
chunk, then (FINISH) they add sums from later chunks (`d_after`). `triton_chunks` describes arguments that all
kernels share.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS
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
    """Return assigned energy Σ Π w² and mass Σ Π + eps up to each token of a chunk, with membership Π."""
    k = tl.arange(0, BK)
    before = tl.load(base + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
    mass = tl.load(base_mass + c * H + h)
    if DECAYED:
        before = before * power(rate, age, x)[:, None]
        mass = mass * power(rate, age, x)
        gap, t = age[:, None] - age[None, :], tl.arange(0, x.shape[0])
        below = (gap >= 0) & (t[:, None] >= t[None, :]) & real[None, :]
        weight = power(rate, tl.maximum(gap, 0.0), x) * pi[None, :]
        mass = mass + tl.sum(tl.where(below, weight, 0.0), 1)  # a product would give 0 · NaN = NaN
    else:
        mass = mass + tl.cumsum(pi, 0)
    return before + running(pi[:, None] * x * x, age, real, rate, DECAYED), mass + eps


@triton.jit
@no_type_check
def score_kernel(
    w, mask, first, last, sequence, decay, base, score, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the score Σ_k w²/max(energy, eps) of each token of a chunk, without the offset."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, known, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(score.dtype.element_ty)
    age, rate = ages_of(real, decay, h, DECAYED)
    energy = energy_at(x, base, age, real, rate, c, h, H, K, BK, DECAYED)
    tl.store(score + row, tl.sum(x * x / tl.where(energy < eps, eps, energy), 1), mask=inside)


@triton.jit
@no_type_check
def output_kernel(
    w, mask, first, last, sequence, decay, membership, base, base_mass, out, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Write the output -Π w mass/(mass + assigned energy) of each token of a chunk, with membership Π."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, known, there = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    age, rate = ages_of(real, decay, h, DECAYED)
    moment, mass = moment_at(x, pi, base, base_mass, age, real, rate, c, h, H, K, eps, BK, DECAYED)
    found = -pi[:, None] * x * (mass[:, None] / (mass[:, None] + moment))
    tl.store(out + cell, found.to(out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def output_back_kernel(
    w, mask, first, last, sequence, decay, d_output, membership, base, base_mass, d_after, d_after_mass,
    total, total_mass, out, d_membership, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Write gradients through outputs: of the sums at the chunk's start, or (FINISH) of w and memberships."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, known, there = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    g = tl.load(d_output + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    age, rate = ages_of(real, decay, h, DECAYED)
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
        found = pi[:, None] * (2.0 * x * of_sum - g * q)
        tl.store(out + cell, tl.where(real[:, None], found, 0.0), mask=there)


@triton.jit
@no_type_check
def score_back_kernel(
    w, mask, first, last, sequence, decay, d_score, base, d_after, total, partial, out, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Write gradients through scores: of the energy at the chunk's start, or (FINISH) of w."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, known, there = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    ds = tl.load(d_score + row, mask=real, other=0.0)[:, None]
    age, rate = ages_of(real, decay, h, DECAYED)
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
        before = tl.load(partial + cell, mask=known, other=0.0)
        found = before + 2.0 * x * (ds * inverse + of_sum)
        tl.store(out + cell, tl.where(known, found, 0.0).to(out.dtype.element_ty), mask=there)


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and memberships, scores and final sums for the backward pass."""
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


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
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
