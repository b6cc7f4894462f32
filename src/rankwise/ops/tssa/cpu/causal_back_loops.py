"""The compiled loops of causal TSSA's gradients: two sweeps from the last token to the first.

Arrays as in `causal_loops`. Both sweeps go forward once to note the sums at the chunks' starts, then from the
last chunk to the first: sums are made anew within a chunk, and gradients of the sums are gathered backward.
``later`` is what the tokens after the chunk ask of a sum, ``local`` what those after a token in the chunk do.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.causal_loops import fold, kept
from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled


@compiled
@no_type_check
def add_row(row, weight, sums, decay, lost):
    """Add one token's weight · w² to sums that decay."""
    for k in range(len(row)):
        sums[k] = kept(sums[k], decay, lost) + weight * (row[k] * row[k])


@compiled
@no_type_check
def marks(w, weight, bounds, mask, rate, power, start, n, first, last):
    """Sums of weight · w² at the start of every chunk of a sequence."""
    chunks = (bounds[n + 1] - bounds[n] + CHUNK - 1) // CHUNK
    out = np.empty((chunks, last - first, w.shape[2]), w.dtype)
    base = start[n, first:last].copy()
    total, local = base.astype(np.float64), np.zeros_like(base)
    for c in range(chunks):
        out[c] = base
        age = 0
        low = bounds[n] + c * CHUNK
        for t in range(low, min(low + CHUNK, bounds[n + 1])):
            if mask.size > 0 and not mask[t]:
                continue
            age += 1
            for h in range(first, last):
                one = weight[t, h] if weight.size > 0 else w.dtype.type(1)
                add_row(w[t, h], one, local[h - first], power[1, h], power[CHUNK + 1, h])
        fold(total, base, local, rate[first:last], age)
    return out


@compiled
@no_type_check
def sums_row(row, weight, base, p, local, decay, lost, out):
    """Add one token to a chunk's sums and note them."""
    for k in range(len(row)):
        added = kept(local[k], decay, lost) + weight * (row[k] * row[k])
        local[k] = added
        out[k] = base[k] * p + added


@compiled
@no_type_check
def output_row_back(row, given, to, sums, later, p, local, decay, lost, pi, m):
    """One token's share through out = -Π w n/(n + a); gives the gradients of Π and -n."""
    zero, one, two = row.dtype.type(0), row.dtype.type(1), row.dtype.type(2)
    direct, through, mass = zero, zero, zero
    each = one / m
    for k in range(len(row)):
        r = one / (m + sums[k])
        q = m * r
        x = given[k] * row[k]
        y = row[k] * row[k]
        share = r * q * pi * x
        g = later[k] * p + local[k] + share
        direct += x * q
        through += g * y
        mass += share * (sums[k] * each)
        to[k] = pi * (two * row[k] * g - given[k] * q)
        local[k] = kept(local[k] + share, decay, lost)
    return through - direct, mass


@compiled
@no_type_check
def score_row_back(row, to, sums, later, p, local, decay, lost, asked, tiny):
    """One token's share through s = Σ w²/max(c, eps), added to its gradient."""
    zero, one, two = row.dtype.type(0), row.dtype.type(1), row.dtype.type(2)
    for k in range(len(row)):
        c = sums[k]
        r = one / max(c, tiny)
        share = -asked * (row[k] * row[k] * r) * r if c >= tiny else zero
        to[k] += two * row[k] * (asked * r + (later[k] * p + local[k] + share))
        local[k] = kept(local[k] + share, decay, lost)


