"""The Triton kernels of bidirectional TSSA."""

from typing import no_type_check

import triton
import triton.language as tl

from rankwise.ops.tssa.triton.kernels import places


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
