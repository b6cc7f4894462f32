"""Token statistics self-attention (TSSA) on a CPU: forward and backward passes.

w_t is the projection of token t; all formulas hold per head and channel. Causal TSSA, with decay λ ≤ 1::

    c_t = λ c_{t-1} + w_t²                 running energy
    s_t = Σ_k w_t²/max(c_t, eps) + offset  score, a sum over the K channels
    Π_t = softmax over heads of temperature · s_t    memberships: weights of the heads, which sum to 1
    a_t = λ a_{t-1} + Π_t w_t²             assigned energy
    n_t = λ n_{t-1} + Π_t                  mass
    output_t = -Π_t w_t n_t/(n_t + a_t)    here n_t includes a small eps

Bidirectional TSSA, with sums over all tokens::

    inverse = 1/max(Σ_t w_t², eps)
    s_t = Σ_k w_t² inverse                 score; memberships Π as above
    m = Σ_t Π_t w_t²/(Σ_t Π_t + eps)       moment: mean of w² weighted by Π
    output_t = -Π_t w_t factor, factor = 1/(1 + m)

d_x is the gradient of the loss with respect to x, for any name x above. The causal gradient is computed in
three loops over chunks: through outputs, through memberships, and through scores. `cpu_chunks` describes
chunks and arrays. In chunk i, arrays with one entry per sequence, such as inverse (B, H, K), are read at
sequence[i].
"""

from typing import no_type_check

import numpy as np
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums, as_dtype
from rankwise.ops.cpu_chunks import (
    CHUNK,
    ChunkedCall,
    Loop,
    add_chunk,
    array,
    factors,
    inlined,
    kept,
    project_row,
    softmax_rows,
    softmax_rows_back,
    tensor,
)
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS, NORM_EPS


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and `Saved` for the backward pass: memberships, scores and final sums."""
    work = ChunkedCall(call)
    membership = np.empty(work.w.shape[:2], work.w.dtype)
    score = np.empty_like(membership) if keep_scores else membership
    out = np.empty_like(work.w)
    run = _causal_forward if call.causal else _bidirectional_forward
    sums = run(work, score, membership, out)
    saved = Saved(work.padded(membership), work.padded(score), sums)
    return as_dtype(work.padded(out), call.w.dtype), saved


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w and temperature and, if causal, of offset and sums before the first token."""
    work = ChunkedCall(call)
    arrays = [work.flat(x) for x in (*saved[:2], *cotangents[:2])]
    dw, empty = np.empty_like(work.w), saved.score.new_empty(0)
    if call.causal:
        d_temperature, d_score, d_start = _causal_backward(work, arrays, work.wide(cotangents.sums), dw)
        d_offset = work.padded(d_score)
    else:
        d_temperature = _bidirectional_backward(work, arrays, saved.sums, dw)
        d_offset, d_start = empty, Sums(*(empty.clone() for _ in range(3)))
    tau = tensor(d_temperature.sum(0), work.dtype)
    return Gradients(as_dtype(work.padded(dw), call.w.dtype), tau, d_offset, d_start)


# --- causal -------------------------------------------------------------------------------------------------


def _causal_forward(work: ChunkedCall, score: np.ndarray, membership: np.ndarray, out: np.ndarray) -> Sums:
    """Write scores, memberships and output of a causal call, and return the final sums."""
    w, where, start = work.w, (*work.decay, *work.chunks[:2]), work.wide(work.call.initial_sums())
    energies, energy = work.carry(work.sums(None)[0], start[0])
    added, masses = work.empty_sums()
    read = (w, work.flat(work.call.offset), work.temperature, *where, energies, ENERGY_EPS)
    work.run(assign_causal, *read, score, membership, added, masses)
    begin, assigned = work.carry(added, start[1])
    begin_mass, mass = work.carry(masses, start[2])
    work.run(outputs_causal, w, membership, *where, begin, begin_mass, MASS_EPS, out)
    return work.narrow(energy, assigned, mass)


