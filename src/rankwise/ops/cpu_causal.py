"""Causal token statistics self-attention (TSSA) on a CPU: forward and backward passes.

Formula for token t, per head and channel; w_t is the projection of the token and λ ≤ 1 the decay per token::

    c_t = λ c_{t-1} + w_t²                 running energy
    s_t = Σ_k w_t²/max(c_t, eps) + offset  score, a sum over the K channels
    Π_t = softmax over heads of temperature · s_t    memberships: weights of the heads, which sum to 1
    a_t = λ a_{t-1} + Π_t w_t²             assigned energy
    n_t = λ n_{t-1} + Π_t                  mass
    output_t = -Π_t w_t n_t/(n_t + a_t)    here n_t includes a small eps

d_x is the gradient of the loss with respect to x. The gradient is computed in three loops over chunks:
through outputs, through memberships, and through scores. `cpu_chunks` describes chunks and arrays.
"""

from typing import no_type_check

import numpy as np
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, as_dtype
from rankwise.ops.cpu_chunks import (
    CHUNK,
    ChunkedCall,
    add_chunk,
    factors,
    flat,
    kept,
    project_row,
    softmax_rows,
    softmax_rows_back,
    tensor,
    tokens_between,
)
from rankwise.ops.cpu_compile import Loop, inlined
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and memberships, scores and final sums for the backward pass."""
    work = ChunkedCall(call)
    w, dtype, start = work.w, work.dtype, work.wide(call.initial_sums())
    where = (*work.tokens, *work.chunks[:2])
    membership = np.empty(w.shape[:2], w.dtype)
    score = np.empty_like(membership) if keep_scores else membership

    energies, energy = work.carry(work.sums(None)[0], start[0])
    added, masses = work.empty_sums()
    read = (w, flat(call.offset, dtype), work.temperature, *where, energies, ENERGY_EPS)
    work.run(assign, *read, score, membership, added, masses)
    begin, assigned = work.carry(added, start[1])
    begin_mass, mass = work.carry(masses, start[2])
    output = work.new()
    work.run(outputs, w, membership, *where, begin, begin_mass, MASS_EPS, flat(output, dtype))
    sums = work.narrow(energy, assigned, mass)
    return as_dtype(output, call.w.dtype), Saved(work.per_token(membership), work.per_token(score), sums)


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w, temperature, offset, and the sums before the first token."""
    work = ChunkedCall(call)
    w, dtype, where = work.w, work.dtype, (*work.tokens, *work.chunks[:2])
    start, d_end = work.wide(call.initial_sums()), work.wide(cotangents.sums)
    membership, score, d_output, given = (flat(x, dtype) for x in (*saved[:2], *cotangents[:2]))
    dw, d_membership, (d_begin, d_begin_mass) = work.new(), np.empty_like(membership), work.empty_sums()

    squares, masses = work.sums(membership)
    known = (work.carry(squares, start[1])[0], work.carry(masses, start[2])[0], MASS_EPS)
    found = (flat(dw, dtype), d_membership, d_begin, d_begin_mass)
    work.run(outputs_back, w, d_output, membership, *where, *known, *found)
    d_after, d_assigned = work.carry(d_begin, d_end[1], backward=True)
    d_after_mass, d_mass = work.carry(d_begin_mass, d_end[2], backward=True)

    energies, _ = work.carry(work.sums(None)[0], start[0])
    d_score, d_temperature, d_energies = np.empty_like(membership), np.empty(masses.shape[:2]), squares
    read = (w, membership, score, work.temperature, given, *where, energies, ENERGY_EPS)
    found = (d_membership, d_score, d_temperature, d_energies)
    work.run(memberships_back, *read, d_after, d_after_mass, *found)
    d_energies, d_energy = work.carry(d_energies, d_end[0], backward=True)
    rest = (energies, ENERGY_EPS, d_energies, d_after, flat(dw, dtype))
    work.run(scores_back, w, d_score, membership, *where, *rest)
    tau = tensor(d_temperature.sum(0), dtype)
    d_start = work.narrow(d_energy, d_assigned, d_mass)
    return Gradients(as_dtype(dw, call.w.dtype), tau, work.per_token(d_score), d_start)


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
def assign(
    w, offset, temperature, mask, power, rate, first, last, begin, eps, score, membership, added, masses,
    low, high,
):  # fmt: skip
    """Write the scores and memberships Π of the tokens, and the sums of Π w² and Π over each chunk.

    begin[i] is the running energy (sum of w²) at the start of chunk i.
    """
    heads, tiny, local = w.shape[1], w.dtype.type(eps), np.empty(w.shape[1:], w.dtype)
    for i in range(low, high):
        local[:] = 0
        age = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                score[t] = 0
                continue
            age += 1
            for h in range(heads):
                found = score_row(w[t, h], begin[i, h], local[h], factors(power, age, h), tiny)
                score[t, h] = found + offset[t, h] if offset.size > 0 else found
        softmax_rows(score, temperature, mask, membership, first[i], last[i])
        add_chunk(w, membership, mask, power, rate, first[i], last[i], added[i], masses[i])


