"""Compiled loops over chunks of a sequence: what causal and bidirectional TSSA share on a CPU.

TSSA (token statistics self-attention) needs only sums over tokens: energy Σ w², assigned Σ Π w² and mass Σ Π,
where w are projections of tokens to heads, and memberships Π are weights of the heads at each token. Padding
is removed, and each sequence is cut into chunks of at most `CHUNK` tokens. One loop computes the sums over
each chunk, `ChunkedCall.carry` adds these sums in float64, and the next loop starts each chunk with the sums
before it. So threads can process chunks in any order, and a sum over T tokens has the rounding error of 64
additions.

Arrays in loops: w (M, H, K) for the M real tokens of all sequences, H heads and K channels; power
(CHUNK + 2, H) and rate (H,), which hold the decay λ (see `ChunkedCall`). Chunk i has the tokens
first[i] ≤ t < last[i] of sequence[i]. Each loop processes the chunks low ≤ i < high.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from hashlib import sha256
from math import exp
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, no_type_check

import llvmlite
import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from torch import Tensor

from rankwise.ops.arguments import Call, Sums, as_dtype, sum_dtype

CHUNK = 64
"""Largest number of tokens per chunk. Only sums of w² across chunks, not within a chunk, are float64."""
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
"""numpy dtype for each dtype of sums."""
ALLOWED = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math flags of numba: changes that the compiler may make to floating-point operations.

The compiler may reorder sums, fuse a product and a sum, multiply by 1/y, and drop the sign of 0. It may not
assume that NaN and infinity do not occur, because they must reach the output, nor approximate functions.
"""
TWO_THREADS_FROM = 1 << 19
"""Number of entries of the input w from which several threads are faster than one."""


class Loop:
    """Function with a loop over arrays, compiled for each combination of dtypes; runs without the GIL.

    The disk cache of numba keeps all signatures of a function in one index file. Two processes can overwrite
    this file such that it names the wrong machine code. So each signature is compiled as a separate function
    whose name contains a hash of signature, sources, versions and processor. Equal names then mean equal
    machine code.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of(self, *given: Any) -> Callable[..., Any]:
        """Return the function compiled for the dtypes of the arguments; compile it on the first call."""
        key = tuple(x.dtype for x in given if isinstance(x, np.ndarray))
        if key not in self._compiled:
            self._compiled[key] = _compile(self.function, tuple(map(numba.typeof, given)))
        return self._compiled[key]

    def run(self, given: tuple[Any, ...], tasks: int, threads: int) -> None:
        """Call the compiled function with ``(*given, low, high)`` for slices low ≤ i < high of all tasks.

        No two tasks write to the same entry of a result array. A thread that is done takes the next slice, so
        no thread waits for a slow thread. The calling thread works too, until no slice is left. Then it
        cancels the threads that have not begun.
        """
        run = self.of(*given, 0, tasks)  # compiled before the threads start, so that only one compiles
        if min(threads, tasks) <= 1:
            run(*given, 0, tasks)
            return
        size = -(-tasks // (4 * threads))
        todo = deque((low, min(low + size, tasks)) for low in range(0, tasks, size))

        def work() -> None:
            while True:
                try:
                    low, high = todo.popleft()
                except IndexError:  # no slice is left
                    return
                run(*given, low, high)

        helpers = [thread_pool(os.getpid(), threads - 1).submit(work) for _ in range(threads - 1)]
        try:
            work()
        finally:
            todo.clear()  # if Ctrl-C was pressed, the other threads find no slice and stop
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def inlined(function: FunctionType, allowed: set[str] = ALLOWED) -> Callable[..., Any]:
    """Return a function that numba inlines into loops, compiled with the fast-math flags ``allowed``."""
    return numba.njit(nogil=True, fastmath=allowed, error_model="numpy", forceinline=True)(function)


def threads_for(numbers: int) -> int:
    """Return 1 if the input has few entries, otherwise torch's number of threads, at most one per core."""
    return 1 if numbers < TWO_THREADS_FROM else min(torch.get_num_threads(), os.cpu_count() or 1)


@cache
def thread_pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return a thread pool, cached per process, because a forked process has none of the threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rankwise-tssa")


