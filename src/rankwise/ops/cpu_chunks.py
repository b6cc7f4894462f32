"""Chunks of a call, the unit of work on a CPU, and the compiled loops that both operations share.

Each sequence is cut into chunks of at most `CHUNK` tokens. A loop adds up each chunk, `ChunkedCall.carry`
adds up the chunks in float64, and the next loop visits each chunk with the sums at its start. So chunks can
be visited in any order and by any thread, and a sum over T tokens has the rounding error of 64 additions.

Arrays in loops: w (M, H, K), where M counts the tokens of all sequences; mask (M,) or empty; power
(CHUNK + 2, H) and rate (H,) of `ChunkedCall`; chunk i is the tokens first[i] ≤ t < last[i] of sequence[i].
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
"""Largest number of tokens per chunk; a chunk's sum has the dtype of the sums, sums of chunks are float64."""
NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.bool: np.bool_}


class Chunks(NamedTuple):
    """Tokens first ≤ t < last and sequence index of each of C chunks; no chunk spans two sequences."""

    first: np.ndarray
    last: np.ndarray
    sequence: np.ndarray


class ChunkedCall:
    """Arguments of a `tssa` call as numpy arrays, and the chunks of the call.

    Attributes:
        call: the call.
        dtype: dtype of the sums.
        w: w in the dtype of the sums, (M, H, K).
        temperature: temperatures, (H,); empty for uniform memberships.
        tokens: mask, (M,) or empty; λ^0 … λ^CHUNK per head in the dtype of the sums, and in a last row the
            part of λ that this dtype loses, (CHUNK + 2, H); λ in float64, (H,).
        chunks: the chunks.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.dtype = call, sum_dtype(call.w.dtype)
        # a copy: torch cannot free memory that numpy shares, and FSDP2 frees weights between passes
        temperature = None if call.temperature is None else call.temperature.clone()
        self.w, self.temperature = flat(call.w, self.dtype), flat(temperature, self.dtype, axes=1)
        rates = [1.0] * self.w.shape[1] if call.rate is None else call.rate.tolist()
        self.tokens = (flat(call.mask, torch.bool, axes=1), *_powers(tuple(rates), self.dtype))
        batch, tokens = call.w.shape[:2]
        ends = range(0, batch * tokens + 1, tokens) if call.bounds is None else call.bounds.tolist()
        self.chunks = _chunks(tuple(ends))
        self.threads = threads_for(self.w.size)

    def run(self, loop: Loop, *arrays: Any) -> None:
        """Run a loop over all chunks."""
        loop.run(arrays, len(self.chunks.first), self.threads)

    def empty_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Allocate a sum per chunk, (C, H, K), and a number per chunk and head in float64, (C, H, 1)."""
        count, shape = len(self.chunks.first), self.w.shape[1:]
        return np.empty((count, *shape), self.w.dtype), np.empty((count, shape[0], 1))

    def sums(self, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return Σ weight w² and Σ weight of each chunk; without weights, weight is 1."""
        squares, masses = self.empty_sums()
        weight = flat(None, self.dtype) if weight is None else weight
        self.run(add_chunks, self.w, weight, *self.tokens, *self.chunks[:2], squares, masses)
        return squares, masses

    def carry(
        self, added: np.ndarray, start: np.ndarray, backward: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums at the start of each chunk (at the end, if backward) and after each sequence.

        Sums at chunk starts overwrite ``added``, the sums over each chunk; ``start`` is (N, H, …), float64.
        """
        mask, _, rate = self.tokens
        end = start.copy()
        arrays = (added, start, mask, rate, *self.chunks, end, backward)
        carry_heads.run(arrays, added.shape[1], self.threads)
        return added, end

    def total(self, added: np.ndarray) -> np.ndarray:
        """Return the sum over the chunks of each sequence in the dtype of the sums, (N, H, …)."""
        start = np.zeros((self.call.sequences, *added.shape[1:]))
        return self.carry(added, start)[1].astype(self.w.dtype)

    @staticmethod
    def wide(sums: Sums) -> list[np.ndarray]:
        """Return energy and assigned, (N, H, K), and mass, (N, H, 1), in float64."""
        energy, assigned, mass = (array(part, torch.float64) for part in sums)
        return [energy, assigned, mass[..., None]]

    def narrow(self, energy: np.ndarray, assigned: np.ndarray, mass: np.ndarray) -> Sums:
        """Return sums per sequence as tensors in the dtype of the sums."""
        return Sums(*(tensor(part, self.dtype) for part in (energy, assigned, mass[..., 0])))

    def per_token(self, x: np.ndarray) -> Tensor:
        """Return an array of (M, H) as a tensor of (B, T, H)."""
        return torch.from_numpy(x.reshape(self.call.w.shape[:3]))

    def new(self) -> Tensor:
        """Allocate a tensor of w's shape by numpy, which requests large memory pages, unlike torch.

        The first write to 25 MB in small pages can take longer than all of TSSA.
        """
        return torch.from_numpy(np.empty(self.call.w.shape, self.w.dtype))


def array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return a tensor as a numpy array; copy only if the dtype changes or the memory is not contiguous."""
    return np.ascontiguousarray(as_dtype(x.detach(), dtype).numpy())


def flat(x: Tensor | None, dtype: torch.dtype, axes: int = 2) -> np.ndarray:
    """Return a tensor (B, T, …) as an array (M, …); return an empty array with `axes` axes for None."""
    if x is None:
        return np.zeros((0,) * axes, NUMPY[dtype])
    return array(x, dtype).reshape(-1, *x.shape[2:])


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a small array as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(x, NUMPY[dtype]))


@lru_cache(256)
def _powers(rates: tuple[float, ...], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the table of powers of λ with the parts lost in the dtype, and λ in float64."""
    rate = np.array(rates)
    lost = rate - rate.astype(NUMPY[dtype])
    return np.concatenate([rate ** np.arange(CHUNK + 1)[:, None], lost[None]]).astype(NUMPY[dtype]), rate


@lru_cache(256)
def _chunks(ends: tuple[int, ...]) -> Chunks:
    """Cut sequences with these boundaries into chunks."""
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
    """Return the factors by which the sums of a head decay: λ, the lost part of λ, and λ^age."""
    return power[1, h], power[CHUNK + 1, h], power[age, h]


@no_type_check
def _kept(x, factors):
    """Return x λ, with λ in two parts for accuracy."""
    return x * factors[0] + x * factors[1]


kept = inlined(_kept, {"contract"})  # reordering to x (λ + lost) would lose the second part


@inlined
@no_type_check
def tokens_between(mask, first, last):
    """Return the number of real tokens first ≤ t < last."""
    return mask[first:last].sum() if mask.size > 0 else last - first


@inlined
@no_type_check
def project_row(row, vector):
    """Return Σ_k vector_k w_k²."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        out += row[k] * row[k] * vector[k]
    return out


@inlined
@no_type_check
def add_row(row, weight, sums, factors):
    """Add weight · w² of one token to decaying sums."""
    for k in range(len(row)):
        sums[k] = kept(sums[k], factors) + weight * (row[k] * row[k])


@inlined
@no_type_check
def add_chunk(w, weight, mask, power, rate, first, last, sums, mass):
    """Set sums and mass to Σ weight w² and Σ weight of a chunk; without weights, weight is 1."""
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
    """Run `add_chunk` on chunks."""
    for i in range(low, high):
        add_chunk(w, weight, mask, power, rate, first[i], last[i], squares[i], masses[i])


@Loop
@no_type_check
def carry_heads(added, start, mask, rate, first, last, sequence, end, backward, low, high):
    """Replace the sums over each chunk by the running sums at its start, for the heads low ≤ h < high.

    Backward, chunks come in reverse order, and the sums at the end of a chunk are written.
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
    """Return e^x in float32 for x ≤ 0, to 2 ulp, and 0 below e^-87: 2^n e^r with |r| ≤ ln 2 / 2.

    A loop with `exp`, a library call, is not vectorized; a loop with this function can be.
    """
    real = np.float32
    n = np.floor(x * real(1.4426950408889634) + real(0.5))
    r = (x - n * real(0.693359375)) - n * real(-2.12194440054690583e-4)  # ln 2 in two parts, the first exact
    y = real(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2):
        y = y * r + real(factor)
    y = y * (r * r) + r + real(1)
    two_to_n = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return real(0) if x < real(-87) else y * two_to_n


exp32 = inlined(_exp32, {"contract"})  # reordering would add the two parts of ln 2


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
    """Write the memberships of tokens: softmax over heads of temperature · score; 0 at padding.

    Without a temperature, memberships are 1/H. ``out`` may be the same array as ``score``.
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
                if not out[t, h] <= top:  # `not <=` lets NaN become the maximum
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
    """Write the gradients of scores, temperature · Π (g - Σ_h Π g); add to the gradient of the temperature.

    g is the gradient of Π. Without a temperature both results are 0.
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