@compiled
@no_type_check
def output_sweep_back(
    w, given, membership, bounds, mask, power, rate, start, start_mass, eps, end, end_mass,
    out, asked, out_start, out_mass, blocks, low, high,
):  # fmt: skip
    """Gradients of w (its part through the output) and of Π, of the first assigned sums and masses."""
    heads, width = w.shape[1], w.shape[2]
    real = w.dtype.type
    for task in range(low, high):
        n, block = task // blocks, task % blocks
        first, last = block * heads // blocks, (block + 1) * heads // blocks
        begin, stop = bounds[n], bounds[n + 1]
        mark = marks(w, membership, bounds, mask, rate, power, start, n, first, last)
        sums = np.empty((CHUNK, last - first, width), w.dtype)
        later = end[n, first:last].copy()
        total, local = later.astype(np.float64), np.zeros_like(later)
        running = np.zeros_like(later)
        mass = np.empty((stop - begin, last - first), w.dtype)
        for h in range(first, last):
            n_t = np.float64(start_mass[n, h])
            for t in range(begin, stop):
                if mask.size == 0 or mask[t]:
                    n_t = n_t * rate[h] + membership[t, h]
                mass[t - begin, h - first] = n_t + eps
        more = end_mass[n].astype(np.float64)
        for c in range(len(mark) - 1, -1, -1):
            at = begin + c * CHUNK
            upto = min(at + CHUNK, stop)
            running[:] = 0
            age = 0
            for t in range(at, upto):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(first, last):
                    i = h - first
                    pi, p = membership[t, h], power[age, h]
                    decay, lost = power[1, h], power[CHUNK + 1, h]
                    sums_row(w[t, h], pi, mark[c, i], p, running[i], decay, lost, sums[t - at, i])
            age = 0
            for t in range(upto - 1, at - 1, -1):
                if mask.size > 0 and not mask[t]:
                    out[t, first:last] = 0
                    asked[t, first:last] = 0
                    continue
                for h in range(first, last):
                    i = h - first
                    m = mass[t - begin, i]
                    through, less = output_row_back(
                        w[t, h], given[t, h], out[t, h], sums[t - at, i], later[i], power[age, h], local[i],
                        power[1, h], power[CHUNK + 1, h], membership[t, h], m,
                    )  # fmt: skip
                    more[h] = more[h] - less
                    asked[t, h] = through + real(more[h])
                    more[h] = more[h] * rate[h]
                age += 1
            fold(total, later, local, rate[first:last], age)
        out_start[n, first:last] = later
        for h in range(first, last):
            out_mass[n, h] = more[h]


@compiled
@no_type_check
def score_sweep_back(
    w, asked, none, bounds, mask, power, rate, start, eps, end, out, out_start, blocks, low, high
):
    """Adds the gradient of w through the scores, and gives that of the first energies."""
    heads, width = w.shape[1], w.shape[2]
    tiny, one = w.dtype.type(eps), w.dtype.type(1)
    for task in range(low, high):
        n, block = task // blocks, task % blocks
        first, last = block * heads // blocks, (block + 1) * heads // blocks
        begin, stop = bounds[n], bounds[n + 1]
        mark = marks(w, none, bounds, mask, rate, power, start, n, first, last)
        sums = np.empty((CHUNK, last - first, width), w.dtype)
        later = end[n, first:last].copy()
        total, local = later.astype(np.float64), np.zeros_like(later)
        running = np.zeros_like(later)
        for c in range(len(mark) - 1, -1, -1):
            at = begin + c * CHUNK
            upto = min(at + CHUNK, stop)
            running[:] = 0
            age = 0
            for t in range(at, upto):
                if mask.size > 0 and not mask[t]:
                    continue
                age += 1
                for h in range(first, last):
                    i = h - first
                    p, decay, lost = power[age, h], power[1, h], power[CHUNK + 1, h]
                    sums_row(w[t, h], one, mark[c, i], p, running[i], decay, lost, sums[t - at, i])
            age = 0
            for t in range(upto - 1, at - 1, -1):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(first, last):
                    i = h - first
                    score_row_back(
                        w[t, h], out[t, h], sums[t - at, i], later[i], power[age, h], local[i], power[1, h],
                        power[CHUNK + 1, h], asked[t, h], tiny,
                    )  # fmt: skip
                age += 1
            fold(total, later, local, rate[first:last], age)
        out_start[n, first:last] = later
