"""The compiled loops of causal TSSA's gradients: sums, then output, memberships and scores, backward.

Arrays as in `causal_loops`. A chunk is the tokens at[c] ≤ t < to[c], and begin[c] the sums before it; a task
is a piece, the chunks low[i] ≤ c < high[i]. Within a chunk sums are made anew from first token to last, and
what later tokens ask of them is gathered from last to first: ``later`` is asked by those after the chunk,
``local`` by those in it. All that is asked is linear in what is asked after the piece (``until``), so pieces
run at once as if that were nothing, and their part of it is added when it is known.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.bidirectional_loops import project_row
from rankwise.ops.tssa.cpu.causal_loops import add_row, fold, kept
from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows_back


@compiled
@no_type_check
def chunk_totals(w, membership, mask, power, rate, at, to, energy, assigned, mass, first, last):
    """Σ w², Σ Π w² and Σ Π of every chunk, as they stand behind it."""
    heads, width = w.shape[1], w.shape[2]
    local, more = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    one = w.dtype.type(1)
    for c in range(first, last):
        local[:] = 0
        more[:] = 0
        mass[c] = 0
        for t in range(at[c], to[c]):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(heads):
                pi, decay, lost = membership[t, h], power[1, h], power[CHUNK + 1, h]
                add_row(w[t, h], one, local[h], decay, lost)
                add_row(w[t, h], pi, more[h], decay, lost)
                mass[c, h] = mass[c, h] * rate[h] + pi
        energy[c] = local
        assigned[c] = more


@inlined
@no_type_check
def sums_row(row, weight, base, p, local, decay, lost, out):
    """Add one token's weight · w² to a chunk's sums and note them."""
    for k in range(len(row)):
        added = kept(local[k], decay, lost) + weight * (row[k] * row[k])
        local[k] = added
        out[k] = base[k] * p + added


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
def through_row(row, to, share, later, p, local, decay, lost, pi):
    """One token's gradient through a, which it and all later ones read; gives that of Π."""
    two = row.dtype.type(2)
    through = row.dtype.type(0)
    for k in range(len(row)):
        g = later[k] * p + local[k] + share[k]
        through += g * (row[k] * row[k])
        to[k] += two * pi * row[k] * g
        local[k] = kept(local[k] + share[k], decay, lost)
    return through


@compiled
@no_type_check
def output_sweep_back(
    w, given, membership, mask, power, rate, at, to, low, high, begin, begin_mass, eps, until, until_mass,
    out, asked, before, before_mass, first, last,
):  # fmt: skip
    """Gradients of w and of Π through the output; before[i] gets what piece i asks of the sums before it."""
    heads, width = w.shape[1], w.shape[2]
    real = w.dtype.type
    share, fewer = np.empty((CHUNK, heads, width), w.dtype), np.empty((CHUNK, heads), w.dtype)
    running = np.zeros((heads, width), w.dtype)
    local = np.zeros((heads, width), w.dtype)
    later = np.zeros((heads, width), w.dtype)
    total, n, more = np.zeros((heads, width)), np.zeros(heads), np.zeros(heads)
    for i in range(first, last):
        later[:] = until[i]
        total[:] = until[i]
        more[:] = until_mass[i]
        for c in range(high[i] - 1, low[i] - 1, -1):
            running[:] = 0
            n[:] = begin_mass[c]
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    out[t] = 0
                    asked[t] = 0
                    continue
                age += 1
                for h in range(heads):
                    pi, decay, lost = membership[t, h], power[1, h], power[CHUNK + 1, h]
                    n[h] = n[h] * rate[h] + pi
                    own = share[t - at[c], h]
                    sums_row(w[t, h], pi, begin[c, h], power[age, h], running[h], decay, lost, own)
                    direct, less = share_row(w[t, h], given[t, h], out[t, h], own, pi, real(n[h] + eps))
                    asked[t, h] = -direct
                    fewer[t - at[c], h] = less
            age = 0
            for t in range(to[c] - 1, at[c] - 1, -1):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    pi, decay, lost = membership[t, h], power[1, h], power[CHUNK + 1, h]
                    through = through_row(
                        w[t, h], out[t, h], share[t - at[c], h], later[h], power[age, h], local[h], decay,
                        lost, pi,
                    )  # fmt: skip
                    more[h] = more[h] - fewer[t - at[c], h]
                    asked[t, h] += through + real(more[h])
                    more[h] = more[h] * rate[h]
                age += 1
            fold(total, later, local, rate, age)
        before[i] = total
        before_mass[i] = more


@inlined
@no_type_check
def score_share_row(row, base, p, local, decay, lost, asked, tiny, sums):
    """Adds what one token asks of the c before the chunk, through s = Σ w²/max(c, eps)."""
    one = row.dtype.type(1)
    for k in range(len(row)):
        y = row[k] * row[k]
        added = kept(local[k], decay, lost) + y
        local[k] = added
        c = base[k] * p + added
        r = one / max(c, tiny)
        sums[k] -= p * (asked * y * r * r) if c >= tiny else row.dtype.type(0)


