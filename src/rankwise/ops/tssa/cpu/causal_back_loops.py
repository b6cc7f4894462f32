"""The compiled loops of causal TSSA's gradients: sums, then output, memberships and scores, backward.

Arrays as in `causal_loops`. A chunk is the tokens at[c] ≤ t < to[c], and begin[c] the sums before it; a task
is a piece, the chunks low[i] ≤ c < high[i]. Within a chunk sums are made anew from first token to last, and
what later tokens ask of them is gathered from last to first: ``later`` is asked by those after the chunk,
``local`` by those in it. All that is asked is linear in what is asked after the piece (``until``), so pieces
run at once as if that were nothing, and their part of it is added when it is known.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.causal_loops import fold
from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows_back
from rankwise.ops.tssa.cpu.lanes import address
from rankwise.ops.tssa.cpu.rows import add_row, factors, kept, older, project_row


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
def chunk_totals(w, membership, mask, power, rate, decays, at, to, energy, assigned, mass, first, last):
    """Σ w², Σ Π w² and Σ Π of every chunk, as they stand behind it."""
    heads, width = w.shape[1], w.shape[2]
    local, more = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    tokens, energies, assigns = address(w), address(local), address(more)
    row = heads * width
    for c in range(first, last):
        local[:] = 0
        more[:] = 0
        mass[c] = 0
        for t in range(at[c], to[c]):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(heads):
                j, pi, by = h * width, membership[t, h], factors(power, decays, 0, h)
                add_row(tokens, t * row + j, width, None, energies, j, by)
                add_row(tokens, t * row + j, width, pi, assigns, j, by)
                mass[c, h] = mass[c, h] * rate[h] + pi
        energy[c] = local
        assigned[c] = more


@inlined
@no_type_check
def sums_row(row, weight, base, local, factors, out):
    """Add one token's weight · w² to a chunk's sums and note them."""
    for k in range(len(row)):
        added = kept(local[k], factors) + weight * (row[k] * row[k])
        local[k] = added
        out[k] = older(base[k], factors) + added


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
        g = older(later[k], factors) + local[k] + share[k]
        through += g * (row[k] * row[k])
        to[k] += two * pi * row[k] * g
        local[k] = kept(local[k] + share[k], factors)
    return through


@compiled
@no_type_check
def output_sweep_back(
    w, given, membership, mask, power, rate, decays, at, to, low, high, begin, begin_mass, eps, until,
    until_mass, out, asked, before, before_mass, first, last,
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
                    pi, by = membership[t, h], factors(power, decays, age, h)
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
                    pi, by = membership[t, h], factors(power, decays, age, h)
                    through = through_row(
                        w[t, h], out[t, h], share[t - at[c], h], later[h], local[h], by, pi
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
def score_share_row(row, base, local, factors, asked, tiny, sums):
    """Adds what one token asks of the c before the chunk, through s = Σ w²/max(c, eps)."""
    one = row.dtype.type(1)
    for k in range(len(row)):
        y = row[k] * row[k]
        added = kept(local[k], factors) + y
        local[k] = added
        c = older(base[k], factors) + added
        r = one / max(c, tiny)
        sums[k] -= older(asked * y * r * r, factors) if c >= tiny else row.dtype.type(0)


@compiled
@no_type_check
def slopes(
    w, membership, score, temperature, given, mask, power, rate, decays, at, to, low, high, begin, eps,
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
    tokens, asks = address(w), address(until)
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
                        at_w, at_until = (t * heads + h) * width, (i * heads + h) * width
                        more = project_row(tokens, at_w, width, asks, at_until) + real(until_mass[i, h])
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
                    by = factors(power, decays, age, h)
                    score_share_row(w[t, h], begin[c, h], running[h], by, slope[t, h], tiny, local[h])
            for h in range(heads):
                before[i, h] += rate[h] ** passed * local[h]
            passed += own


@inlined
@no_type_check
def score_row_back(row, to, sums, later, local, factors, asked, tiny):
    """One token's share through its score."""
    zero, one, two = row.dtype.type(0), row.dtype.type(1), row.dtype.type(2)
    for k in range(len(row)):
        c = sums[k]
        r = one / max(c, tiny)
        share = -asked * (row[k] * row[k] * r) * r if c >= tiny else zero
        to[k] += two * row[k] * (asked * r + (older(later[k], factors) + local[k] + share))
        local[k] = kept(local[k] + share, factors)


@inlined
@no_type_check
def add_assigned_row(row, to, assigned, weight):
    """One token's share through its Π w²."""
    for k in range(len(row)):
        to[k] += weight * (row[k] * assigned[k])


@compiled
@no_type_check
def score_sweep_back(
    w, slope, membership, mask, power, rate, decays, at, to, low, high, begin, eps, until, until_assigned,
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
                    own, by = sums[t - at[c], h], factors(power, decays, age, h)
                    sums_row(w[t, h], one, begin[c, h], running[h], by, own)
            age = 0
            for t in range(to[c] - 1, at[c] - 1, -1):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    by = factors(power, decays, age, h)
                    own = sums[t - at[c], h]
                    score_row_back(w[t, h], out[t, h], own, later[h], local[h], by, slope[t, h], tiny)
                    if len(until_assigned) > 0:
                        weight = two * membership[t, h] * power[age, h]
                        add_assigned_row(w[t, h], out[t, h], assigned[h], weight)
                age += 1
            fold(total, later, local, rate, age)
            fold(total_assigned, assigned, none, rate, age)
        before[i] = total
