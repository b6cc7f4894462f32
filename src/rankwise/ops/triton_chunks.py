"""Chunks of a sequence, the launch of kernels over chunks, and functions that all Triton kernels share.

TSSA (token statistics self-attention) needs only sums over tokens: energy Σ w², assigned Σ Π w² and mass Σ Π,
where w are projections of tokens to heads, and memberships Π are weights of the heads at each token. A
program (one run of a kernel) processes one chunk of at most BT tokens and one head, with BK ≥ K channels.
Sums decay by λ per real token; `rate` is log2 λ. The age of a token is the number of real tokens in its chunk
up to this token. Without decay, running sums are cumulative sums; with decay (DECAYED) they are products with
`triangle`. Memberships are computed in plain torch.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, sum_dtype

MIN_LOG2_RATE = -2000.0
"""Lower bound of log2 λ, which replaces −∞ if λ = 0: at age 0, 0 · −∞ is NaN, and 2^−2000 rounds to 0."""


@triton.jit
@no_type_check
def indices(mask, first, last, H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr):
    """Return boolean masks and array offsets of one chunk and head, as six tensors.

    - inside (BT,): True for tokens of the chunk, which may have fewer than BT.
    - real (BT,): True for real tokens of the chunk, that is without padding.
    - row (BT,), cell (BT, BK): offsets of tokens in arrays (M, H), and offsets of channels in (M, H, K).
    - read (BT, BK): True for channels k < K of real tokens, which kernels read.
    - written (BT, BK): True for channels k < K of all tokens of the chunk, which kernels write.
    """
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
def ages_of(real, decay, h):
    """Return the ages of the tokens of a chunk (see the module docstring), and log2 λ of the head."""
    return tl.cumsum(real.to(tl.float32), 0), tl.load(decay + h)


@triton.jit
@no_type_check
def power(rate, age, x):
    """Return the decay λ^age in the dtype of x, where ``rate`` is log2 λ."""
    return tl.exp2(rate * age.to(tl.float64)).to(x.dtype)


@triton.jit
@no_type_check
def triangle(x, age, real, rate, REVERSE: tl.constexpr):
    """Return the matrix of decays λ^|age_t - age_u| for real tokens u ≤ t (u ≥ t if REVERSE), otherwise 0."""
    t = tl.arange(0, x.shape[0])
    if REVERSE:
        gap = age[None, :] - age[:, None]
        order = t[:, None] <= t[None, :]
    else:
        gap = age[:, None] - age[None, :]
        order = t[:, None] >= t[None, :]  # ages do not suffice: padding has the age of the token before it
    weight = tl.where((gap >= 0) & order & real[None, :], power(rate, tl.maximum(gap, 0.0), x), 0.0)
    return weight.to(x.dtype)


@triton.jit
@no_type_check
def running(x, age, real, rate, DECAYED: tl.constexpr):
    """Return the running sum Σ_{u ≤ t} λ^(age_t - age_u) x_u at each token t of a chunk."""
    if DECAYED:
        finite = tl.abs(x) < float("inf")  # in the product, 0 · NaN would reach earlier tokens
        weight = triangle(x, age, real, rate, False)
        total = tl.dot(weight, tl.where(finite, x, 0.0), input_precision="ieee", out_dtype=x.dtype)
        return total + tl.cumsum(tl.where(finite, 0.0, x), 0)
    return tl.cumsum(x, 0)


@triton.jit
@no_type_check
def reverse_running(x, age, real, rate, DECAYED: tl.constexpr):
    """Return the sum from the last token back to t, Σ_{u ≥ t} λ^(age_u - age_t) x_u, at each token t."""
    if DECAYED:
        weight = triangle(x, age, real, rate, True)
        return tl.dot(weight, x, input_precision="ieee", out_dtype=x.dtype)
    return tl.cumsum(x, 0, reverse=True)


@triton.jit
@no_type_check
def sums_kernel(
    w, mask, first, last, row_of, decay, weight, total, mass,
    H, K, BT: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr, DECAYED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write the sums of weight · w² and of weight over a chunk, with decay up to the chunk's end."""
    c, h = tl.program_id(0), tl.program_id(1)
    _inside, real, row, cell, read, _ = indices(mask, first, last, H, K, BT, BK, MASKED)
    x = tl.load(w + cell, mask=read, other=0.0).to(total.dtype.element_ty)
    age, rate = ages_of(real, decay, h)
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
    sums, ages, start, before, end, chunks, decay,
    H, X, BX: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Write the running sums at the start of each chunk to `before`, and after each row to `end`.

    Each sum has X entries per head, and each row has `chunks` chunks. If BACKWARD, sums run from the last
    chunk to the first, and `before` contains the sums at the end of each chunk.
    """
    n, h = tl.program_id(0), tl.program_id(1)
    x = tl.arange(0, BX)
    total = tl.load(start + (n * H + h) * X + x, mask=x < X, other=0.0).to(tl.float64)
    for i in range(chunks):
        c = n * chunks + i
        if BACKWARD:
            c = (n + 1) * chunks - 1 - i
        here = (c * H + h) * X + x
        tl.store(before + here, total.to(before.dtype.element_ty), mask=x < X)
        total = total * tl.exp2(tl.load(decay + h) * tl.load(ages + c).to(tl.float64))
        total += tl.load(sums + here, mask=x < X, other=0.0).to(tl.float64)
    tl.store(end + (n * H + h) * X + x, total.to(end.dtype.element_ty), mask=x < X)


class Chunks:
    """The C chunks of the tokens of a `tssa` call; all tokens of a chunk belong to one row.

    Attributes:
        first: index of the first token of each chunk, (C,).
        last: index after the last token of each chunk, (C,).
        row: index of the row of each chunk, (C,).
        per_row: number of chunks of each row.
        size: BT, the largest number of tokens of a chunk; a power of 2, at least 16.
        channels: BK, the number of channels K rounded up to a power of 2, at least 16.
    """

    def __init__(self, call: Call) -> None:
        self.w, self.dtype = call.w.contiguous(), sum_dtype(call.w.dtype)
        batch, tokens, self.heads, self.width = call.w.shape
        device = call.w.device
        self.channels = max(16, 1 << (self.width - 1).bit_length())
        most = 64 if call.rate is None else 32  # with decay, a program also holds a size × size matrix
        self.size = max(16, min(most, 4096 // self.channels))
        self.per_row = -(-tokens // self.size)
        self.count = batch * self.per_row
        index = torch.arange(self.count, device=device)
        self.row = index // self.per_row
        self.first = self.row * tokens + index % self.per_row * self.size
        self.last = torch.minimum(self.first + self.size, (self.row + 1) * tokens)
        self.ages = self.last - self.first  # number of real tokens of each chunk
        self.mask = None if call.mask is None else call.mask.contiguous()
        if self.mask is not None:
            upto = torch.nn.functional.pad(self.mask.flatten().cumsum(0), (1, 0))
            self.ages = upto[self.last] - upto[self.first]
        self.rate = call.rate
        self.decay = torch.zeros(self.heads, device=device, dtype=torch.float64)
        if call.rate is not None:
            rate = call.rate.to(device, torch.float64)
            self.decay = torch.log2(rate).clamp(min=MIN_LOG2_RATE).contiguous()

    def launch(self, kernel: Any, *arrays: Tensor | float, **switches: bool) -> None:
        """Run a kernel for each chunk and head; ``arrays`` follow the arguments that all kernels share."""
        masked = self.mask is not None
        mask = self.mask if masked else self.w  # without a mask, the argument is unused but must be a tensor
        kernel[(self.count, self.heads)](
            self.w, mask, self.first, self.last, self.row, self.decay, *arrays,
            H=self.heads, K=self.width, BT=self.size, BK=self.channels, MASKED=masked,
            DECAYED=self.rate is not None, **switches,
        )  # fmt: skip

    def sums(self, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sums of weight · w² and weight over each chunk; if ``weight`` is None, weights are 1."""
        total = self.w.new_empty((self.count, self.heads, self.width), dtype=self.dtype)
        mass = total.new_empty((self.count, self.heads, 1))
        by = self.w if weight is None else weight.contiguous()
        self.launch(sums_kernel, by, total, mass, WEIGHTED=weight is not None)
        return total, mass

    def carry(self, sums: Tensor, start: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
        """Return the running sums at the start of each chunk and at the end of each row.

        ``sums`` are the sums over each chunk, (C, H, X); ``start`` the sums before each row, (B, H, X).
        If ``backward``, sums (of gradients) run from the last token to the first: the results are then sums
        at the end of each chunk and at the start of each row.
        """
        before, end = torch.empty_like(sums), torch.empty_like(start, memory_format=torch.contiguous_format)
        width = sums.shape[2]
        block = max(16, 1 << (width - 1).bit_length())
        carry_kernel[(len(start), self.heads)](
            sums, self.ages, start.contiguous(), before, end, self.per_row, self.decay,
            H=self.heads, X=width, BX=block, BACKWARD=backward,
        )  # fmt: skip
        return before, end

    def total(self, sums: Tensor) -> Tensor:
        """Return the sum over all chunks of each row, (B, H, X)."""
        return self.carry(sums, sums.new_zeros(len(self.w), *sums.shape[1:]))[1]

    def per_token(self) -> Tensor:
        """Return an uninitialized tensor for one number per token and head, (B, T, H)."""
        return self.w.new_empty(self.w.shape[:3], dtype=self.dtype)


def memberships(score: Tensor, temperature: Tensor, mask: Tensor | None, keep: bool) -> Tensor:
    """Return memberships: softmax over heads of temperature · score; 0 at padding.

    If ``keep`` is False, memberships overwrite the scores in memory.
    """
    out = score * temperature if keep else score.mul_(temperature)
    out.sub_(out.amax(-1, keepdim=True)).exp_()
    out.div_(out.sum(-1, keepdim=True))
    return out if mask is None else out.masked_fill_(~mask[..., None], 0.0)


def softmax_back(
    d_membership: Tensor, membership: Tensor, score: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of scores and temperature from the gradient of memberships."""
    d_logit = membership * (d_membership - (membership * d_membership).sum(-1, keepdim=True))
    return d_logit * temperature, (d_logit * score).sum((0, 1))
