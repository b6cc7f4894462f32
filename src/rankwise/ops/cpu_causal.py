"""The compiled loops of causal TSSA, forward; arrays and pieces as in `sum_loops`."""

from typing import no_type_check

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums, as_dtype
from rankwise.ops.cpu_chunks import (
    FlatCall,
    add_rows,
    factors,
    flat,
    fold,
    kept,
    new,
    project_row,
    softmax_rows,
    softmax_rows_back,
    sum_squares,
    tensor,
    tokens_between,
)
from rankwise.ops.cpu_compile import CHUNK, Loop, inlined
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS


@inlined
@no_type_check
def score_row(row, base, local, factors, tiny):
    """One token's Σ_k w²/max(c, eps), after adding it to the chunk's sums."""
    score = row.dtype.type(0)
    for k in range(len(row)):
        square = row[k] * row[k]
        local[k] = kept(local[k], factors) + square
        c = base[k] * factors[2] + local[k]
        score += square / (tiny if c < tiny else c)
    return score


@inlined
@no_type_check
def output_row(row, base, local, factors, pi, n, out):
    """One token's output, after adding it to the chunk's sums."""
    for k in range(len(row)):
        local[k] = kept(local[k], factors) + pi * (row[k] * row[k])
        out[k] = -pi * n * row[k] / (base[k] * factors[2] + local[k] + n)


@Loop
@no_type_check
def assign(
    w, offset, temperature, mask, power, rate, first, last, begin, eps, score, membership, totals, masses,
    low, high,
):  # fmt: skip
    """Scores Σ_k w_t²/max(c_t, eps) + offset, and memberships, which may lie over scores.

    begin[i] is the c before piece i, totals[i] = Σ Π w² and masses[i] = Σ Π as they stand after it.
    """
    shape, heads, tiny = w.shape[1:], w.shape[1], w.dtype.type(eps)
    base, local, more = np.empty(shape, w.dtype), np.zeros(shape, w.dtype), np.zeros(shape, w.dtype)
    total = np.empty(shape)
    for i in range(low, high):
        total[:] = begin[i]
        totals[i] = 0
        masses[i] = 0
        for c in range(first[i], last[i], CHUNK):
            stop, age = min(c + CHUNK, last[i]), 0
            base[:] = total
            for t in range(c, stop):
                if mask.size > 0 and not mask[t]:
                    score[t] = 0
                    continue
                age += 1
                for h in range(heads):
                    found = score_row(w[t, h], base[h], local[h], factors(power, age, h), tiny)
                    score[t, h] = found + offset[t, h] if offset.size > 0 else found
            softmax_rows(score, temperature, mask, membership, c, stop)
            add_rows(w, membership, mask, power, rate, c, stop, more, masses[i])
            fold(total, local, rate, age)
            fold(totals[i], more, rate, age)


@Loop
@no_type_check
def outputs(w, membership, mask, power, rate, first, last, begin, begin_mass, eps, out, low, high):
    """out_t = -Π_t w_t n_t/(n_t + a_t); begin[i] is the a before piece i, begin_mass[i] the n."""
    real, heads = w.dtype.type, w.shape[1]
    base, local = np.empty(w.shape[1:], w.dtype), np.zeros(w.shape[1:], w.dtype)
    total, n = np.empty(w.shape[1:]), np.empty(heads)
    for i in range(low, high):
        total[:] = begin[i]
        n[:] = begin_mass[i, :, 0]
        for c in range(first[i], last[i], CHUNK):
            age = 0
            base[:] = total
            for t in range(c, min(c + CHUNK, last[i])):
                if mask.size > 0 and not mask[t]:
                    out[t] = 0
                    continue
                age += 1
                for h in range(heads):
                    pi, by = membership[t, h], factors(power, age, h)
                    n[h] = n[h] * rate[h] + pi
                    output_row(w[t, h], base[h], local[h], by, pi, real(n[h] + eps), out[t, h])
            fold(total, local, rate, age)


@inlined
@no_type_check
def sums_row(row, weight, base, local, factors, out):
    """Add one token's weight · w² to a chunk's sums and note them."""
    for k in range(len(row)):
        added = kept(local[k], factors) + weight * (row[k] * row[k])
        local[k] = added
        out[k] = base[k] * factors[2] + added


@inlined
@no_type_check
def share_row(row, given, to, share, pi, m):
    """What one token's output asks of Π and of n, and, in the place of a, of a."""
    zero, one = row.dtype.type(0), row.dtype.type(1)
    direct, mass = zero, zero
    each = one / m
    for k in range(len(row)):
        a = share[k]
        r = one / (m + a)
        q = m * r
        x = given[k] * row[k]
        asked = r * q * pi * x
        share[k] = asked
        direct += x * q
        mass += asked * (a * each)
        to[k] = -pi * given[k] * q
    return direct, mass


@inlined
@no_type_check
def through_row(row, to, share, later, local, factors, pi):
    """One token's gradient through a, which it and all later ones read; gives that of Π."""
    two = row.dtype.type(2)
    through = row.dtype.type(0)
    for k in range(len(row)):
        g = later[k] * factors[2] + local[k] + share[k]
        through += g * (row[k] * row[k])
        to[k] += two * pi * row[k] * g
        local[k] = kept(local[k] + share[k], factors)
    return through


