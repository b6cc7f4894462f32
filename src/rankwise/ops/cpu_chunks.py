"""The compiled loops that add up weighted squares, which may decay, and carry their sums through a sequence.

Arrays: w (M, H, K) with M the tokens of all sequences; mask (M,) or empty; power (CHUNK + 2, H) and rate (H,)
as in `flat_problem.FlatCall.tokens`. Piece i is the tokens first[i] ≤ t < last[i] of sequence owner[i].
Sums run in chunks: a float64 total at the chunk's start times a power of λ, plus what the chunk added.
"""

from functools import lru_cache
from itertools import pairwise
from math import exp
from typing import Any, NamedTuple, no_type_check

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.arguments import Call, Sums, as_dtype, sum_dtype
from rankwise.ops.cpu_compile import CHUNK, Loop, inlined, run_tasks, threads_for


@inlined
@no_type_check
def factors(power, age, h):
    """What sums of a head shrink by: λ, what it lost when rounded, and λ^age."""
    return power[1, h], power[CHUNK + 1, h], power[age, h]


@no_type_check
def _kept(x, factors):
    """X λ."""
    return x * factors[0] + x * factors[1]


kept = inlined(_kept, {"contract"})  # nothing reordered: x (λ + lost) would be x λ again


@inlined
@no_type_check
def add_row(row, weight, sums, factors):
    """Add one token's weight · w² to sums that decay."""
    for k in range(len(row)):
        sums[k] = kept(sums[k], factors) + weight * (row[k] * row[k])


@inlined
@no_type_check
def add_rows(w, weight, mask, power, rate, at, to, sums, mass):
    """The same for the tokens at ≤ t < to, and Σ weight; no weights are 1. Gives how many are real."""
    age, by = 0, w.dtype.type(1)
    for t in range(at, to):
        if mask.size > 0 and not mask[t]:
            continue
        age += 1
        for h in range(w.shape[1]):
            if weight.size > 0:
                by = weight[t, h]
            add_row(w[t, h], by, sums[h], factors(power, 0, h))
            mass[h, 0] = mass[h, 0] * rate[h] + by
    return age


@inlined
@no_type_check
def tokens_between(mask, at, to):
    """How many of the tokens at ≤ t < to are real."""
    return mask[at:to].sum() if mask.size > 0 else to - at


@inlined
@no_type_check
def project_row(row, vector):
    """Σ_k vector_k w_k²."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        out += row[k] * row[k] * vector[k]
    return out


@inlined
@no_type_check
def fold(total, local, rate, age):
    """What a chunk of ``age`` tokens added goes into the totals, and is zero again."""
    for h in range(len(total)):
        shrink = rate[h] ** age
        for k in range(total.shape[1]):
            total[h, k] = total[h, k] * shrink + local[h, k]
            local[h, k] = 0


@Loop
@no_type_check
def sum_squares(w, weight, mask, power, rate, first, last, totals, masses, low, high):
    """totals[i] = Σ weight w² and masses[i] = Σ weight of the pieces low ≤ i < high, after their last."""
    local = np.zeros(w.shape[1:], w.dtype)
    for i in range(low, high):
        totals[i] = 0
        masses[i] = 0
        for c in range(first[i], last[i], CHUNK):
            age = add_rows(w, weight, mask, power, rate, c, min(c + CHUNK, last[i]), local, masses[i])
            fold(totals[i], local, rate, age)


@Loop
@no_type_check
def carry_sums(total, start, mask, rate, first, last, owner, begin, end, backward):
    """The sums before every piece, from those before its sequence and what pieces add; and the last.

    Backward, the pieces come in reverse order, and "before" is after. ``begin`` may be ``total``.
    """
    sums = np.zeros(total.shape[1:])
    count = len(total)
    for j in range(count):
        i = count - 1 - j if backward else j
        ahead = i - 1 if backward else i + 1
        behind = i + 1 if backward else i - 1
        if j == 0 or owner[i] != owner[behind]:
            sums[:] = start[owner[i]]
        age = tokens_between(mask, first[i], last[i])
        for h in range(len(sums)):
            shrink = rate[h] ** age
            for k in range(sums.shape[1]):
                old = sums[h, k]
                sums[h, k] = old * shrink + total[i, h, k]
                begin[i, h, k] = old
        if j == count - 1 or owner[i] != owner[ahead]:
            end[owner[i]] = sums


@no_type_check
def _exp32(x):
    """e^x in float32 for x ≤ 0 to 2 ulp, 0 below e^-87: 2^n e^r with |r| ≤ ln 2 / 2.

    Unlike `exp`, a call, it leaves a loop that can be vectorised.
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