@inlined
@no_type_check
def output_row(row, begin, local, factors, membership, n, out):
    """Add Π w² of one token (membership Π) to `local`, the sums in its chunk; write the token's output."""
    for k in range(len(row)):
        local[k] = kept(local[k], factors) + membership * (row[k] * row[k])
        out[k] = -membership * n * row[k] / (begin[k] * factors[2] + local[k] + n)


@Loop
@no_type_check
def outputs(w, membership, mask, power, rate, first, last, begin, begin_mass, eps, out, low, high):
    """Write the outputs; begin[i], begin_mass[i] are the assigned energy and mass at the start of chunk i."""
    real, heads = w.dtype.type, w.shape[1]
    local, n = np.empty(w.shape[1:], w.dtype), np.empty(heads)
    for i in range(low, high):
        local[:] = 0
        n[:] = begin_mass[i, :, 0]
        age = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            age += 1
            for h in range(heads):
                pi, by = membership[t, h], factors(power, age, h)
                n[h] = n[h] * rate[h] + pi
                output_row(w[t, h], begin[i, h], local[h], by, pi, real(n[h] + eps), out[t, h])


@inlined
@no_type_check
def running_row(row, weight, begin, local, factors, out):
    """Add weight · w² of one token to `local`, the sums in its chunk; write the running sums to `out`."""
    for k in range(len(row)):
        added = kept(local[k], factors) + weight * (row[k] * row[k])
        local[k] = added
        out[k] = begin[k] * factors[2] + added


@inlined
@no_type_check
def output_row_back(row, d_output, out, share, membership, n):
    """Return minus d_Π and minus d_n through one token's output; write d_a to `share` and d_w to `out`."""
    zero, one = row.dtype.type(0), row.dtype.type(1)
    direct, mass = zero, zero
    each = one / n
    for k in range(len(row)):
        a = share[k]
        r = one / (n + a)
        q = n * r
        x = d_output[k] * row[k]
        d_assigned = r * q * membership * x
        share[k] = d_assigned
        direct += x * q
        mass += d_assigned * (a * each)
        out[k] = -membership * d_output[k] * q
    return direct, mass


@inlined
@no_type_check
def assigned_row_back(row, out, share, local, factors, membership):
    """Add the gradient of w through assigned energies to `out`; return the gradient of the membership."""
    two = row.dtype.type(2)
    through = row.dtype.type(0)
    for k in range(len(row)):
        g = local[k] + share[k]
        through += g * (row[k] * row[k])
        out[k] += two * membership * row[k] * g
        local[k] = kept(g, factors)
    return through


@Loop
@no_type_check
def outputs_back(
    w, d_output, membership, mask, power, rate, first, last, begin, begin_mass, eps, out, d_membership,
    d_begin, d_begin_mass, low, high,
):  # fmt: skip
    """Write gradients through outputs of each chunk: of w, memberships, and sums at the chunk's start."""
    heads, real, local = w.shape[1], w.dtype.type, np.empty(w.shape[1:], w.dtype)
    share, d_n = np.empty((CHUNK, *w.shape[1:]), w.dtype), np.empty((CHUNK, heads), w.dtype)
    n, d_mass = np.empty(heads), np.empty(heads)
    for i in range(low, high):
        local[:] = 0
        n[:] = begin_mass[i, :, 0]
        age = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                d_membership[t] = 0
                continue
            age += 1
            for h in range(heads):
                pi, by, own = membership[t, h], factors(power, age, h), share[t - first[i], h]
                n[h] = n[h] * rate[h] + pi
                running_row(w[t, h], pi, begin[i, h], local[h], by, own)
                direct, mass = output_row_back(w[t, h], d_output[t, h], out[t, h], own, pi, real(n[h] + eps))
                d_membership[t, h] = -direct
                d_n[t - first[i], h] = mass
        local[:] = 0
        d_mass[:] = 0
        for t in range(last[i] - 1, first[i] - 1, -1):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(heads):
                pi, by, own = membership[t, h], factors(power, 0, h), share[t - first[i], h]
                through = assigned_row_back(w[t, h], out[t, h], own, local[h], by, pi)
                d_mass[h] = d_mass[h] - d_n[t - first[i], h]
                d_membership[t, h] += through + real(d_mass[h])
                d_mass[h] = d_mass[h] * rate[h]
        d_begin[i] = local
        d_begin_mass[i, :, 0] = d_mass


