"""The compiled loops of causal TSSA: one sweep for the scores, one for the output.

Arrays: w (M, H, K) with M the tokens of all sequences; bounds (N + 1,) where each sequence begins;
mask (M,) or empty; power (CHUNK + 2, H) from `arrays.powers`; rate (H,) λ in float64.
A task is one sequence and one block of heads. Sums run in chunks: total at the chunk's start times a
power of λ, plus what the chunk added.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled


@no_type_check
def _kept(x, decay, lost):
    """X λ, with what λ lost when it was rounded."""
    return x * decay + x * lost


kept = compiled(_kept, {"contract"})  # nothing reordered: x (decay + lost) would be x decay again


@compiled
@no_type_check
def score_row(row, base, local, decay, lost, p, tiny):
    """One token's Σ_k w²/max(c, eps), after adding it to the chunk's sums."""
    score = row.dtype.type(0)
    for k in range(len(row)):
        y = row[k] * row[k]
        added = kept(local[k], decay, lost) + y
        local[k] = added
        score += y / max(base[k] * p + added, tiny)
    return score


@compiled
@no_type_check
def output_row(row, out, base, local, decay, lost, p, pi, m):
    """One token's output, after adding it to the chunk's sums."""
    g = -pi * m
    for k in range(len(row)):
        added = kept(local[k], decay, lost) + pi * (row[k] * row[k])
        local[k] = added
        out[k] = g * row[k] / (m + (base[k] * p + added))


@compiled
@no_type_check
def fold(total, base, local, rate, age):
    """The sums behind a chunk become those before the next."""
    for h in range(len(total)):
        shrink = rate[h] ** age
        for k in range(total.shape[1]):
            total[h, k] = total[h, k] * shrink + local[h, k]
            base[h, k] = total[h, k]
            local[h, k] = 0


@compiled
@no_type_check
def score_sweep(w, bounds, mask, power, rate, start, eps, score, end, blocks, low, high):
    """c_t and s_t = Σ_k w_t²/max(c_t, eps); ``end`` gets the last c."""
    heads = w.shape[1]
    tiny = w.dtype.type(eps)
    for task in range(low, high):
        n, block = task // blocks, task % blocks
        first, last = block * heads // blocks, (block + 1) * heads // blocks
        base = start[n, first:last].copy()
        total, local, own = base.astype(np.float64), np.zeros_like(base), rate[first:last]
        for chunk in range(bounds[n], bounds[n + 1], CHUNK):
            age = 0
            for t in range(chunk, min(chunk + CHUNK, bounds[n + 1])):
                if mask.size > 0 and not mask[t]:
                    score[t, first:last] = 0
                    continue
                age += 1
                for h in range(first, last):
                    i = h - first
                    decay, lost, p = power[1, h], power[CHUNK + 1, h], power[age, h]
                    score[t, h] = score_row(w[t, h], base[i], local[i], decay, lost, p, tiny)
            fold(total, base, local, own, age)
        end[n, first:last] = base


@compiled
@no_type_check
def output_sweep(
    w, membership, bounds, mask, power, rate, start, start_mass, eps, out, end, end_mass, blocks, low, high
):
    """a_t, n_t and out_t = -Π_t w_t n_t/(n_t + a_t), n_t with eps; ``end`` gets the last sums."""
    heads = w.shape[1]
    real = w.dtype.type
    for task in range(low, high):
        n, block = task // blocks, task % blocks
        first, last = block * heads // blocks, (block + 1) * heads // blocks
        base = start[n, first:last].copy()
        total, local, own = base.astype(np.float64), np.zeros_like(base), rate[first:last]
        mass = start_mass[n].astype(np.float64)
        for chunk in range(bounds[n], bounds[n + 1], CHUNK):
            age = 0
            for t in range(chunk, min(chunk + CHUNK, bounds[n + 1])):
                if mask.size > 0 and not mask[t]:
                    out[t, first:last] = 0
                    continue
                age += 1
                for h in range(first, last):
                    i, pi = h - first, membership[t, h]
                    mass[h] = mass[h] * rate[h] + pi
                    m = real(mass[h] + eps)
                    decay, lost, p = power[1, h], power[CHUNK + 1, h], power[age, h]
                    output_row(w[t, h], out[t, h], base[i], local[i], decay, lost, p, pi, m)
            fold(total, base, local, own, age)
        end[n, first:last] = base
        for h in range(first, last):
            end_mass[n, h] = mass[h]
