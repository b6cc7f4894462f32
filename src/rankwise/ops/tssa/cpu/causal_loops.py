"""The compiled loops of causal TSSA: one way through the tokens, by threads that hand sums to each other.

Arrays: w (M, H, K) with M the tokens of all sequences; mask (M,) or empty; power (CHUNK + 2, H) from
`arrays.powers`; rate (H,) λ in float64; decays None without half-lives. A piece is the tokens
first[i] ≤ t < last[i] of sequence owner[i]. Sums run in chunks: total at the chunk's start times a power of
λ, plus what the chunk added.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows
from rankwise.ops.tssa.cpu.relay import post, posted, take
from rankwise.ops.tssa.cpu.streaming import settle, stream, streams


@inlined
@no_type_check
def factors(power, decays, age, h):
    """What sums of a head shrink by: None for nothing, otherwise λ, what it lost when rounded, and λ^age."""
    return decays, power[1, h], power[CHUNK + 1, h], power[age, h]


@no_type_check
def _kept(x, factors):
    """X λ."""
    decays, rounded, lost, _ = factors
    return x if decays is None else x * rounded + x * lost


kept = inlined(_kept, {"contract"})  # nothing reordered: x (λ + lost) would be x λ again


@inlined
@no_type_check
def older(x, factors):
    """X λ^age."""
    return x if factors[0] is None else x * factors[3]


@inlined
@no_type_check
def score_row(row, base, local, factors, tiny):
    """One token's Σ_k w²/max(c, eps), after adding it to the chunk's sums."""
    score = row.dtype.type(0)
    for k in range(len(row)):
        y = row[k] * row[k]
        added = kept(local[k], factors) + y
        local[k] = added
        score += y / max(older(base[k], factors) + added, tiny)
    return score


@inlined
@no_type_check
def output_row(row, out, base, local, factors, pi, m):
    """One token's output, after adding it to the chunk's sums."""
    g = -pi * m
    for k in range(len(row)):
        added = kept(local[k], factors) + pi * (row[k] * row[k])
        local[k] = added
        out[k] = g * row[k] / (m + (older(base[k], factors) + added))


@inlined
@no_type_check
def add_row(row, weight, sums, factors):
    """Add one token's weight · w² to sums that decay."""
    for k in range(len(row)):
        sums[k] = kept(sums[k], factors) + weight * (row[k] * row[k])


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


@compiled
@no_type_check
def weigh(w, membership, weighted, mask, power, rate, decays, at, to, sums, mass, i):
    """sums[i] = Σ Π w² and mass[i] = Σ Π, or, not ``weighted``, sums[i] = Σ w², of the tokens at ≤ t < to."""
    heads, width = w.shape[1], w.shape[2]
    local, unread = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    pi = w.dtype.type(1)
    sums[i] = 0
    if weighted:
        mass[i] = 0
    for chunk in range(at, to, CHUNK):
        age = 0
        for t in range(chunk, min(chunk + CHUNK, to)):
            if mask.size > 0 and not mask[t]:
                continue
            age += 1
            for h in range(heads):
                if weighted:
                    pi = membership[t, h]
                    mass[i, h, 0] = mass[i, h, 0] * rate[h] + pi
                add_row(w[t, h], pi, local[h], factors(power, decays, age, h))
        fold(sums[i], unread, local, rate, age)


@compiled
@no_type_check
def assign(w, offset, temperature, mask, power, rate, decays, at, to, eps, total, score, membership):
    """Go on with c, scores Σ_k w_t²/max(c_t, eps) + offset, and memberships, which may lie over scores."""
    tiny = w.dtype.type(eps)
    heads, width = w.shape[1], w.shape[2]
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    base[:] = total
    for chunk in range(at, to, CHUNK):
        stop, age = min(chunk + CHUNK, to), 0
        for t in range(chunk, stop):
            if mask.size > 0 and not mask[t]:
                score[t] = 0
                continue
            age += 1
            for h in range(heads):
                by = factors(power, decays, age, h)
                score[t, h] = score_row(w[t, h], base[h], local[h], by, tiny)
                if offset.size > 0:
                    score[t, h] += offset[t, h]
        fold(total, base, local, rate, age)
        softmax_rows(score, temperature, mask, membership, chunk, stop)


