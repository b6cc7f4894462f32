"""The compiled loops of causal TSSA, forward; arrays and pieces as in `sum_loops`."""

from typing import no_type_check

import numpy as np

from rankwise.ops.token_statistics.cpu.compiled import CHUNK, Loop, inlined
from rankwise.ops.token_statistics.cpu.head_loops import softmax_rows
from rankwise.ops.token_statistics.cpu.sum_loops import add_rows, factors, fold, kept


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
