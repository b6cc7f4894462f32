"""The compiled loops of causal TSSA's gradients: sums, then output, memberships and scores, backward.

Arrays as in `sum_loops`. A chunk is the tokens at[c] ≤ t < to[c], and begin[c] the sums before it; a task
is a piece, the chunks low[i] ≤ c < high[i]. Within a chunk sums are made anew from first token to last, and
what later tokens ask of them is gathered from last to first: ``later`` is asked by those after the chunk,
``local`` by those in it. All that is asked is linear in what is asked after the piece (``until``), so pieces
run at once as if that were nothing, and their part of it is added when it is known.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.token_statistics.cpu.compiled import CHUNK, Loop, inlined
from rankwise.ops.token_statistics.cpu.head_loops import softmax_rows_back
from rankwise.ops.token_statistics.cpu.sum_loops import factors, fold, kept, project_row, tokens_between


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