@Loop
@no_type_check
def output_sweep_back(
    w, given, membership, mask, power, rate, at, to, low, high, begin, begin_mass, eps, out, asked,
    before, before_mass, first, last,
):  # fmt: skip
    """Gradients of w and of Π through the output; before[i] gets what piece i asks of the sums before it."""
    shape, heads, real = w.shape[1:], w.shape[1], w.dtype.type
    share, fewer = np.empty((CHUNK, *shape), w.dtype), np.empty((CHUNK, heads), w.dtype)
    running, local, later = np.zeros(shape, w.dtype), np.zeros(shape, w.dtype), np.zeros(shape, w.dtype)
    total, n, more = np.zeros(shape), np.zeros(heads), np.zeros(heads)
    for i in range(first, last):
        later[:] = 0
        total[:] = 0
        more[:] = 0
        for c in range(high[i] - 1, low[i] - 1, -1):
            running[:] = 0
            n[:] = begin_mass[c, :, 0]
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    out[t] = 0
                    asked[t] = 0
                    continue
                age += 1
                for h in range(heads):
                    pi, by = membership[t, h], factors(power, age, h)
                    n[h] = n[h] * rate[h] + pi
                    own = share[t - at[c], h]
                    sums_row(w[t, h], pi, begin[c, h], running[h], by, own)
                    direct, less = share_row(w[t, h], given[t, h], out[t, h], own, pi, real(n[h] + eps))
                    asked[t, h] = -direct
                    fewer[t - at[c], h] = less
            age = 0
            for t in range(to[c] - 1, at[c] - 1, -1):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    pi, by = membership[t, h], factors(power, age, h)
                    own = share[t - at[c], h]
                    through = through_row(w[t, h], out[t, h], own, later[h], local[h], by, pi)
                    more[h] = more[h] - fewer[t - at[c], h]
                    asked[t, h] += through + real(more[h])
                    more[h] = more[h] * rate[h]
                age += 1
            fold(total, local, rate, age)
            later[:] = total
        before[i] = total
        before_mass[i, :, 0] = more


@inlined
@no_type_check
def score_share_row(row, base, local, factors, asked, tiny, sums):
    """Adds what one token asks of the c before the chunk, through s = Σ w²/max(c, eps)."""
    one = row.dtype.type(1)
    for k in range(len(row)):
        y = row[k] * row[k]
        added = kept(local[k], factors) + y
        local[k] = added
        c = base[k] * factors[2] + added
        r = one / max(c, tiny)
        sums[k] -= asked * y * r * r * factors[2] if c >= tiny else row.dtype.type(0)


@Loop
@no_type_check
def slopes(
    w, membership, score, temperature, given, mask, power, rate, at, to, low, high, begin, eps,
    until, until_mass, asked, slope, of_temperature, before, first, last,
):  # fmt: skip
    """Gradients of the scores and, by piece, of the temperature, from what is asked of Π.

    What is asked of Π after the piece is added first; before[i] gets what its scores ask of the c before it.
    """
    heads, real, tiny = w.shape[1], w.dtype.type, w.dtype.type(eps)
    running, local = np.zeros(w.shape[1:], w.dtype), np.zeros(w.shape[1:], w.dtype)
    fade = np.empty(heads, w.dtype)
    for i in range(first, last):
        of_temperature[i] = 0
        before[i] = 0
        count, passed = tokens_between(mask, at[low[i]], to[high[i] - 1]), 0
        for c in range(low[i], high[i]):
            own, age = tokens_between(mask, at[c], to[c]), 0
            for h in range(heads):
                fade[h] = rate[h] ** (count - passed - own)
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    more = project_row(w[t, h], until[i, h]) + real(until_mass[i, h, 0])
                    asked[t, h] += given[t, h] + fade[h] * power[own - age, h] * more
            softmax_rows_back(membership, asked, score, temperature, slope, of_temperature[i], at[c], to[c])
            running[:] = 0
            local[:] = 0
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    by = factors(power, age, h)
                    score_share_row(w[t, h], begin[c, h], running[h], by, slope[t, h], tiny, local[h])
            for h in range(heads):
                before[i, h] += rate[h] ** passed * local[h]
            passed += own


@inlined
@no_type_check
def score_row_back(row, to, sums, later, local, factors, asked, tiny, behind, pi):
    """One token's share through its score, and through its Π w² as far as that is asked after the piece."""
    zero, one, two = row.dtype.type(0), row.dtype.type(1), row.dtype.type(2)
    for k in range(len(row)):
        c = sums[k]
        r = one / max(c, tiny)
        share = -asked * (row[k] * row[k] * r) * r if c >= tiny else zero
        through = asked * r + (later[k] * factors[2] + local[k] + share)
        to[k] += two * row[k] * (through + pi * behind[k])
        local[k] = kept(local[k] + share, factors)