exp32 = inlined(_exp32, {"contract"})  # nothing reordered: the two parts would be one again


@inlined
@no_type_check
def exponentials(row):
    """e^x of every number of a row, none above 0, in place."""
    if row.itemsize == 4:
        for i in range(len(row)):
            row[i] = exp32(row[i])
    else:
        for i in range(len(row)):
            row[i] = exp(row[i])


@inlined
@no_type_check
def softmax_rows(score, temperature, mask, out, low, high):
    """Π[t,·] = softmax over heads of temperature · score, 1/H without a temperature; zero where masked.

    ``out`` may be ``score``.
    """
    heads = score.shape[1]
    zero, one = score.dtype.type(0), score.dtype.type(1)
    if temperature.size == 0:
        out[low:high] = one / heads
    else:
        for t in range(low, high):
            top = temperature[0] * score[t, 0]
            for h in range(heads):
                out[t, h] = temperature[h] * score[t, h]
                if not out[t, h] <= top:
                    top = out[t, h]
            for h in range(heads):
                out[t, h] -= top
        exponentials(out[low:high].reshape(-1))
        for t in range(low, high):
            total = zero
            for h in range(heads):
                total += out[t, h]
            each = one / total
            for h in range(heads):
                out[t, h] *= each
    if mask.size > 0:
        for t in range(low, high):
            if not mask[t]:
                out[t] = zero


@inlined
@no_type_check
def softmax_rows_back(membership, given, score, temperature, out, of_temperature, low, high):
    """Gradient of the scores from that of Π: temperature · Π (g - Σ_h Π g); adds up that of the temperature.

    Without a temperature Π is no function of them: zeros.
    """
    heads = membership.shape[1]
    for t in range(low, high):
        if temperature.size == 0:
            out[t] = 0
            continue
        mean = membership.dtype.type(0)
        for h in range(heads):
            mean += membership[t, h] * given[t, h]
        for h in range(heads):
            slope = membership[t, h] * (given[t, h] - mean)
            of_temperature[h] += slope * score[t, h]
            out[t, h] = slope * temperature[h]


NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.bool: np.bool_}
PIECE = 256
"""Tokens of a piece at least: below that, handing out work costs more than doing it."""