def _causal_backward(
    work: ChunkedCall, arrays: list[np.ndarray], d_end: list[np.ndarray], dw: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Sums]:
    """Write the gradient of w; return gradients of temperature (per chunk), scores and initial sums."""
    membership, score, d_output, given = arrays
    w, where, start = work.w, (*work.decay, *work.chunks[:2]), work.wide(work.call.initial_sums())
    d_membership, (d_begin, d_begin_mass) = np.empty_like(membership), work.empty_sums()

    squares, masses = work.sums(membership)
    begin = (work.carry(squares, start[1])[0], work.carry(masses, start[2])[0], MASS_EPS)
    written = (dw, d_membership, d_begin, d_begin_mass)
    work.run(outputs_back_causal, w, d_output, membership, *where, *begin, *written)
    d_after, d_assigned = work.carry(d_begin, d_end[1], backward=True)
    d_after_mass, d_mass = work.carry(d_begin_mass, d_end[2], backward=True)

    energies, _ = work.carry(work.sums(None)[0], start[0])
    d_score, d_temperature, d_energies = np.empty_like(membership), np.empty(masses.shape[:2]), squares
    read = (w, membership, score, work.temperature, given, *where, energies, ENERGY_EPS)
    written = (d_membership, d_score, d_temperature, d_energies)
    work.run(memberships_back_causal, *read, d_after, d_after_mass, *written)
    d_energies, d_energy = work.carry(d_energies, d_end[0], backward=True)
    after = (energies, ENERGY_EPS, d_energies, d_after)
    work.run(scores_back_causal, w, d_score, membership, *where, *after, dw)
    return d_temperature, d_score, work.narrow(d_energy, d_assigned, d_mass)


@inlined
@no_type_check
def score_row(row, begin, local, factors, tiny):
    """Add w² to the sums `local` of the chunk; return the score Σ_k w_k²/max(sum of w_k² so far, tiny)."""
    score = row.dtype.type(0)
    for k in range(len(row)):
        square = row[k] * row[k]
        local[k] = kept(local[k], factors) + square
        c = begin[k] * factors[2] + local[k]
        score += square / (tiny if c < tiny else c)  # a NaN in c is kept, because NaN < tiny is False
    return score


@Loop
@no_type_check
def assign_causal(
    w, offset, temperature, power, rate, first, last, begin, eps, score, membership, added, masses,
    low, high,
):  # fmt: skip
    """Write the scores and memberships Π of the tokens, and the sums of Π w² and Π over each chunk.

    begin[i] is the running energy (sum of w²) at the start of chunk i.
    """
    heads, tiny, local = w.shape[1], w.dtype.type(eps), np.empty(w.shape[1:], w.dtype)
    for i in range(low, high):
        local[:] = 0
        for t in range(first[i], last[i]):
            age = t - first[i] + 1
            for h in range(heads):
                score[t, h] = score_row(w[t, h], begin[i, h], local[h], factors(power, age, h), tiny)
                if offset.size > 0:
                    score[t, h] += offset[t, h]
        softmax_rows(score, temperature, membership, first[i], last[i])
        add_chunk(w, membership, power, rate, first[i], last[i], added[i], masses[i])


@inlined
@no_type_check
def output_row(row, begin, local, factors, membership, n, out):
    """Add Π w² of one token to `local`, the sums in its chunk; write the token's output (n: mass + eps)."""
    for k in range(len(row)):
        local[k] = kept(local[k], factors) + membership * (row[k] * row[k])
        out[k] = -membership * n * row[k] / (begin[k] * factors[2] + local[k] + n)


@Loop
@no_type_check
def outputs_causal(w, membership, power, rate, first, last, begin, begin_mass, eps, out, low, high):
    """Write the outputs; begin[i] and begin_mass[i] are assigned energy and mass at the start of chunk i."""
    real, heads = w.dtype.type, w.shape[1]
    local, n = np.empty(w.shape[1:], w.dtype), np.empty(heads)
    for i in range(low, high):
        local[:] = 0
        n[:] = begin_mass[i, :, 0]
        for t in range(first[i], last[i]):
            for h in range(heads):
                pi, by = membership[t, h], factors(power, t - first[i] + 1, h)
                n[h] = n[h] * rate[h] + pi
                output_row(w[t, h], begin[i, h], local[h], by, pi, real(n[h] + eps), out[t, h])


@inlined
@no_type_check
def running_row(row, weight, begin, local, factors, out):
    """Add weight · w² of one token to `local`, the sums in its chunk; write the running sums to `out`."""
    for k in range(len(row)):
        local[k] = kept(local[k], factors) + weight * (row[k] * row[k])
        out[k] = begin[k] * factors[2] + local[k]


@inlined
@no_type_check
def output_row_back_causal(row, d_output, out, share, membership, n):
    """Return -d_Π and -d_n through one token's output; replace a in `share` by d_a; write d_w to `out`."""
    real = row.dtype.type
    direct, mass = real(0), real(0)
    scale = real(1) / n
    for k in range(len(row)):
        a = share[k]
        r = real(1) / (n + a)
        q = n * r
        x = d_output[k] * row[k]
        d_assigned = r * q * membership * x
        share[k] = d_assigned
        direct += x * q
        mass += d_assigned * (a * scale)
        out[k] = -membership * d_output[k] * q
    return direct, mass


