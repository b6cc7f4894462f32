"""The compiled loops of causal TSSA: the sums of each piece, then scores and memberships, then the output.

Arrays: w (M, H, K) with M the tokens of all sequences; mask (M,) or empty; power (CHUNK + 2, H) from
`arrays.powers`; rate (H,) λ in float64. A task is a piece, the tokens first[i] ≤ t < last[i] of sequence
owner[i], which can begin at once where the sums before it are known. Sums run in chunks: total at the
chunk's start times a power of λ, plus what the chunk added.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows


@no_type_check
def _kept(x, decay, lost):
    """X λ, with what λ lost when it was rounded."""
    return x * decay + x * lost


kept = inlined(_kept, {"contract"})  # nothing reordered: x (decay + lost) would be x decay again


@inlined
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


@inlined
@no_type_check
def output_row(row, out, base, local, decay, lost, p, pi, m):
    """One token's output, after adding it to the chunk's sums."""
    g = -pi * m
    for k in range(len(row)):
        added = kept(local[k], decay, lost) + pi * (row[k] * row[k])
        local[k] = added
        out[k] = g * row[k] / (m + (base[k] * p + added))


@inlined
@no_type_check
def fold(total, base, local, rate, age):
    """The sums behind a chunk become those before the next."""
    for h in range(len(total)):
        shrink = rate[h] ** age
        for k in range(total.shape[1]):
            total[h, k] = total[h, k] * shrink + local[h, k]
            base[h, k] = total[h, k]
            local[h, k] = 0


@inlined
@no_type_check
def add_row(row, weight, sums, decay, lost):
    """Add one token's weight · w² to sums that decay."""
    for k in range(len(row)):
        sums[k] = kept(sums[k], decay, lost) + weight * (row[k] * row[k])


@compiled
@no_type_check
def totals(w, mask, power, rate, first, last, total, low, high):
    """total[i] = Σ_t w² of piece i, as it stands behind the piece."""
    heads, width = w.shape[1], w.shape[2]
    one = w.dtype.type(1)
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    for i in range(low, high):
        total[i] = 0
        for chunk in range(first[i], last[i], CHUNK):
            age = 0
            for t in range(chunk, min(chunk + CHUNK, last[i])):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    add_row(w[t, h], one, local[h], power[1, h], power[CHUNK + 1, h])
            fold(total[i], base, local, rate, age)


@compiled
@no_type_check
def begins(total, start, mask, rate, first, last, owner, begin, end, backward):
    """The sums before every piece, from those before its sequence and what pieces add; and the last.

    Backward, the pieces come in reverse order, and "before" is behind. ``begin`` may be ``total``.
    """
    carry = np.zeros(total.shape[1:])
    count = len(total)
    for j in range(count):
        i = count - 1 - j if backward else j
        ahead = i - 1 if backward else i + 1
        behind = i + 1 if backward else i - 1
        if j == 0 or owner[i] != owner[behind]:
            carry[:] = start[owner[i]]
        age = last[i] - first[i]
        if mask.size > 0:
            age = mask[first[i] : last[i]].sum()
        for h in range(len(carry)):
            shrink = rate[h] ** age
            for k in range(carry.shape[1]):
                old = carry[h, k]
                carry[h, k] = old * shrink + total[i, h, k]
                begin[i, h, k] = old
        if j == count - 1 or owner[i] != owner[ahead]:
            end[owner[i]] = carry


@compiled
@no_type_check
def score_sweep(
    w, offset, temperature, mask, power, rate, first, last, begin, eps,
    score, membership, after, assigned, mass, low, high,
):  # fmt: skip
    """c_t, s_t = Σ_k w_t²/max(c_t, eps) + offset and memberships; after[i] gets the c behind piece i.

    Where ``assigned`` has pieces, assigned[i] and mass[i] get Σ_t Π w² and Σ_t Π, while w is in the cache.
    ``membership`` may be ``score``.
    """
    heads, width = w.shape[1], w.shape[2]
    tiny = w.dtype.type(eps)
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    spare, total = np.zeros((heads, width), w.dtype), np.zeros((heads, width))
    for i in range(low, high):
        base[:] = begin[i]
        total[:] = begin[i]
        for chunk in range(first[i], last[i], CHUNK):
            stop = min(chunk + CHUNK, last[i])
            age = 0
            for t in range(chunk, stop):
                if mask.size > 0 and not mask[t]:
                    score[t] = 0
                    continue
                age += 1
                for h in range(heads):
                    decay, lost, p = power[1, h], power[CHUNK + 1, h], power[age, h]
                    score[t, h] = score_row(w[t, h], base[h], local[h], decay, lost, p, tiny)
                    if offset.size > 0:
                        score[t, h] += offset[t, h]
            fold(total, base, local, rate, age)
            softmax_rows(score, temperature, mask, membership, chunk, stop)
            if len(assigned) == 0:
                continue
            if chunk == first[i]:
                assigned[i] = 0
                mass[i] = 0
            for t in range(chunk, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    pi = membership[t, h]
                    mass[i, h] = mass[i, h] * rate[h] + pi
                    add_row(w[t, h], pi, local[h], power[1, h], power[CHUNK + 1, h])
            fold(assigned[i], spare, local, rate, age)
        after[i] = base


@compiled
@no_type_check
def output_sweep(
    w, membership, mask, power, rate, first, last, begin, begin_mass, eps, out, after, after_mass, low, high
):
    """a_t, n_t and out_t = -Π_t w_t n_t/(n_t + a_t), n_t with eps; ``after`` gets the sums behind a piece."""
    heads, width = w.shape[1], w.shape[2]
    real = w.dtype.type
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    total, mass = np.zeros((heads, width)), np.zeros(heads)
    for i in range(low, high):
        base[:] = begin[i]
        total[:] = begin[i]
        mass[:] = begin_mass[i]
        for chunk in range(first[i], last[i], CHUNK):
            age = 0
            for t in range(chunk, min(chunk + CHUNK, last[i])):
                if mask.size > 0 and not mask[t]:
                    out[t] = 0
                    continue
                age += 1
                for h in range(heads):
                    pi = membership[t, h]
                    mass[h] = mass[h] * rate[h] + pi
                    m = real(mass[h] + eps)
                    decay, lost, p = power[1, h], power[CHUNK + 1, h], power[age, h]
                    output_row(w[t, h], out[t, h], base[h], local[h], decay, lost, p, pi, m)
            fold(total, base, local, rate, age)
        after[i] = base
        after_mass[i] = mass