@inlined
@no_type_check
def energy_row_back(row, begin, local, factors, d_score, tiny, sums):
    """Add to `sums` the gradient of the energy at the start of the chunk, through the score of one token."""
    zero, one = row.dtype.type(0), row.dtype.type(1)
    for k in range(len(row)):
        y = row[k] * row[k]
        added = kept(local[k], factors) + y
        local[k] = added
        c = begin[k] * factors[2] + added
        r = one / max(c, tiny)
        sums[k] -= d_score * y * r * r * factors[2] if c >= tiny else zero


@Loop
@no_type_check
def memberships_back(
    w, membership, score, temperature, given, mask, power, rate, first, last, begin, eps, d_after,
    d_after_mass, d_membership, d_score, d_temperature, d_begin, low, high,
):  # fmt: skip
    """Write the gradients of scores and, per chunk, of temperatures and of the energy at the chunk's start.

    d_after[i] and d_after_mass[i] are the gradients of assigned energy and mass at the end of chunk i.
    `given` is the gradient of memberships from the loss directly.
    """
    heads, real, tiny = w.shape[1], w.dtype.type, w.dtype.type(eps)
    local, d_energy = np.empty(w.shape[1:], w.dtype), np.empty(w.shape[1:], w.dtype)
    for i in range(low, high):
        count, age = tokens_between(mask, first[i], last[i]), 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                continue
            age += 1
            for h in range(heads):
                through = project_row(w[t, h], d_after[i, h]) + real(d_after_mass[i, h, 0])
                d_membership[t, h] += given[t, h] + power[count - age, h] * through
        d_temperature[i] = 0
        softmax_rows_back(
            membership, d_membership, score, temperature, d_score, d_temperature[i], first[i], last[i]
        )
        local[:] = 0
        d_energy[:] = 0
        age = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                continue
            age += 1
            for h in range(heads):
                by = factors(power, age, h)
                energy_row_back(w[t, h], begin[i, h], local[h], by, d_score[t, h], tiny, d_energy[h])
        d_begin[i] = d_energy


@inlined
@no_type_check
def score_row_back(row, out, sums, d_energy, local, factors, d_score, tiny, d_assigned, membership):
    """Add to `out` the gradient of w at one token through scores in its chunk and sums of later chunks."""
    zero, one, two = row.dtype.type(0), row.dtype.type(1), row.dtype.type(2)
    for k in range(len(row)):
        c = sums[k]
        r = one / max(c, tiny)
        share = -d_score * (row[k] * row[k] * r) * r if c >= tiny else zero
        through = d_score * r + (d_energy[k] * factors[2] + local[k] + share)
        out[k] += two * row[k] * (through + membership * d_assigned[k])
        local[k] = kept(local[k] + share, factors)


@Loop
@no_type_check
def scores_back(
    w, d_score, membership, mask, power, rate, first, last, begin, eps, d_energies, d_after, out, low, high
):  # fmt: skip
    """Add to `out` the gradient of w through scores, and through the sums at the end of each chunk."""
    heads, tiny, one = w.shape[1], w.dtype.type(eps), w.dtype.type(1)
    local, sums = np.empty(w.shape[1:], w.dtype), np.empty((CHUNK, *w.shape[1:]), w.dtype)
    for i in range(low, high):
        local[:] = 0
        age = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                continue
            age += 1
            for h in range(heads):
                own, by = sums[t - first[i], h], factors(power, age, h)
                running_row(w[t, h], one, begin[i, h], local[h], by, own)
        local[:] = 0
        age = 0
        for t in range(last[i] - 1, first[i] - 1, -1):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(heads):
                own, by = sums[t - first[i], h], factors(power, age, h)
                pi, g = membership[t, h] * by[2], d_score[t, h]
                score_row_back(
                    w[t, h], out[t, h], own, d_energies[i, h], local[h], by, g, tiny, d_after[i, h], pi
                )
            age += 1
