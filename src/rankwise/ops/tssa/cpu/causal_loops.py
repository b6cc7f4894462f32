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
from rankwise.ops.tssa.cpu.lanes import address, at_least, lanes, load, narrower, store, total, zeros
from rankwise.ops.tssa.cpu.relay import post, posted, take, there
from rankwise.ops.tssa.cpu.rows import GROUP, add, add_row, add_rows, factors, older, stream
from rankwise.ops.tssa.cpu.streaming import settle, streams


@inlined
@no_type_check
def _score_lines(w, i, k, width, base, local, j, factors, tiny, line):
    score = line
    while k + lanes(line) <= width:
        x = stream(w, i + k, line)
        added = add(x, None, load(local, j + k, line), factors)
        store(local, j + k, None, added)
        score = score + x * x / at_least(older(load(base, j + k, line), factors) + added, tiny)
        k += lanes(line)
    return k, total(score)


@inlined
@no_type_check
def score_row(w, i, width, base, local, j, factors, tiny):
    """One token's Σ_k w²/max(c, eps), after adding it to the chunk's sums."""
    line = zeros(w)
    k, score = _score_lines(w, i, 0, width, base, local, j, factors, tiny, line)
    if k < width:
        k, part = _score_lines(w, i, k, width, base, local, j, factors, tiny, narrower(line))
        k, rest = _score_lines(w, i, k, width, base, local, j, factors, tiny, narrower(narrower(line)))
        score += part + rest
    return score


@inlined
@no_type_check
def _output_lines(w, i, k, width, base, local, j, factors, pi, m, out, past, line):
    while k + lanes(line) <= width:
        x = load(w, i + k, line)
        added = add(x, pi, load(local, j + k, line), factors)
        store(local, j + k, None, added)
        x = -pi * m * x / (older(load(base, j + k, line), factors) + added + m)
        store(out, i + k, past, x)
        k += lanes(line)
    return k


@inlined
@no_type_check
def output_row(w, i, width, base, local, j, factors, pi, m, out, past):
    """One token's output, after adding it to the chunk's sums."""
    line = zeros(w)
    k = _output_lines(w, i, 0, width, base, local, j, factors, pi, m, out, past, line)
    if k < width:
        part, one = narrower(line), narrower(narrower(line))
        k = _output_lines(w, i, k, width, base, local, j, factors, pi, m, out, None, part)
        _output_lines(w, i, k, width, base, local, j, factors, pi, m, out, None, one)


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
def fold_on(before, since, total, base, local, rate, age):
    """The same with ``total`` from the start of a piece on; what lay ``before`` that was ``since`` ago."""
    for h in range(len(total)):
        shrink, distant = rate[h] ** age, rate[h] ** since
        for k in range(total.shape[1]):
            total[h, k] = total[h, k] * shrink + local[h, k]
            base[h, k] = before[h, k] * distant + total[h, k]
            local[h, k] = 0


@compiled
@no_type_check
def energies(w, mask, power, rate, decays, at, to, squared):
    """Squared = Σ w² of the tokens at ≤ t < to."""
    heads, width = w.shape[1], w.shape[2]
    local, unread = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    tokens, added, row = address(w), address(local), heads * width
    if decays is None:
        heads, width = 1, row  # heads do not matter
    squared[:] = 0
    for chunk in range(at, to, CHUNK):
        age = 0
        for t in range(chunk, min(chunk + CHUNK, to)):
            if mask.size > 0 and not mask[t]:
                continue
            age += 1
            for h in range(heads):
                j = h * width
                add_row(tokens, t * row + j, width, None, added, j, factors(power, decays, age, h))
        fold(squared, unread, local, rate, age)