@inlined
@no_type_check
def assigned_row_back(row, out, share, local, factors, membership):
    """Add the gradient of w through assigned energies to `out`; return the gradient of Π (membership)."""
    two, through = row.dtype.type(2), row.dtype.type(0)
    for k in range(len(row)):
        g = local[k] + share[k]
        through += g * (row[k] * row[k])
        out[k] += two * membership * row[k] * g
        local[k] = kept(g, factors)
    return through


@Loop
@no_type_check
def outputs_back_causal(
    w, d_output, membership, power, rate, first, last, begin, begin_mass, eps, out, d_membership,
    d_begin, d_begin_mass, low, high,
):  # fmt: skip
    """Write gradients, through outputs of each chunk, of w, memberships and sums at the chunk's start."""
    heads, real, local = w.shape[1], w.dtype.type, np.empty(w.shape[1:], w.dtype)
    share, d_n = np.empty((CHUNK, *w.shape[1:]), w.dtype), np.empty((CHUNK, heads), w.dtype)
    n, d_mass = np.empty(heads), np.empty(heads)
    for i in range(low, high):
        local[:] = 0
        n[:] = begin_mass[i, :, 0]
        for t in range(first[i], last[i]):
            age = t - first[i] + 1
            for h in range(heads):
                pi, by = membership[t, h], factors(power, age, h)
                n[h] = n[h] * rate[h] + pi
                running_row(w[t, h], pi, begin[i, h], local[h], by, share[age - 1, h])
                direct, d_n[age - 1, h] = output_row_back_causal(
                    w[t, h], d_output[t, h], out[t, h], share[age - 1, h], pi, real(n[h] + eps)
                )
                d_membership[t, h] = -direct
        local[:] = 0
        d_mass[:] = 0
        for t in range(last[i] - 1, first[i] - 1, -1):
            for h in range(heads):
                pi, by = membership[t, h], factors(power, 0, h)
                through = assigned_row_back(w[t, h], out[t, h], share[t - first[i], h], local[h], by, pi)
                d_mass[h] = d_mass[h] - d_n[t - first[i], h]
                d_membership[t, h] += through + real(d_mass[h])
                d_mass[h] = d_mass[h] * rate[h]
        d_begin[i] = local
        d_begin_mass[i, :, 0] = d_mass


@inlined
@no_type_check
def energy_row_back(row, begin, local, factors, d_score, tiny, sums):
    """Add to `sums` the gradient of the energy at the start of the chunk, through the score of one token."""
    real = row.dtype.type
    for k in range(len(row)):
        y = row[k] * row[k]
        local[k] = kept(local[k], factors) + y
        c = begin[k] * factors[2] + local[k]
        r = real(1) / max(c, tiny)
        sums[k] -= d_score * y * r * r * factors[2] if c >= tiny else real(0)


@Loop
@no_type_check
def memberships_back_causal(
    w, membership, score, temperature, given, power, rate, first, last, begin, eps, d_after,
    d_after_mass, d_membership, d_score, d_temperature, d_begin, low, high,
):  # fmt: skip
    """Write the gradients of scores and, per chunk, of temperatures and of the energy at the chunk's start.

    d_after[i] and d_after_mass[i] are the gradients of assigned energy and mass at the end of chunk i.
    `given` is the gradient of memberships from the loss directly.
    """
    heads, real, tiny = w.shape[1], w.dtype.type, w.dtype.type(eps)
    local, d_energy = np.empty(w.shape[1:], w.dtype), np.empty(w.shape[1:], w.dtype)
    for i in range(low, high):
        for t in range(first[i], last[i]):
            for h in range(heads):
                through = project_row(w[t, h], d_after[i, h]) + real(d_after_mass[i, h, 0])
                d_membership[t, h] += given[t, h] + power[last[i] - 1 - t, h] * through
        d_temperature[i] = 0
        softmax_rows_back(
            membership, d_membership, score, temperature, d_score, d_temperature[i], first[i], last[i]
        )
        local[:] = 0
        d_energy[:] = 0
        for t in range(first[i], last[i]):
            for h in range(heads):
                by = factors(power, t - first[i] + 1, h)
                energy_row_back(w[t, h], begin[i, h], local[h], by, d_score[t, h], tiny, d_energy[h])
        d_begin[i] = d_energy


