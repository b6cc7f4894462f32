"""The Triton kernels of causal TSSA, forward; `kernels` has what they share."""

from typing import no_type_check

import triton
import triton.language as tl

from rankwise.ops.tssa.triton.kernels import aged, places, power, running


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
