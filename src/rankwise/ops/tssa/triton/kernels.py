"""The Triton kernels. A program takes one chunk of BT tokens and one head; BK ≥ K channels lie in a row.

Within a chunk, running sums are cumulative sums, or products with the triangle of the powers of λ. The age of
a token is the number of real tokens of the chunk up to it: padding lets nothing decay.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def places(mask, first, last, H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr):
    """Which tokens are there and real, offsets in (M, H) and (M, H, K), entries that are real and there."""
    c, h = tl.program_id(0), tl.program_id(1)
    t = tl.load(first + c) + tl.arange(0, BT)
    inside = t < tl.load(last + c)
    real = inside
    if MASKED:
        real = tl.load(mask + t, mask=inside, other=0) != 0
    row = t * H + h
    k = tl.arange(0, BK)
    cell = row[:, None] * K + k[None, :]
    return inside, real, row, cell, real[:, None] & (k < K)[None, :], inside[:, None] & (k < K)[None, :]


@triton.jit
@no_type_check
def aged(real, decay, h, DECAYED: tl.constexpr):
    """Ages, and log2 λ of the head."""
    age = tl.cumsum(real.to(tl.float32), 0)
    if DECAYED:  # noqa: SIM108 - Triton takes the branch while it compiles
        rate = tl.load(decay + h)
    else:
        rate = tl.load(decay)
    return age, rate


@triton.jit
@no_type_check
def power(rate, age, x):
    """λ^age in the dtype of x."""
    return tl.exp2(rate * age.to(tl.float64)).to(x.dtype)


@triton.jit
@no_type_check
def running(x, age, real, rate, DECAYED: tl.constexpr):
    """Σ_{u ≤ t} λ^(age_t - age_u) x_u."""
    if DECAYED:
        finite = tl.abs(x) < float("inf")  # 0 · NaN in the product would take it to the tokens before
        gap = age[:, None] - age[None, :]
        # behind the diagonal, and of two tokens of one age only the real one counts itself
        below = (gap >= 0) & (tl.arange(0, x.shape[0])[:, None] >= tl.arange(0, x.shape[0])[None, :])
        weight = tl.where(below & real[None, :], power(rate, tl.maximum(gap, 0.0), x), 0.0)
        total = tl.dot(
            weight.to(x.dtype), tl.where(finite, x, 0.0), input_precision="ieee", out_dtype=x.dtype
        )
        return total + tl.cumsum(tl.where(finite, 0.0, x), 0)
    return tl.cumsum(x, 0)


@triton.jit
@no_type_check
def coming(x, age, real, rate, DECAYED: tl.constexpr):
    """Σ_{u ≥ t} λ^(age_u - age_t) x_u."""
    if DECAYED:
        gap = age[None, :] - age[:, None]
        above = (gap >= 0) & (tl.arange(0, x.shape[0])[:, None] <= tl.arange(0, x.shape[0])[None, :])
        weight = tl.where(above & real[None, :], power(rate, tl.maximum(gap, 0.0), x), 0.0)
        return tl.dot(weight.to(x.dtype), x, input_precision="ieee", out_dtype=x.dtype)
    return tl.cumsum(x, 0, reverse=True)


@triton.jit
@no_type_check
def sums_kernel(
    w, mask, first, last, owner, decay, weight, total, mass,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to Σ weight w² and to Σ weight, at its end."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, known, _ = places(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=known, other=0.0).to(total.dtype.element_ty)
    age, rate = aged(real, decay, h, DECAYED)
    by = tl.where(real, 1.0, 0.0).to(x.dtype)
    if WEIGHTED:
        by = tl.load(weight + row, mask=real, other=0.0)
    if DECAYED:
        by = by * power(rate, tl.max(age, 0) - age, x)
    k = tl.arange(0, BK)
    tl.store(total + (c * H + h) * K + k, tl.sum(by[:, None] * x * x, 0), mask=k < K)
    tl.store(mass + c * H + h, tl.sum(by, 0))


@triton.jit
@no_type_check
def carry_kernel(
    sums, ages, start, at, end, begin, decay,
    H, X, BX: tl.constexpr, BACKWARD: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """Sums at each chunk of a sequence, in float64, from what the chunks add."""
    n, h = tl.program_id(0), tl.program_id(1)
    x = tl.arange(0, BX)
    low, high = tl.load(begin + n), tl.load(begin + n + 1)
    total = tl.load(start + (n * H + h) * X + x, mask=x < X, other=0.0).to(tl.float64)
    for i in range(low, high):
        c = i
        if BACKWARD:
            c = low + high - 1 - i
        here = (c * H + h) * X + x
        tl.store(at + here, total.to(at.dtype.element_ty), mask=x < X)
        if DECAYED:
            total = total * tl.exp2(tl.load(decay + h) * tl.load(ages + c).to(tl.float64))
        total += tl.load(sums + here, mask=x < X, other=0.0).to(tl.float64)
    tl.store(end + (n * H + h) * X + x, total.to(end.dtype.element_ty), mask=x < X)