@inlined
@no_type_check
def score_row_back(row, out, sums, d_energy, local, factors, d_score, tiny, d_assigned, membership):
    """Add to `out` the gradient of w at one token, through scores of the chunk and of later chunks."""
    real = row.dtype.type
    for k in range(len(row)):
        c = sums[k]
        r = real(1) / max(c, tiny)
        share = -d_score * (row[k] * row[k] * r) * r if c >= tiny else real(0)
        through = d_score * r + (d_energy[k] * factors[2] + local[k] + share)
        out[k] += real(2) * row[k] * (through + membership * d_assigned[k])
        local[k] = kept(local[k] + share, factors)


@Loop
@no_type_check
def scores_back_causal(
    w, d_score, membership, power, rate, first, last, begin, eps, d_energies, d_after, out, low, high
):
    """Add to `out` the gradient of w through scores, and through the sums at the end of each chunk."""
    heads, real, tiny = w.shape[1], w.dtype.type, w.dtype.type(eps)
    local, sums = np.empty(w.shape[1:], w.dtype), np.empty((CHUNK, *w.shape[1:]), w.dtype)
    for i in range(low, high):
        local[:] = 0
        for t in range(first[i], last[i]):
            age = t - first[i] + 1
            for h in range(heads):
                by = factors(power, age, h)
                running_row(w[t, h], real(1), begin[i, h], local[h], by, sums[age - 1, h])
        local[:] = 0
        for t in range(last[i] - 1, first[i] - 1, -1):
            for h in range(heads):
                by = factors(power, last[i] - 1 - t, h)
                pi, g = membership[t, h] * by[2], d_score[t, h]
                score_row_back(
                    w[t, h], out[t, h], sums[t - first[i], h], d_energies[i, h], local[h], by, g, tiny,
                    d_after[i, h], pi,
                )  # fmt: skip


# --- bidirectional ------------------------------------------------------------------------------------------


def _bidirectional_forward(
    work: ChunkedCall, score: np.ndarray, membership: np.ndarray, out: np.ndarray
) -> Sums:
    """Write scores, memberships and output of a bidirectional call, and return the sums."""
    w, chunks = work.w, work.chunks
    energy = work.total(work.sums(None)[0])
    added, masses = work.empty_sums()
    read = (w, _inverse(energy), work.temperature, *work.decay, *chunks)
    work.run(assign_bidirectional, *read, score, membership, added, masses)
    assigned, mass = work.total(added), work.total(masses)
    work.run(outputs_bidirectional, w, membership, _factor(assigned, mass), *chunks, out)
    return work.narrow(energy, assigned, mass)


def _bidirectional_backward(
    work: ChunkedCall, arrays: list[np.ndarray], sums: Sums, dw: np.ndarray
) -> np.ndarray:
    """Write the gradient of w to `dw`; return the gradient of the temperature per chunk."""
    membership, score, d_output, given = arrays
    w, chunks = work.w, work.chunks
    energy, assigned, mass = (array(x, work.dtype) for x in sums)
    inverse, factor = _inverse(energy), _factor(assigned, mass[..., None])
    d_membership, d_score = np.empty_like(membership), np.empty_like(membership)
    added, unused = work.empty_sums()  # `add_chunk` also writes sums of d_score, which are not used
    d_temperature = np.empty(unused.shape[:2])

    work.run(outputs_back_bidirectional, w, d_output, membership, factor, *chunks, d_membership, added)
    with np.errstate(all="ignore"):  # infinite sums make ∞ − ∞ = NaN, about which numpy would warn
        scale = 1 / (mass[..., None] + w.dtype.type(MASS_EPS))
        d_moment = work.total(added) * scale
        d_mass = (d_moment * (assigned * scale)).sum(-1)
    read = (w, membership, score, work.temperature, given, d_moment, d_mass, *work.decay, *chunks)
    work.run(scores_back_bidirectional, *read, d_membership, d_score, d_temperature, added, unused)
    with np.errstate(all="ignore"):
        d_energy = -(work.total(added) * inverse) * inverse  # inverse² would overflow float32
    d_energy[energy < NORM_EPS**2] = 0
    per_sequence = (factor, d_moment, inverse, d_energy)
    work.run(tokens_back_bidirectional, w, d_output, membership, d_score, *per_sequence, *chunks, dw)
    return d_temperature