def _compile(function: FunctionType, signature: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function compiled for one signature, whose name has a hash of all inputs of the compiler."""
    named = FunctionType(function.__code__, function.__globals__, function.__name__)
    origin = _origin(Path(function.__code__.co_filename))
    digest = sha256(f"{signature} {origin}".encode()).hexdigest()[:16]
    named.__module__, named.__qualname__ = function.__module__, f"{function.__name__}_{digest}"
    return numba.njit(signature, nogil=True, cache=True, fastmath=ALLOWED, error_model="numpy")(named)


@cache
def _origin(file: Path) -> str:
    """Return a text that identifies sources, versions and processor, on which compiled loops depend."""
    files = {file, *Path(__file__).parent.glob("cpu_*.py")}
    sources = b"".join(path.read_bytes() for path in sorted(files))
    versions = f"{numba.__version__} {llvmlite.__version__}"
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"
    return f"{sha256(sources).hexdigest()} {versions} {processor}"


class Chunks(NamedTuple):
    """C chunks of tokens: chunk i contains the tokens first[i] ≤ t < last[i] of sequence sequence[i]."""

    first: np.ndarray
    last: np.ndarray
    sequence: np.ndarray


class ChunkedCall:
    """Arguments of a `tssa` call as numpy arrays without padding, and the chunks of the call.

    Attributes:
        call: checked arguments of `tssa`.
        dtype: dtype of the sums, float32 or float64.
        real: indices of the M real tokens in the list of all tokens; None if all tokens are real.
        w: projections of the real tokens, (M, H, K), in the dtype of the sums.
        temperature: temperatures, (H,).
        decay: two arrays: power and rate. rate is λ per head in float64. The rows of power, (CHUNK + 2, H),
            are λ^0 … λ^CHUNK and the rounding error of λ in dtype ``dtype``.
        chunks: tokens and sequence of each chunk.
        threads: number of threads that run a loop.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.dtype = call, sum_dtype(call.w.dtype)
        batch, tokens, heads, _ = call.w.shape
        self.real, lengths = None, (tokens,) * batch
        if call.mask is not None and not bool(call.mask.all()):
            mask = array(call.mask, torch.bool)
            self.real, lengths = np.flatnonzero(mask), tuple(mask.sum(1).tolist())
        self.w = self.flat(call.w)
        # A copy, because torch cannot free memory that numpy shares, and FSDP2 frees weights between passes.
        self.temperature = array(call.temperature.clone(), self.dtype)
        rates = [1.0] * heads if call.rate is None else call.rate.tolist()
        self.decay = _powers(tuple(rates), self.dtype)
        self.chunks = _chunks(lengths)
        self.threads = threads_for(self.w.size)

    def flat(self, x: Tensor | None) -> np.ndarray:
        """Return a tensor (B, T, …) as an array (M, …) of the real tokens; return an empty array for None."""
        if x is None:
            return np.zeros((0, 0), NUMPY[self.dtype])
        rows = array(x, self.dtype).reshape(-1, *x.shape[2:])
        return rows if self.real is None else rows[self.real]

    def padded(self, x: np.ndarray) -> Tensor:
        """Return an array (M, …) of the real tokens as a tensor (B, T, …) with zeros at padding."""
        batch, tokens = self.call.w.shape[:2]
        rows = x
        if self.real is not None:
            rows = np.zeros((batch * tokens, *x.shape[1:]), x.dtype)
            rows[self.real] = x
        return torch.from_numpy(rows.reshape(batch, tokens, *x.shape[1:]))

    def run(self, loop: Loop, *arrays: Any) -> None:
        """Run a compiled loop over all chunks; the loop writes results to some of the arrays."""
        loop.run(arrays, len(self.chunks.first), self.threads)

    def empty_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Return empty arrays for sums over C chunks: of weight · w², (C, H, K), and weight, (C, H, 1)."""
        count, shape = len(self.chunks.first), self.w.shape[1:]
        return np.empty((count, *shape), self.w.dtype), np.empty((count, shape[0], 1))

    def sums(self, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return sums of weight · w² and weight over each chunk; if ``weight`` is None, weights are 1."""
        squares, masses = self.empty_sums()
        weight = self.flat(None) if weight is None else weight
        self.run(add_chunks, self.w, weight, *self.decay, *self.chunks[:2], squares, masses)
        return squares, masses

    def carry(
        self, added: np.ndarray, start: np.ndarray, backward: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the running sums at the start of each chunk and at the end of each sequence.

        ``added`` contains the sums over each chunk and is overwritten; ``start`` contains the sums before
        each sequence, (B, H, …), float64. If ``backward``, sums (of gradients) run from the last token to the
        first: the results are then sums at the end of each chunk and at the start of each sequence.
        """
        end = start.copy()
        arrays = (added, start, self.decay[1], *self.chunks, end, backward)
        carry_heads.run(arrays, added.shape[1], self.threads)
        return added, end

    def total(self, added: np.ndarray) -> np.ndarray:
        """Return the sum of the sums of all chunks of each sequence, (B, H, …)."""
        start = np.zeros((len(self.call.w), *added.shape[1:]))
        return self.carry(added, start)[1].astype(self.w.dtype)

    @staticmethod
    def wide(sums: Sums) -> list[np.ndarray]:
        """Return energy and assigned, (B, H, K), and mass, (B, H, 1), of each sequence as float64 arrays."""
        energy, assigned, mass = (array(x, torch.float64) for x in sums)
        return [energy, assigned, mass[..., None]]

    def narrow(self, energy: np.ndarray, assigned: np.ndarray, mass: np.ndarray) -> Sums:
        """Return sums of sequences as tensors in the dtype of the sums; the inverse of `wide`."""
        return Sums(*(tensor(x, self.dtype) for x in (energy, assigned, mass[..., 0])))


def array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return a tensor as a numpy array; the data are copied only if dtype or memory layout change."""
    return np.ascontiguousarray(as_dtype(x.detach(), dtype).numpy())


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a numpy array as a torch tensor of a dtype; the data are copied only if the dtype changes."""
    return torch.from_numpy(np.ascontiguousarray(x, NUMPY[dtype]))


@lru_cache(256)
def _powers(rates: tuple[float, ...], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays power and rate of `ChunkedCall.decay`, for one decay λ per head."""
    rate = np.array(rates)
    lost = rate - rate.astype(NUMPY[dtype])
    return np.concatenate([rate ** np.arange(CHUNK + 1)[:, None], lost[None]]).astype(NUMPY[dtype]), rate


@lru_cache(256)
def _chunks(lengths: tuple[int, ...]) -> Chunks:
    """Return the chunks of sequences of the given lengths, stored one after the other."""
    tokens = np.array(lengths, np.int64)
    counts, ends = -(-tokens // CHUNK), tokens.cumsum()
    sequence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]
    first = (ends - tokens)[sequence] + CHUNK * within
    return Chunks(first, np.minimum(first + CHUNK, ends[sequence]), sequence)


# --- running sums -------------------------------------------------------------------------------------------


@inlined
@no_type_check
def factors(power, age, h):
    """Return three decay factors of head h: λ, the rounding error of λ, and λ^age."""
    return power[1, h], power[CHUNK + 1, h], power[age, h]


@no_type_check
def _kept(x, factors):
    """Return x λ, where λ is the sum of the rounded λ, factors[0], and the rounding error, factors[1]."""
    return x * factors[0] + x * factors[1]


kept = inlined(_kept, {"contract"})  # reordering to x (λ + error) would drop the rounding error


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
def add_chunk(w, weight, power, rate, first, last, sums, mass):
    """Write the decayed sums of weight · w² and of weight over a chunk. An empty `weight` means 1."""
    by = w.dtype.type(1)
    sums[:] = 0
    mass[:] = 0
    for t in range(first, last):
        for h in range(w.shape[1]):
            if weight.size > 0:
                by = weight[t, h]
            add_row(w[t, h], by, sums[h], factors(power, 0, h))
            mass[h, 0] = mass[h, 0] * rate[h] + by


@Loop
@no_type_check
def add_chunks(w, weight, power, rate, first, last, squares, masses, low, high):
    """Write the sum of weight · w² over each chunk to `squares`, and the sum of weight to `masses`."""
    for i in range(low, high):
        add_chunk(w, weight, power, rate, first[i], last[i], squares[i], masses[i])


@Loop
@no_type_check
def carry_heads(added, start, rate, first, last, sequence, end, backward, low, high):
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
        for h in range(low, high):
            decay = 1.0 if rate[h] == 1 else rate[h] ** (last[i] - first[i])
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
    r = (x - n * real(0.693359375)) - n * real(-2.12194440054690583e-4)  # n ln 2 in two parts, for precision
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
def softmax_rows(score, temperature, out, first, last):
    """Write the memberships of the tokens of a chunk to `out`: softmax over heads of temperature · score.

    `out` and `score` may be the same array.
    """
    heads = score.shape[1]
    for t in range(first, last):
        top = temperature[0] * score[t, 0]
        for h in range(heads):
            out[t, h] = temperature[h] * score[t, h]
            if not out[t, h] <= top:  # also true for NaN, so that NaN reaches the output
                top = out[t, h]
        for h in range(heads):
            out[t, h] -= top
    exponentials(out[first:last].reshape(-1))
    for t in range(first, last):
        total = score.dtype.type(0)
        for h in range(heads):
            total += out[t, h]
        scale = score.dtype.type(1) / total
        for h in range(heads):
            out[t, h] *= scale


@inlined
@no_type_check
def softmax_rows_back(membership, d_membership, score, temperature, d_score, d_temperature, first, last):
    """Write the gradients of scores to `d_score`; add the gradient of the temperature to `d_temperature`.

    The gradient of a score is temperature · Π (d_Π - Σ_h Π d_Π), where Π is the membership, d_Π the gradient
    of Π, and h a head.
    """
    heads = membership.shape[1]
    for t in range(first, last):
        mean = membership.dtype.type(0)
        for h in range(heads):
            mean += membership[t, h] * d_membership[t, h]
        for h in range(heads):
            d_logit = membership[t, h] * (d_membership[t, h] - mean)
            d_temperature[h] += d_logit * score[t, h]
            d_score[t, h] = d_logit * temperature[h]