@compiled
@no_type_check
def output(w, membership, mask, power, rate, decays, at, to, eps, total, mass, out):
    """Go on with a and n, n_t with eps, and out_t = -Π_t w_t n_t/(n_t + a_t)."""
    real = w.dtype.type
    heads, width = w.shape[1], w.shape[2]
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    past, cell = streams(out), np.empty((heads, width), w.dtype)
    base[:] = total
    for chunk in range(at, to, CHUNK):
        age = 0
        for t in range(chunk, min(chunk + CHUNK, to)):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            age += 1
            row = cell if past else out[t]
            for h in range(heads):
                pi = membership[t, h]
                mass[h, 0] = mass[h, 0] * rate[h] + pi
                m = real(mass[h, 0] + eps)
                by = factors(power, decays, age, h)
                output_row(w[t, h], row[h], base[h], local[h], by, pi, m)
            if past:
                stream(cell, out, t)
        fold(total, base, local, rate, age)
    settle()


@compiled
@no_type_check
def load(first, behind, own, before, sums):
    """The sums behind the piece ``before``; where there is none, those before the sequence."""
    if before < 0:
        sums[:] = first[own]
    else:
        sums[:] = behind[before]


@compiled
@no_type_check
def pass_on(before, sums, i, rate, age):
    """sums[i], what piece i adds, becomes the sums behind it."""
    for h in range(len(before)):
        shrink = rate[h] ** age
        for k in range(before.shape[1]):
            sums[i, h, k] += before[h, k] * shrink


@compiled
@no_type_check
def finish(
    w, offset, temperature, mask, power, rate, decays, at, to, own, energy_eps, mass_eps,
    total, more, n, energy, assigned, mass, score, membership, out,
):  # fmt: skip
    """Memberships, outputs and the sums behind the last piece of a sequence, for which nobody waits."""
    for c in range(at, to, CHUNK):
        end = min(c + CHUNK, to)
        assign(
            w, offset, temperature, mask, power, rate, decays, c, end, energy_eps, total, score, membership
        )
        output(w, membership, mask, power, rate, decays, c, end, mass_eps, more, n, out)
    energy[own] = total
    assigned[own] = more
    mass[own] = n


WEIGHED, ASSIGNED = 1, 2
"""How far a piece is: its w² are added up; so are its Π w² and Π."""


@compiled
@no_type_check
def forward(
    w, offset, temperature, mask, power, rate, decays, first, last, owner, energy_eps, mass_eps,
    energy, assigned, mass, behind, behind_assigned, behind_mass, score, membership, out, board, spot,
):  # fmt: skip
    """Memberships and outputs of all pieces: True; False where one has waited a while for the one before it.

    Call again then: ``spot`` holds the piece, -1 for none, and how far it is. ``energy``, ``assigned``
    (N, H, K) and ``mass`` (N, H, 1) are the sums before every sequence and become those behind it. A piece
    that another follows adds up its w² before it scores them, which brings them into the cache, and its Π w²
    before its outputs, so that the other can go on meanwhile from the sums ``behind`` it, (P, H, ·).
    """
    total, more, n = np.empty(w.shape[1:]), np.empty(w.shape[1:]), np.empty((w.shape[1], 1))
    done = False
    while not done:
        if spot[0] < 0:
            spot[0], spot[1] = take(board), 0
        i = spot[0]
        if i >= len(first):
            done = True
            continue
        at, to, own = first[i], last[i], owner[i]
        before = i - 1 if i > 0 and owner[i - 1] == own else -1
        followed = i + 1 < len(first) and owner[i + 1] == own
        age = to - at
        if followed and mask.size > 0:
            age = mask[at:to].sum()

        if followed and spot[1] < WEIGHED:
            weigh(w, membership, False, mask, power, rate, decays, at, to, behind, behind_mass, i)
            spot[1] = WEIGHED
        if followed and spot[1] < ASSIGNED:
            if before >= 0 and not posted(board, before, WEIGHED):
                break
            load(energy, behind, own, before, total)
            pass_on(total, behind, i, rate, age)
            post(board, i, WEIGHED)
            assign(
                w, offset, temperature, mask, power, rate, decays, at, to, energy_eps, total, score,
                membership,
            )  # fmt: skip
            weigh(w, membership, True, mask, power, rate, decays, at, to, behind_assigned, behind_mass, i)
            spot[1] = ASSIGNED
        if before >= 0 and not posted(board, before, ASSIGNED):
            break
        load(assigned, behind_assigned, own, before, more)
        load(mass, behind_mass, own, before, n)
        if followed:
            pass_on(more, behind_assigned, i, rate, age)
            pass_on(n, behind_mass, i, rate, age)
            post(board, i, ASSIGNED)
            output(w, membership, mask, power, rate, decays, at, to, mass_eps, more, n, out)
        else:
            load(energy, behind, own, before, total)
            finish(
                w, offset, temperature, mask, power, rate, decays, at, to, own, energy_eps, mass_eps,
                total, more, n, energy, assigned, mass, score, membership, out,
            )  # fmt: skip
        spot[0] = -1
    return done