def _inverse(energy: np.ndarray) -> np.ndarray:
    """Return inverse = 1/max(energy, eps), where energy is Σ w² over the tokens; NaN stays NaN."""
    return 1 / np.maximum(energy, energy.dtype.type(NORM_EPS**2))


def _factor(assigned: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return 1/(1 + m), where m = assigned/(mass + eps) is the mean of w² weighted by memberships."""
    with np.errstate(all="ignore"):
        return 1 / (1 + assigned / (mass + mass.dtype.type(MASS_EPS)))


@Loop
@no_type_check
def assign_bidirectional(
    w, inverse, temperature, power, rate, first, last, sequence, score, membership, added, masses,
    low, high,
):  # fmt: skip
    """Write the scores and memberships Π of the tokens, and the sums of Π w² and Π over each chunk."""
    for i in range(low, high):
        for t in range(first[i], last[i]):
            for h in range(w.shape[1]):
                score[t, h] = project_row(w[t, h], inverse[sequence[i], h])
        softmax_rows(score, temperature, membership, first[i], last[i])
        add_chunk(w, membership, power, rate, first[i], last[i], added[i], masses[i])


@Loop
@no_type_check
def outputs_bidirectional(w, membership, factor, first, last, sequence, out, low, high):
    """Write the output -Π w factor of each token (Π: membership, w: projection)."""
    for i in range(low, high):
        for t in range(first[i], last[i]):
            for h in range(w.shape[1]):
                pi, q = membership[t, h], factor[sequence[i], h]
                for k in range(w.shape[2]):
                    out[t, h, k] = -pi * w[t, h, k] * q[k]


@inlined
@no_type_check
def output_row_back_bidirectional(row, d_output, factor, membership, sums):
    """Return -d_Π through one token's output; add the token's part of d_m to `sums`."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        x = d_output[k] * row[k] * factor[k]
        out += x
        sums[k] += membership * (x * factor[k])
    return out


@Loop
@no_type_check
def outputs_back_bidirectional(
    w, d_output, membership, factor, first, last, sequence, direct, added, low, high
):
    """Write -d_Π through the outputs to `direct`, and each chunk's part of d_m to `added`."""
    for i in range(low, high):
        added[i] = 0
        for t in range(first[i], last[i]):
            for h in range(w.shape[1]):
                q, pi = factor[sequence[i], h], membership[t, h]
                direct[t, h] = output_row_back_bidirectional(w[t, h], d_output[t, h], q, pi, added[i, h])


@Loop
@no_type_check
def scores_back_bidirectional(
    w, membership, score, temperature, given, d_moment, d_mass, power, rate, first, last, sequence,
    d_membership, d_score, d_temperature, added, unused, low, high,
):  # fmt: skip
    """Write the gradients of scores and, per chunk, of temperatures, and the sums Σ_t d_score w².

    On input, d_membership contains minus the gradient of memberships through the outputs. The loop replaces
    it by the whole gradient of memberships. `given` is the gradient of memberships from the loss directly.
    """
    for i in range(low, high):
        n = sequence[i]
        d_temperature[i] = 0
        for t in range(first[i], last[i]):
            for h in range(w.shape[1]):
                through = project_row(w[t, h], d_moment[n, h])
                d_membership[t, h] = through - d_membership[t, h] + given[t, h] - d_mass[n, h]
        softmax_rows_back(
            membership, d_membership, score, temperature, d_score, d_temperature[i], first[i], last[i]
        )
        add_chunk(w, d_score, power, rate, first[i], last[i], added[i], unused[i])


@inlined
@no_type_check
def token_row_back(row, d_output, factor, d_moment, inverse, d_energy, membership, d_score, out):
    """Write the gradient of w at one token and head to `out`."""
    two = row.dtype.type(2)
    for k in range(len(row)):
        g = d_moment[k] * membership + d_score * inverse[k] + d_energy[k]
        out[k] = two * row[k] * g - membership * d_output[k] * factor[k]


@Loop
@no_type_check
def tokens_back_bidirectional(
    w, d_output, membership, d_score, factor, d_moment, inverse, d_energy, first, last, sequence, out,
    low, high,
):  # fmt: skip
    """Write the gradient of w: 2w (d_moment Π + d_score inverse + d_energy) - Π d_output factor."""
    for i in range(low, high):
        n = sequence[i]
        for t in range(first[i], last[i]):
            for h in range(w.shape[1]):
                token_row_back(
                    w[t, h], d_output[t, h], factor[n, h], d_moment[n, h], inverse[n, h], d_energy[n, h],
                    membership[t, h], d_score[t, h], out[t, h],
                )  # fmt: skip
