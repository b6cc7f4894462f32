"""How the tokens are cut into chunks, the launch of kernels over them, and what the kernels share.

A program takes one chunk of BT tokens and one head; BK ≥ K channels lie in a row. Within a chunk, running
sums are cumulative sums, or products with the triangle of the powers of λ. The age of a token is the number
of real tokens of the chunk up to it: padding lets nothing decay. Memberships are plain torch.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.ops.arguments import Call, sum_dtype

LEAST = -2000.0
"""Of log2 λ: 2 to it is 0 in float64 too, but no tokens' worth of it is still 1, which of -∞ is NaN."""


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
        # after the diagonal, and of two tokens of one age only the real one counts itself
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


class Chunks:
    """One call's tokens, cut into chunks that never span two sequences.

    Attributes:
        first: first token of each chunk, (C,).
        last: token after its last, (C,).
        owner: its sequence, (C,).
        begin: first chunk of each sequence, and the number of chunks, (N + 1,).
        size: tokens of a chunk at most, BT; a power of 2, at least 16.
        channels: K rounded up to a power of 2, at least 16, BK.
    """

    def __init__(self, call: Call) -> None:
        w = call.w
        self.w, self.dtype = w.contiguous(), sum_dtype(w.dtype)
        self.heads, self.width = w.shape[2], w.shape[3]
        self.channels = max(16, 1 << (self.width - 1).bit_length())
        most = 64 if call.rate is None else 32  # a triangle of powers of λ costs BT² a chunk
        self.size = max(16, min(most, 4096 // self.channels))
        self.mask = None if call.mask is None else call.mask.contiguous()
        if call.bounds is not None:
            bounds = call.bounds
            counts = (bounds.diff() + self.size - 1) // self.size
            self.begin = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            self.count = int(self.begin[-1])  # must be read back; of rows of equal length it is known
        else:
            batch, tokens = w.shape[:2]
            each, rows = -(-tokens // self.size), torch.arange(batch + 1, device=w.device)
            bounds, self.begin, self.count = rows * tokens, rows * each, batch * each
        index = torch.arange(self.count, device=w.device)
        self.owner = torch.searchsorted(self.begin, index, right=True) - 1
        self.first = bounds[self.owner] + (index - self.begin[self.owner]) * self.size
        self.last = torch.minimum(self.first + self.size, bounds[self.owner + 1])
        self.rate = call.rate
        self.decay = torch.zeros(1, device=w.device, dtype=torch.float64)
        if call.rate is not None:
            rate = call.rate.to(w.device, torch.float64)
            self.decay = torch.log2(rate).clamp(min=LEAST).contiguous()

    def launch(self, kernel: Any, *arrays: Tensor | float, **switches: bool) -> None:
        """Run a kernel for every chunk and head.

        Args:
            kernel: compiled by Triton; its first arguments are those of every kernel here.
            arrays: its own.
            switches: its own constants.
        """
        masked = self.mask is not None
        kernel[(self.count, self.heads)](
            self.w,
            self.mask if masked else self.w,
            self.first,
            self.last,
            self.owner,
            self.decay,
            *arrays,
            H=self.heads,
            K=self.width,
            BT=self.size,
            BK=self.channels,
            MASKED=masked,
            DECAYED=self.rate is not None,
            **switches,
        )

    def sums(self, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """What every chunk adds to Σ weight w², (C, H, K), and to Σ weight, (C, H); no weight means 1."""
        total, mass = self.per_chunk()
        by = self.w if weight is None else weight.contiguous()
        self.launch(sums_kernel, by, total, mass, WEIGHTED=weight is not None)
        return total, mass

    def per_chunk(self) -> tuple[Tensor, Tensor]:
        """Room for sums by chunk, head and channel, and by chunk and head."""
        shape = (self.count, self.heads, self.width)
        sums = torch.empty(shape, dtype=self.dtype, device=self.w.device)
        return sums, torch.empty(shape[:2], dtype=self.dtype, device=self.w.device)

    def carry(
        self, sums: Tensor, ages: Tensor, start: Tensor, backward: bool = False
    ) -> tuple[Tensor, Tensor]:
        """From what each chunk adds to the sums at its start (its end, if backward) and after the last.

        Args:
            sums: what each chunk adds, (C, H, X).
            ages: tokens by which it decays what was before, (C,).
            start: sums to begin with, (N, H, X).
            backward: from the last chunk of a sequence to its first.

        Returns:
            (C, H, X) and (N, H, X).
        """
        at, end = torch.empty_like(sums), torch.empty_like(start, memory_format=torch.contiguous_format)
        width = sums.shape[2]
        block = max(16, 1 << (width - 1).bit_length())
        carry_kernel[(len(start), self.heads)](
            sums, ages, start.contiguous(), at, end, self.begin, self.decay,
            H=self.heads, X=width, BX=block, BACKWARD=backward, DECAYED=self.rate is not None,
        )  # fmt: skip
        return at, end

    def ages(self) -> Tensor:
        """Real tokens of every chunk, (C,)."""
        if self.mask is None:
            return self.last - self.first
        upto = torch.nn.functional.pad(self.mask.flatten().cumsum(0), (1, 0))
        return upto[self.last] - upto[self.first]

    def tokens(self) -> Tensor:
        """Room for a number by token and head, (B, T, H)."""
        return torch.empty(self.w.shape[:3], dtype=self.dtype, device=self.w.device)


def memberships(score: Tensor, temperature: Tensor | None, mask: Tensor | None, keep: bool) -> Tensor:
    """Softmax over heads of temperature · score, or 1/H without a temperature; 0 where masked."""
    if temperature is None:
        out = torch.full_like(score, 1 / score.shape[-1])
    else:
        out = score * temperature if keep else score.mul_(temperature)
        out.sub_(out.amax(-1, keepdim=True)).exp_()
        out.div_(out.sum(-1, keepdim=True))
    return out if mask is None else out.masked_fill_(~mask[..., None], 0.0)


def scores_back(
    given: Tensor, membership: Tensor, score: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the score and of the temperature from that of Π."""
    if temperature is None:
        return torch.zeros_like(score), score.new_zeros(score.shape[-1])
    logits = membership * (given - (membership * given).sum(-1, keepdim=True))
    return logits * temperature, (logits * score).sum((0, 1))
