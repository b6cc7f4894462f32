"""Chunks of a sequence, and the compiled loops that causal and bidirectional TSSA share on a CPU.

TSSA (token statistics self-attention) needs only sums over tokens: energy Σ w², assigned Σ Π w² and mass Σ Π,
where w are projections of tokens to heads, and memberships Π are weights of the heads at each token. Each
sequence is cut into chunks of at most `CHUNK` tokens. One loop computes the sums over each chunk,
`ChunkedCall.carry` adds these sums in float64, and the next loop starts each chunk with the sums before it.
So threads can process chunks in any order, and a sum over T tokens has the rounding error of 64 additions.

Arrays in loops: w (M, H, K) for M tokens of all sequences, H heads and K channels; mask (M,), True for real
tokens, or empty; power (CHUNK + 2, H) and rate (H,), which hold the decay λ (see `ChunkedCall`). Chunk i has
the tokens first[i] ≤ t < last[i] of sequence[i]. Each loop processes the chunks low ≤ i < high.
"""

from functools import lru_cache
from math import exp
from typing import Any, NamedTuple, no_type_check

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.arguments import Call, Sums, as_dtype, sum_dtype
from rankwise.ops.cpu_compile import Loop, inlined, threads_for

CHUNK = 64
"""Largest number of tokens per chunk; sums of w² are float64 only across chunks."""
NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.bool: np.bool_}
"""numpy dtype for each torch dtype that the compiled loops accept."""


class Chunks(NamedTuple):
    """C chunks of tokens: chunk i contains the tokens first[i] ≤ t < last[i] of sequence sequence[i]."""

    first: np.ndarray
    last: np.ndarray
    sequence: np.ndarray


