"""The Triton kernels of causal TSSA's gradients: each pair first sums over chunks, then uses the sums."""

from typing import no_type_check

import triton
import triton.language as tl

from rankwise.ops.tssa.triton.causal_kernels import energy_at, moment_at
from rankwise.ops.tssa.triton.kernels import aged, coming, places, power


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