@Loop
@no_type_check
def score_sweep_back(
    w, slope, membership, mask, power, rate, at, to, low, high, begin, eps, until, until_assigned, out,
    first, last,
):  # fmt: skip
    """Adds the gradient of w through scores, and through what is asked of c and Π w² after the piece."""
    shape, heads, tiny, one = w.shape[1:], w.shape[1], w.dtype.type(eps), w.dtype.type(1)
    running, local, later = np.zeros(shape, w.dtype), np.zeros(shape, w.dtype), np.zeros(shape, w.dtype)
    behind, sums, total = np.zeros(shape, w.dtype), np.empty((CHUNK, *shape), w.dtype), np.zeros(shape)
    for i in range(first, last):
        later[:] = until[i]
        total[:] = until[i]
        passed = 0
        for c in range(high[i] - 1, low[i] - 1, -1):
            running[:] = 0
            for h in range(heads):
                behind[h] = until_assigned[i, h] * w.dtype.type(rate[h] ** passed)
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    own, by = sums[t - at[c], h], factors(power, age, h)
                    sums_row(w[t, h], one, begin[c, h], running[h], by, own)
            age = 0
            for t in range(to[c] - 1, at[c] - 1, -1):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    own, by = sums[t - at[c], h], factors(power, age, h)
                    pi, asked, through = membership[t, h] * by[2], slope[t, h], behind[h]
                    score_row_back(w[t, h], out[t, h], own, later[h], local[h], by, asked, tiny, through, pi)
                age += 1
            fold(total, local, rate, age)
            later[:] = total
            passed += age


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Output, memberships, scores and the last sums; beside them, two sums for every piece.

    Half-precision w and the output of it are there in float32 as well, and w out of order in order.
    """
    work, shape = FlatCall(call), call.w.shape
    x, dtype, start = work.x, work.dtype, work.sums(call.initial_sums())
    score, membership = work.memberships(keep_scores)
    totals, masses = work.room()
    output, where = new(shape, dtype), (*work.tokens, *work.runs[:2])

    work.run(sum_squares, x, flat(None, dtype), *where, totals, masses)
    begin, energy = work.carry(totals, start[0])
    read = (x, flat(call.offset, dtype), work.temperature, *where, begin, ENERGY_EPS)
    work.run(assign, *read, score, membership, totals, masses)
    begin, assigned = work.carry(totals, start[1])
    begin_mass, mass = work.carry(masses, start[2])
    read = (x, membership, *where, begin, begin_mass, MASS_EPS)
    work.run(outputs, *read, flat(output, dtype))

    pi, scores = (torch.from_numpy(part.reshape(shape[:3])) for part in (membership, score))
    end = Sums(*(tensor(part, dtype) for part in (energy, assigned, mass[..., 0])))
    return as_dtype(output, call.w.dtype), Saved(pi, scores, end)


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Gradients of w, of the temperature, of the scores' offset and of the first sums.

    Memory beside the gradients: O(B T H), and two sums at the start of every chunk, 1/32 of w.
    """
    membership, score, _ = saved
    given, given_membership, given_end = cotangents
    work = FlatCall(call)
    x, dtype, start = work.x, work.dtype, work.sums(call.initial_sums())
    go, pi, dpi, scores = (flat(part, dtype) for part in (given, membership, given_membership, score))
    last, (chunks, low, high) = work.sums(given_end), work.chunks()
    where = (*work.tokens, *chunks[:2], low, high)

    def before_chunks(weight: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        totals, masses = work.room(len(chunks.first), x.dtype)
        read = (x, weight, *work.tokens, *chunks[:2])
        work.run(sum_squares, *read, totals, masses, tasks=len(chunks.first))
        return work.carry(totals, start, runs=chunks)[0], masses

    out, asked, (before, before_mass) = (
        new(call.w.shape, dtype),
        np.empty_like(pi),
        work.room(None, x.dtype),
    )
    assigned, masses = before_chunks(pi, start[1])
    known = (assigned, work.carry(masses, start[2], runs=chunks)[0], MASS_EPS)
    found = (flat(out, dtype), asked, before, before_mass)
    work.run(output_sweep_back, x, go, pi, *where, *known, *found)
    until, first_assigned = work.carry(before, last[1], backward=True)
    until_mass, first_mass = work.carry(before_mass, last[2], backward=True)

    energy, _ = before_chunks(flat(None, dtype), start[0])
    slope, of_temperature = np.empty_like(asked), np.empty((len(low), pi.shape[1]))
    before, _ = work.room()
    read = (x, pi, scores, work.temperature, dpi, *where, energy, ENERGY_EPS, until, until_mass)
    work.run(slopes, *read, asked, slope, of_temperature, before)
    ask, first_energy = work.carry(before, last[0], backward=True)
    energies = (energy, ENERGY_EPS, ask, until)
    work.run(score_sweep_back, x, slope, pi, *where, *energies, flat(out, dtype))
    sums = Sums(*(tensor(part, dtype) for part in (first_energy, first_assigned, first_mass[..., 0])))
    tau = tensor(of_temperature.sum(0), dtype)
    return Gradients(as_dtype(out, call.w.dtype), tau, torch.from_numpy(slope).view(score.shape), sums)