@compiled
@no_type_check
def slopes(
    w, membership, score, temperature, given, mask, power, rate, at, to, low, high, begin, eps,
    until, until_mass, asked, slope, of_temperature, before, first, last,
):  # fmt: skip
    """Gradients of the scores and, by piece, of the temperature, from what is asked of Π.

    Where ``before`` has pieces they are not the only ones of their sequence: then what is asked after the
    piece is added first, and before[i] gets what the scores of piece i ask of the c before it.
    """
    heads, width = w.shape[1], w.shape[2]
    real = w.dtype.type
    tiny = real(eps)
    running = np.zeros((heads, width), w.dtype)
    local = np.zeros((heads, width), w.dtype)
    for i in range(first, last):
        of_temperature[i] = 0
        count = to[high[i] - 1] - at[low[i]]
        if mask.size > 0:
            count = mask[at[low[i]] : to[high[i] - 1]].sum()
        passed = 0
        for c in range(low[i], high[i]):
            own = to[c] - at[c]
            if mask.size > 0:
                own = mask[at[c] : to[c]].sum()
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    asked[t, h] += given[t, h]
                    if len(before) > 0:
                        weight = real(rate[h] ** (count - passed - own) * power[own - age, h])
                        more = project_row(w[t, h], until[i, h]) + real(until_mass[i, h])
                        asked[t, h] += weight * more
            softmax_rows_back(
                membership, asked, score, temperature, slope, of_temperature[i], at[c], to[c]
            )  # fmt: skip
            if len(before) == 0:
                continue
            if c == low[i]:
                before[i] = 0
            running[:] = 0
            local[:] = 0
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    decay, lost = power[1, h], power[CHUNK + 1, h]
                    score_share_row(
                        w[t, h], begin[c, h], power[age, h], running[h], decay, lost, slope[t, h], tiny,
                        local[h],
                    )  # fmt: skip
            for h in range(heads):
                before[i, h] += rate[h] ** passed * local[h]
            passed += own


@inlined
@no_type_check
def score_row_back(row, to, sums, later, p, local, decay, lost, asked, tiny):
    """One token's share through its score."""
    zero, one, two = row.dtype.type(0), row.dtype.type(1), row.dtype.type(2)
    for k in range(len(row)):
        c = sums[k]
        r = one / max(c, tiny)
        share = -asked * (row[k] * row[k] * r) * r if c >= tiny else zero
        to[k] += two * row[k] * (asked * r + (later[k] * p + local[k] + share))
        local[k] = kept(local[k] + share, decay, lost)


@inlined
@no_type_check
def add_assigned_row(row, to, assigned, weight):
    """One token's share through its Π w²."""
    for k in range(len(row)):
        to[k] += weight * (row[k] * assigned[k])


@compiled
@no_type_check
def score_sweep_back(
    w, slope, membership, mask, power, rate, at, to, low, high, begin, eps, until, until_assigned,
    out, before, first, last,
):  # fmt: skip
    """Adds the gradient of w through the scores; before[i] gets what piece i asks of the c before it.

    Where ``until_assigned`` has pieces, adds what is asked of their Π w² behind them, still missing.
    """
    heads, width = w.shape[1], w.shape[2]
    tiny, one, two = w.dtype.type(eps), w.dtype.type(1), w.dtype.type(2)
    sums = np.empty((CHUNK, heads, width), w.dtype)
    running = np.zeros((heads, width), w.dtype)
    local = np.zeros((heads, width), w.dtype)
    later = np.zeros((heads, width), w.dtype)
    assigned = np.zeros((heads, width), w.dtype)
    none = np.zeros((heads, width), w.dtype)
    total, total_assigned = np.zeros((heads, width)), np.zeros((heads, width))
    for i in range(first, last):
        later[:] = until[i]
        total[:] = until[i]
        if len(until_assigned) > 0:
            assigned[:] = until_assigned[i]
            total_assigned[:] = until_assigned[i]
        for c in range(high[i] - 1, low[i] - 1, -1):
            running[:] = 0
            age = 0
            for t in range(at[c], to[c]):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(heads):
                    decay, lost = power[1, h], power[CHUNK + 1, h]
                    own = sums[t - at[c], h]
                    sums_row(w[t, h], one, begin[c, h], power[age, h], running[h], decay, lost, own)
            age = 0
            for t in range(to[c] - 1, at[c] - 1, -1):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    score_row_back(
                        w[t, h], out[t, h], sums[t - at[c], h], later[h], power[age, h], local[h],
                        power[1, h], power[CHUNK + 1, h], slope[t, h], tiny,
                    )  # fmt: skip
                    if len(until_assigned) > 0:
                        weight = two * membership[t, h] * power[age, h]
                        add_assigned_row(w[t, h], out[t, h], assigned[h], weight)
                age += 1
            fold(total, later, local, rate, age)
            fold(total_assigned, assigned, none, rate, age)
        before[i] = total
