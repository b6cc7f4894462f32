"""The compiled loops that add up weighted squares, which may decay, and carry their sums through a sequence.

Arrays: w (M, H, K) with M the tokens of all sequences; mask (M,) or empty; power (CHUNK + 2, H) and rate (H,)
as in `flat_problem.FlatProblem.tokens`. Piece i is the tokens first[i] ≤ t < last[i] of sequence owner[i].
Sums run in chunks: a float64 total at the chunk's start times a power of λ, plus what the chunk added.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.token_statistics.cpu.compiled import CHUNK, Loop, inlined


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
def sums(w, weight, mask, power, rate, first, last, totals, masses, low, high):
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
def carry(total, start, mask, rate, first, last, owner, begin, end, backward):
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