@compiled
@no_type_check
def assign(
    w, offset, temperature, mask, power, rate, decays, at, to, eps, before, squared, score, membership,
    weighs, weighed, mass,
):  # fmt: skip
    """Scores Σ_k w_t²/max(c_t, eps) + offset, and memberships, which may lie over scores.

    c goes on from ``before``. squared = Σ w² of the tokens at ≤ t < to; if ``weighs`` weighed = Σ Π w² and
    mass = Σ Π likewise. Gives how many of the tokens are real.
    """
    tiny = w.dtype.type(eps)
    heads, width = w.shape[1], w.shape[2]
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    more, unread = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    tokens, earlier, added, assigned = address(w), address(base), address(local), address(more)
    row, since = heads * width, 0
    base[:] = before
    squared[:] = 0
    if weighs:
        weighed[:] = 0
        mass[:] = 0
    for chunk in range(at, to, CHUNK):
        end, age = min(chunk + CHUNK, to), 0
        for group in range(chunk, end, GROUP):
            stop, real = min(group + GROUP, end), 0
            for t in range(group, stop):
                if mask.size > 0 and not mask[t]:
                    score[t] = 0
                    continue
                real += 1
                for h in range(heads):
                    j, by = h * width, factors(power, decays, age + real, h)
                    score[t, h] = score_row(tokens, t * row + j, width, earlier, added, j, by, tiny)
                    if offset.size > 0:
                        score[t, h] += offset[t, h]
            age += real
            softmax_rows(score, temperature, mask, membership, group, stop)
            if not weighs:
                continue
            for t in range(group, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    pi = membership[t, h]
                    mass[h, 0] = mass[h, 0] * rate[h] + pi
                    if real < GROUP:
                        j, by = h * width, factors(power, decays, age, h)
                        add_row(tokens, t * row + j, width, pi, assigned, j, by)
            if real == GROUP:
                for h in range(heads):
                    j, by = h * width, factors(power, decays, age, h)
                    add_rows(
                        tokens, group * row + j, row, width, membership[group, h], membership[group + 1, h],
                        membership[group + 2, h], membership[group + 3, h], assigned, j, by,
                    )  # fmt: skip
        since += age
        fold_on(before, since, squared, base, local, rate, age)
        if weighs:
            fold(weighed, unread, more, rate, age)
    return since


@compiled
@no_type_check
def output(w, membership, mask, power, rate, decays, at, to, eps, total, mass, out):
    """Go on with a and n, n_t with eps, and out_t = -Π_t w_t n_t/(n_t + a_t)."""
    real = w.dtype.type
    heads, width = w.shape[1], w.shape[2]
    base, local = np.zeros((heads, width), w.dtype), np.zeros((heads, width), w.dtype)
    tokens, before, added, result = address(w), address(base), address(local), address(out)
    past, row = streams(out), heads * width
    base[:] = total
    for chunk in range(at, to, CHUNK):
        age = 0
        for t in range(chunk, min(chunk + CHUNK, to)):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            age += 1
            for h in range(heads):
                j, pi, by = h * width, membership[t, h], factors(power, decays, age, h)
                mass[h, 0] = mass[h, 0] * rate[h] + pi
                m = real(mass[h, 0] + eps)
                if past:
                    output_row(tokens, t * row + j, width, before, added, j, by, pi, m, result, True)
                else:
                    output_row(tokens, t * row + j, width, before, added, j, by, pi, m, result, None)
        fold(total, base, local, rate, age)
    settle()


@compiled
@no_type_check
def load_sums(first, behind, own, before, sums):
    """The sums behind the piece ``before``; where there is none, those before the sequence."""
    if before < 0:
        sums[:] = first[own]
    else:
        sums[:] = behind[before]


@compiled
@no_type_check
def keep(sums, i, behind):
    """behind[i] = sums."""
    behind[i] = sums


@compiled
@no_type_check
def pass_on(before, own, rate, age, behind):
    """The sums behind a piece of ``age`` tokens that has its ``own``."""
    for h in range(len(before)):
        shrink = rate[h] ** age
        for k in range(before.shape[1]):
            behind[h, k] = before[h, k] * shrink + own[h, k]


@compiled
@no_type_check
def finish(
    w, offset, temperature, mask, power, rate, decays, at, to, own, energy_eps, mass_eps,
    total, more, n, energy, assigned, mass, score, membership, out,
):  # fmt: skip
    """Memberships, outputs and the sums behind the last piece of a sequence, for which nobody waits."""
    squared = np.empty(total.shape)
    for c in range(at, to, CHUNK):
        end = min(c + CHUNK, to)
        age = assign(
            w, offset, temperature, mask, power, rate, decays, c, end, energy_eps, total, squared, score,
            membership, False, squared, n,
        )  # fmt: skip
        pass_on(total, squared, rate, age, total)
        output(w, membership, mask, power, rate, decays, c, end, mass_eps, more, n, out)
    energy[own] = total
    assigned[own] = more
    mass[own] = n


SQUARED, ASSIGNED = 1, 2
"""How far a piece is: the sums of w² behind it are known; so are those of Π w² and Π."""


@compiled
@no_type_check
def forward(
    w, offset, temperature, mask, power, rate, decays, first, last, owner, energy_eps, mass_eps, many,
    energy, assigned, mass, behind, behind_assigned, behind_mass, score, membership, out, board, spot,
):  # fmt: skip
    """Memberships and outputs of all pieces: True; False where one has waited a while for the one before it.

    Call again then: ``spot`` holds the piece, -1 for none, and how far it is. ``energy``, ``assigned``
    (N, H, K) and ``mass`` (N, H, 1) are the sums before every sequence and become those behind it; ``behind``
    (P, H, ·) are those behind a piece that another follows.

    Two threads go on from each other: one scores its tokens while the other writes the outputs of those
    before. A thread that finds no sums to go on from adds up its w² meanwhile, which brings them into the
    cache and lets the other go on as soon as they come. Where there are ``many``, waiting for whole passes of
    one another would keep two of them busy: all add up their w² first, and Π w² with their scores.
    """
    total, more, n = np.empty(w.shape[1:]), np.empty(w.shape[1:]), np.empty((w.shape[1], 1))
    again = np.empty(w.shape[1:])
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

        if followed and spot[1] == 0 and (many or (before >= 0 and not there(board, before, SQUARED))):
            energies(w, mask, power, rate, decays, at, to, behind[i])
            spot[1] = SQUARED
        if followed and spot[1] < ASSIGNED:
            if before >= 0 and not posted(board, before, SQUARED):
                break
            load_sums(energy, behind, own, before, total)
            early = spot[1] == SQUARED
            if early:
                pass_on(total, behind[i], rate, age, behind[i])
                post(board, i, SQUARED)
            assign(
                w, offset, temperature, mask, power, rate, decays, at, to, energy_eps, total,
                again if early else behind[i], score, membership, many, behind_assigned[i], behind_mass[i],
            )  # fmt: skip
            if not early:
                pass_on(total, behind[i], rate, age, behind[i])
                post(board, i, SQUARED)
            spot[1] = ASSIGNED
        if before >= 0 and not posted(board, before, ASSIGNED):
            break
        load_sums(assigned, behind_assigned, own, before, more)
        load_sums(mass, behind_mass, own, before, n)
        if not followed:
            load_sums(energy, behind, own, before, total)
            finish(
                w, offset, temperature, mask, power, rate, decays, at, to, own, energy_eps, mass_eps,
                total, more, n, energy, assigned, mass, score, membership, out,
            )  # fmt: skip
        elif many:
            pass_on(more, behind_assigned[i], rate, age, behind_assigned[i])
            pass_on(n, behind_mass[i], rate, age, behind_mass[i])
            post(board, i, ASSIGNED)
            output(w, membership, mask, power, rate, decays, at, to, mass_eps, more, n, out)
        else:
            output(w, membership, mask, power, rate, decays, at, to, mass_eps, more, n, out)
            keep(more, i, behind_assigned)
            keep(n, i, behind_mass)
            post(board, i, ASSIGNED)
        spot[0] = -1
    return done
