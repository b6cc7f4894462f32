"""Causal TSSA by Triton: chunk sums, a scan over chunks, then every chunk by itself; twice.

Of the kernels of gradients each pair first sums over chunks, then uses the sums.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS
from rankwise.ops.triton_chunks import Chunks, aged, coming, memberships, places, power, running, scores_back


@triton.jit
@no_type_check
def energy_at(x, base, age, real, rate, c, h, H, K, BK: tl.constexpr, DECAYED: tl.constexpr):
    """c_t: the running energy of every token of a chunk."""
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
    """a_t and n_t + eps of every token of a chunk."""
    k = tl.arange(0, BK)
    before = tl.load(base + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
    mass = tl.load(base_mass + c * H + h)
    if DECAYED:
        before = before * power(rate, age, x)[:, None]
        mass = mass * power(rate, age, x)
        gap = age[:, None] - age[None, :]
        below = (gap >= 0) & (tl.arange(0, x.shape[0])[:, None] >= tl.arange(0, x.shape[0])[None, :])
        weight = power(rate, tl.maximum(gap, 0.0), x) * pi[None, :]
        mass = mass + tl.sum(tl.where(below & real[None, :], weight, 0.0), 1)
    else:
        mass = mass + tl.cumsum(pi, 0)
    return before + running(pi[:, None] * x * x, age, real, rate, DECAYED), mass + eps


@triton.jit
@no_type_check
def score_kernel(
    w, mask, first, last, owner, decay, base, score, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """s_t = Σ_k w²/max(c_t, eps)."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, known, _ = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(score.dtype.element_ty)
    age, rate = aged(real, decay, h, DECAYED)
    energy = energy_at(x, base, age, real, rate, c, h, H, K, BK, DECAYED)
    tl.store(score + row, tl.sum(x * x / tl.where(energy < eps, eps, energy), 1), mask=inside)


@triton.jit
@no_type_check
def output_kernel(
    w, mask, first, last, owner, decay, membership, base, base_mass, out, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """out_t = -Π_t w_t n_t/(n_t + a_t)."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, known, there = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    age, rate = aged(real, decay, h, DECAYED)
    moment, mass = moment_at(x, pi, base, base_mass, age, real, rate, c, h, H, K, eps, BK, DECAYED)
    found = -pi[:, None] * x * (mass[:, None] / (mass[:, None] + moment))
    tl.store(out + cell, found.to(out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def output_back_kernel(
    w, mask, first, last, owner, decay, given, membership, base, base_mass, later, later_mass,
    total, total_mass, out, asked, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Gradients through the output: what a chunk asks of the sums before it, or (FINISH) those of w and Π."""
    c, h = tl.program_id(0), tl.program_id(1)
    inside, real, row, cell, known, there = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    g = tl.load(given + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    pi = tl.load(membership + row, mask=real, other=0.0)
    age, rate = aged(real, decay, h, DECAYED)
    moment, mass = moment_at(x, pi, base, base_mass, age, real, rate, c, h, H, K, eps, BK, DECAYED)
    inverse = 1.0 / (mass[:, None] + moment)
    q = mass[:, None] * inverse
    share = inverse * q * pi[:, None] * g * x
    less = tl.sum(share * (moment / mass[:, None]), 1)
    k = tl.arange(0, BK)
    if not FINISH:
        fade = tl.where(real, 1.0, 0.0).to(x.dtype)
        if DECAYED:
            fade = fade * power(rate, age, x)  # from a token to the sums before the chunk
        tl.store(total + (c * H + h) * K + k, tl.sum(fade[:, None] * share, 0), mask=k < K)
        tl.store(total_mass + c * H + h, -tl.sum(fade * less, 0))
    else:
        after = tl.load(later + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
        after_mass = tl.load(later_mass + c * H + h)
        lesser = -less
        if DECAYED:
            fade = power(rate, tl.max(age, 0) - age, x)
            after = after * fade[:, None]
            after_mass = after_mass * fade
            gap = age[None, :] - age[:, None]
            above = (gap >= 0) & (tl.arange(0, BT)[:, None] <= tl.arange(0, BT)[None, :])
            weight = tl.where(above & real[None, :], power(rate, tl.maximum(gap, 0.0), x), 0.0)
            after_mass = after_mass + tl.sum(weight * lesser[None, :], 1)
        else:
            after_mass = after_mass + tl.cumsum(lesser, 0, reverse=True)
        of_sum = after + coming(share, age, real, rate, DECAYED)
        through = tl.sum(of_sum * x * x - g * x * q, 1) + after_mass
        tl.store(asked + row, tl.where(real, through, 0.0), mask=inside)
        found = pi[:, None] * (2.0 * x * of_sum - g * q)
        tl.store(out + cell, tl.where(real[:, None], found, 0.0), mask=there)


@triton.jit
@no_type_check
def score_back_kernel(
    w, mask, first, last, owner, decay, slope, base, later, total, partial, out, eps,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """Gradients through the scores: what a chunk asks of the energies before it, or (FINISH) that of w."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, known, there = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(base.dtype.element_ty)
    ds = tl.load(slope + row, mask=real, other=0.0)[:, None]
    age, rate = aged(real, decay, h, DECAYED)
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
        after = tl.load(later + (c * H + h) * K + k, mask=k < K, other=0.0)[None, :]
        if DECAYED:
            after = after * power(rate, tl.max(age, 0) - age, x)[:, None]
        of_sum = after + coming(share, age, real, rate, DECAYED)
        before = tl.load(partial + cell, mask=known, other=0.0)
        found = before + 2.0 * x * (ds * inverse + of_sum)
        tl.store(out + cell, tl.where(known, found, 0.0).to(out.dtype.element_ty), mask=there)


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Output, memberships, scores and the last sums; memory O(B T H) beside w and the output."""
    chunks, start = Chunks(call), call.initial_sums()
    base, energy = _scan(chunks, None, start.energy)
    score = chunks.tokens()
    chunks.launch(score_kernel, base, score, ENERGY_EPS)
    if call.offset is not None:
        score += call.offset
    membership = memberships(score, call.temperature, call.mask, keep_scores)
    base, mass_base, assigned, mass = _assigned(chunks, membership, start)
    output = torch.empty_like(chunks.w)
    chunks.launch(output_kernel, membership, base, mass_base, output, MASS_EPS)
    return output, Saved(membership, score, Sums(energy, assigned, mass))


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Gradients of w, of the temperature, of the scores' offset and of the first sums."""
    membership, score, _ = saved
    given, given_membership, given_end = cotangents
    chunks, start = Chunks(call), call.initial_sums()
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
    slope, temperature = scores_back(asked + given_membership, membership, score, call.temperature)

    base, _ = _scan(chunks, None, start.energy)
    out = torch.empty_like(chunks.w)

    def through_score(later: Tensor, finish: bool) -> None:
        chunks.launch(score_back_kernel, slope, base, later, total, partial, out, ENERGY_EPS, FINISH=finish)

    through_score(total, False)
    later, energy = chunks.carry(total, age, given_end.energy, backward=True)
    through_score(later, True)
    return Gradients(out, temperature, slope, Sums(energy, assigned, mass[..., 0]))


def _scan(chunks: Chunks, weight: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor]:
    total, _ = chunks.sums(weight)
    return chunks.carry(total, chunks.ages(), start)


def _assigned(chunks: Chunks, membership: Tensor, start: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, total_mass = chunks.sums(membership)
    age = chunks.ages()
    base, end = chunks.carry(total, age, start.assigned)
    mass_base, mass = chunks.carry(total_mass[..., None], age, start.mass[..., None])
    return base, mass_base, end, mass[..., 0]