def array(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """The numbers of a tensor, without a copy where the dtype is right and the memory in order."""
    return np.ascontiguousarray(as_dtype(x.detach(), dtype).numpy())


def flat(x: Tensor | None, dtype: torch.dtype, axes: int = 2) -> np.ndarray:
    """(B, T, …) as (M, …), M the tokens of all rows; None as an empty array of so many axes."""
    if x is None:
        return np.zeros((0,) * axes, NUMPY[dtype])
    return array(x, dtype).reshape(-1, *x.shape[2:])


def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor not yet written, in memory from numpy: it asks the system for large pages, torch does not.

    The first touch of 25 MB in small pages can take longer than all of TSSA on them.
    """
    return torch.from_numpy(np.empty(shape, NUMPY[dtype]))


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A small array as a tensor of that dtype."""
    return torch.from_numpy(np.ascontiguousarray(x, NUMPY[dtype]))


class Pieces(NamedTuple):
    """Runs of tokens first ≤ t < last, and their sequences; each (P,)."""

    first: np.ndarray
    last: np.ndarray
    owner: np.ndarray


class FlatCall:
    """Arrays, pieces and number of threads of a call.

    Attributes:
        dtype: of the sums.
        x: w in that dtype, (M, H, K).
        temperature: (H,), or (0,) for uniform memberships.
        tokens: the mask, (M,) or (0,); λ^0 … λ^CHUNK of every head in the dtype of the sums, and what λ lost
            when it was rounded, as that would add up in 64 products, (CHUNK + 2, H); λ in float64, (H,).
        runs: the pieces.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.dtype = call, sum_dtype(call.w.dtype)
        # a copy: torch does not free memory that an array shares, as FSDP2 must with weights between passes
        weights = None if call.temperature is None else call.temperature.clone()
        self.x, self.temperature = flat(call.w, self.dtype), flat(weights, self.dtype, axes=1)
        rate = np.ones(self.x.shape[1]) if call.rate is None else array(call.rate, torch.float64)
        self.tokens = (flat(call.mask, torch.bool, axes=1), _powers(rate, self.dtype), rate)
        self.workers = threads_for(self.x.size)
        self.runs = _pieces(call, self.workers)

    def room(self, pieces: int | None = None, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
        """Room for what pieces add up: (P, H, K), and one number a head in float64, (P, H, 1)."""
        count = len(self.runs.first) if pieces is None else pieces
        return np.empty((count, *self.x.shape[1:]), dtype), np.empty((count, self.x.shape[1], 1))

    def memberships(self, keep: bool) -> tuple[np.ndarray, np.ndarray]:
        """Room for scores and for memberships: the same where scores are not to be kept."""
        membership = np.empty(self.x.shape[:2], self.x.dtype)
        return np.empty_like(membership) if keep else membership, membership

    def run(self, loop: Loop, *given: Any, tasks: int | None = None) -> None:
        """Run a loop over all pieces, or as many tasks."""
        run_tasks(loop, given, len(self.runs.first) if tasks is None else tasks, self.workers)

    @staticmethod
    def sums(sums: Sums) -> list[np.ndarray]:
        """Sums of every sequence in float64: (N, H, K) twice and (N, H, 1)."""
        energy, assigned, mass = (array(part, torch.float64) for part in sums)
        return [energy, assigned, mass[..., None]]

    def carry(
        self, total: np.ndarray, start: np.ndarray, backward: bool = False, runs: Pieces | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sums before every piece and after every sequence; backward: the other way round.

        Of what each piece adds, (P, H, …), to sums where the way begins, (N, H, …).
        """
        mask, _, rate = self.tokens
        begin, end = np.empty_like(total), start.copy()
        carry_sums(total, start, mask, rate, *(runs or self.runs), begin, end, backward)
        return begin, end

    def chunks(self) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Chunks, as smaller pieces; first chunk and last chunk (not included) of every piece."""
        runs, piece = self.runs, np.arange(len(self.runs.first))
        cut = _runs((*runs.first.tolist(), len(self.x)), CHUNK)
        low, high = (np.searchsorted(cut.owner, piece, side) for side in ("left", "right"))
        return cut._replace(owner=runs.owner[cut.owner]), low, high


def _powers(own: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    table = own ** np.arange(CHUNK + 1)[:, None]
    lost = own - own.astype(NUMPY[dtype])
    return np.concatenate([table, lost[None]]).astype(NUMPY[dtype])


def _pieces(call: Call, workers: int) -> Pieces:
    """As many as keep all threads busy to the end."""
    batch, tokens = call.w.shape[:2]
    size = max(PIECE, -(-batch * tokens // (16 * workers))) if workers > 1 else batch * tokens
    bounds = range(0, batch * tokens + 1, tokens) if call.bounds is None else call.bounds.tolist()
    return _runs(tuple(bounds), size)


@lru_cache(256)
def _runs(ends: tuple[int, ...], size: int) -> Pieces:
    runs = [
        (low, min(low + size, stop), n)
        for n, (start, stop) in enumerate(pairwise(ends))
        for low in range(start, stop, size)
    ]
    return Pieces(*np.array(runs, np.int64).reshape(-1, 3).T.copy())