class ChunkedCall:
    """Arguments of a `tssa` call as numpy arrays, and the chunks of the call.

    Attributes:
        call: checked arguments of `tssa`.
        dtype: dtype of the sums, float32 or float64.
        w: projections of tokens, (M, H, K), in the dtype of the sums.
        temperature: temperatures, (H,); empty for uniform memberships.
        tokens: three arrays: mask, power, rate. mask is (M,) or empty; rate is λ per head in float64. The
            rows of power, (CHUNK + 2, H), are λ^0 … λ^CHUNK and the rounding error of λ in dtype ``dtype``.
        chunks: tokens and sequence of each chunk.
        threads: number of threads that run a loop.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.dtype = call, sum_dtype(call.w.dtype)
        # A copy, because torch cannot free memory that numpy shares, and FSDP2 frees weights between passes.
        temperature = None if call.temperature is None else call.temperature.clone()
        self.w, self.temperature = flat(call.w, self.dtype), flat(temperature, self.dtype, axes=1)
        rates = [1.0] * self.w.shape[1] if call.rate is None else call.rate.tolist()
        self.tokens = (flat(call.mask, torch.bool, axes=1), *_powers(tuple(rates), self.dtype))
        batch, tokens = call.w.shape[:2]
        ends = range(0, batch * tokens + 1, tokens) if call.bounds is None else call.bounds.tolist()
        self.chunks = _chunks(tuple(ends))
        self.threads = threads_for(self.w.size)

    def run(self, loop: Loop, *arrays: Any) -> None:
        """Run a compiled loop over all chunks; the loop writes its results to some of the given arrays."""
        loop.run(arrays, len(self.chunks.first), self.threads)

    def empty_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Allocate the sums of each chunk: of weight · w² (C, H, K), and of token weights (C, H, 1)."""
        count, shape = len(self.chunks.first), self.w.shape[1:]
        return np.empty((count, *shape), self.w.dtype), np.empty((count, shape[0], 1))

    def sums(self, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of weight · w² and of weight over each chunk; None means that all weights are 1."""
        squares, masses = self.empty_sums()
        weight = flat(None, self.dtype) if weight is None else weight
        self.run(add_chunks, self.w, weight, *self.tokens, *self.chunks[:2], squares, masses)
        return squares, masses

    def carry(
        self, added: np.ndarray, start: np.ndarray, backward: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the running sums at the start of each chunk and at the end of each sequence.

        ``added`` contains the sums over each chunk and is overwritten; ``start`` contains the sums before
        each sequence, (N, H, …), float64. If ``backward``, sums (of gradients) run from the last token to the
        first: the results are then sums at the end of each chunk and at the start of each sequence.
        """
        mask, _, rate = self.tokens
        end = start.copy()
        arrays = (added, start, mask, rate, *self.chunks, end, backward)
        carry_heads.run(arrays, added.shape[1], self.threads)
        return added, end

    def total(self, added: np.ndarray) -> np.ndarray:
        """Add up the sums of chunks; return one sum per sequence, (N, H, …)."""
        start = np.zeros((self.call.sequences, *added.shape[1:]))
        return self.carry(added, start)[1].astype(self.w.dtype)

    @staticmethod
    def wide(sums: Sums) -> list[np.ndarray]:
        """Return energy and assigned, (N, H, K), and mass, (N, H, 1), of each sequence as float64 arrays."""
        energy, assigned, mass = (array(part, torch.float64) for part in sums)
        return [energy, assigned, mass[..., None]]

    def narrow(self, energy: np.ndarray, assigned: np.ndarray, mass: np.ndarray) -> Sums:
        """Return sums of sequences as tensors in the dtype of the sums; the inverse of `wide`."""
        return Sums(*(tensor(part, self.dtype) for part in (energy, assigned, mass[..., 0])))

    def per_token(self, x: np.ndarray) -> Tensor:
        """Return an array (M, H) as a tensor (B, T, H)."""
        return torch.from_numpy(x.reshape(self.call.w.shape[:3]))

    def new(self) -> Tensor:
        """Allocate a tensor like w by numpy: its large memory pages make the first write to it fast."""
        return torch.from_numpy(np.empty(self.call.w.shape, self.w.dtype))


def array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return a tensor as a numpy array; the data are copied only if dtype or memory layout change."""
    return np.ascontiguousarray(as_dtype(x.detach(), dtype).numpy())


def flat(x: Tensor | None, dtype: torch.dtype, axes: int = 2) -> np.ndarray:
    """Return a tensor (B, T, …) as an array (B·T, …), or None as an empty array with ``axes`` axes."""
    if x is None:
        return np.zeros((0,) * axes, NUMPY[dtype])
    return array(x, dtype).reshape(-1, *x.shape[2:])


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a numpy array as a torch tensor of a dtype; the data are copied only if the dtype changes."""
    return torch.from_numpy(np.ascontiguousarray(x, NUMPY[dtype]))


@lru_cache(256)
def _powers(rates: tuple[float, ...], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays power and rate of `ChunkedCall.tokens`, for one decay λ per head."""
    rate = np.array(rates)
    lost = rate - rate.astype(NUMPY[dtype])
    return np.concatenate([rate ** np.arange(CHUNK + 1)[:, None], lost[None]]).astype(NUMPY[dtype]), rate


@lru_cache(256)
def _chunks(ends: tuple[int, ...]) -> Chunks:
    """Cut sequences into chunks; sequence n has the tokens ends[n] ≤ t < ends[n + 1]."""
    bounds = np.array(ends, np.int64)
    counts = -(-np.diff(bounds) // CHUNK)
    sequence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]
    first = bounds[sequence] + CHUNK * within
    return Chunks(first, np.minimum(first + CHUNK, bounds[sequence + 1]), sequence)


# --- running sums -------------------------------------------------------------------------------------------


@inlined
@no_type_check
def factors(power, age, h):
    """Return three decay factors of head h: λ, the rounding error of λ, and λ^age."""
    return power[1, h], power[CHUNK + 1, h], power[age, h]


@no_type_check
def _kept(x, factors):
    """Return x λ, where λ is the sum of a rounded value, factors[0], and its rounding error, factors[1]."""
    return x * factors[0] + x * factors[1]


kept = inlined(_kept, {"contract"})  # reordering to x (λ + error) would drop the rounding error


@inlined
@no_type_check
def tokens_between(mask, first, last):
    """Return the number of real tokens t with first ≤ t < last."""
    return mask[first:last].sum() if mask.size > 0 else last - first


@inlined
@no_type_check
def project_row(row, vector):
    """Return the weighted sum Σ_k vector_k w_k² over the channels k of one token and head."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        out += row[k] * row[k] * vector[k]
    return out


@inlined
@no_type_check
def add_row(row, weight, sums, factors):
    """Multiply the sums of one head by the decay of one token, then add weight · w² of the token."""
    for k in range(len(row)):
        sums[k] = kept(sums[k], factors) + weight * (row[k] * row[k])


@inlined
@no_type_check
def add_chunk(w, weight, mask, power, rate, first, last, sums, mass):
    """Write the sums of weight · w² and of weight over a chunk to `sums` and `mass`; no weight means 1."""
    by = w.dtype.type(1)
    sums[:] = 0
    mass[:] = 0
    for t in range(first, last):
        if mask.size > 0 and not mask[t]:
            continue
        for h in range(w.shape[1]):
            if weight.size > 0:
                by = weight[t, h]
            add_row(w[t, h], by, sums[h], factors(power, 0, h))
            mass[h, 0] = mass[h, 0] * rate[h] + by


@Loop
@no_type_check
def add_chunks(w, weight, mask, power, rate, first, last, squares, masses, low, high):
    """Write the sum of weight · w² over each chunk to `squares`, and the sum of weight to `masses`."""
    for i in range(low, high):
        add_chunk(w, weight, mask, power, rate, first[i], last[i], squares[i], masses[i])


@Loop
@no_type_check
def carry_heads(added, start, mask, rate, first, last, sequence, end, backward, low, high):
    """Replace the sums over each chunk, in `added`, by the running sums at the start of the chunk.

    The sums after each sequence are written to `end`. Heads low ≤ h < high are processed. If `backward`,
    chunks are processed in reverse order, and sums are replaced by the running sums at the end of the chunk.
    """
    sums = np.zeros((high - low, added.shape[2]))
    count = len(added)
    for j in range(count):
        i = count - 1 - j if backward else j
        previous, following = (i + 1, i - 1) if backward else (i - 1, i + 1)
        if j == 0 or sequence[i] != sequence[previous]:
            sums[:] = start[sequence[i], low:high]
        age = tokens_between(mask, first[i], last[i])
        for h in range(low, high):
            decay = 1.0 if rate[h] == 1 else rate[h] ** age
            for k in range(sums.shape[1]):
                old = sums[h - low, k]
                sums[h - low, k] = old * decay + added[i, h, k]
                added[i, h, k] = old
        if j == count - 1 or sequence[i] != sequence[following]:
            end[sequence[i], low:high] = sums


# --- memberships --------------------------------------------------------------------------------------------


@no_type_check
def _exp32(x):
    """Return e^x in float32 for x ≤ 0, with an error of at most 2 ulp; 0 for x < -87.

    e^x = 2^n e^r with |r| ≤ ln 2 / 2, where n times the first part of ln 2 is exact. The compiler can
    vectorize a loop that calls this function, which is not possible with the library function `exp`.
    """
    real = np.float32
    n = np.floor(x * real(1.4426950408889634) + real(0.5))
    r = (x - n * real(0.693359375)) - n * real(-2.12194440054690583e-4)  # subtracts n ln 2 in two parts
    y = real(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2):
        y = y * r + real(factor)
    y = y * (r * r) + r + real(1)
    two_to_n = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return real(0) if x < real(-87) else y * two_to_n


exp32 = inlined(_exp32, {"contract"})  # reordering would lose the low part of ln 2


@inlined
@no_type_check
def exponentials(row):
    """Replace each number x ≤ 0 of a row by e^x."""
    if row.itemsize == 4:
        for i in range(len(row)):
            row[i] = exp32(row[i])
    else:
        for i in range(len(row)):
            row[i] = exp(row[i])


@inlined
@no_type_check
def softmax_rows(score, temperature, mask, out, first, last):
    """Write the memberships of the tokens of a chunk to `out`: softmax over heads of temperature · score.

    Memberships are 1/H if `temperature` is empty, and 0 at padding. `out` and `score` may be the same array.
    """
    heads = score.shape[1]
    zero, one = score.dtype.type(0), score.dtype.type(1)
    if temperature.size == 0:
        out[first:last] = one / heads
    else:
        for t in range(first, last):
            top = temperature[0] * score[t, 0]
            for h in range(heads):
                out[t, h] = temperature[h] * score[t, h]
                if not out[t, h] <= top:  # true for NaN, which thus becomes the maximum
                    top = out[t, h]
            for h in range(heads):
                out[t, h] -= top
        exponentials(out[first:last].reshape(-1))
        for t in range(first, last):
            total = zero
            for h in range(heads):
                total += out[t, h]
            each = one / total
            for h in range(heads):
                out[t, h] *= each
    if mask.size > 0:
        for t in range(first, last):
            if not mask[t]:
                out[t] = zero


@inlined
@no_type_check
def softmax_rows_back(membership, d_membership, score, temperature, d_score, d_temperature, first, last):
    """Write the gradients of scores to `d_score`; add the gradient of the temperature to `d_temperature`.

    The gradient of a score is temperature · Π (d_Π - Σ_h Π d_Π), where Π is the membership and d_Π its
    gradient; it is 0 without a temperature.
    """
    heads = membership.shape[1]
    for t in range(first, last):
        if temperature.size == 0:
            d_score[t] = 0
            continue
        mean = membership.dtype.type(0)
        for h in range(heads):
            mean += membership[t, h] * d_membership[t, h]
        for h in range(heads):
            d_logit = membership[t, h] * (d_membership[t, h] - mean)
            d_temperature[h] += d_logit * score[t, h]
            d_score[t, h] = d_logit * temperature[h]
