"""The compiled loops of bidirectional TSSA.

Arrays: w (M, H, K) with M the tokens of all sequences; a task is a piece, the tokens first[i] ≤ t < last[i]
of sequence owner[i]. What is summed over tokens is summed by piece, in chunks, in float64.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows, softmax_rows_back
from rankwise.ops.tssa.cpu.streaming import settle, stream, streams


@inlined
@no_type_check
def add_energy_row(row, weight, sums):
    """Add one token's weight · w²."""
    for k in range(len(row)):
        sums[k] += weight * (row[k] * row[k])


@compiled
@no_type_check
def energies(w, mask, first, last, total, low, high):
    """total[i] = Σ_t w[t,h,k]² over piece i."""
    local = np.zeros(w.shape[1:], w.dtype)
    one = w.dtype.type(1)
    for i in range(low, high):
        total[i] = 0
        for chunk in range(first[i], last[i], CHUNK):
            local[:] = 0
            for t in range(chunk, min(chunk + CHUNK, last[i])):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(len(local)):
                    add_energy_row(w[t, h], one, local[h])
            total[i] += local


@compiled
@no_type_check
def gather(total, owner, out):
    """out[n] = the totals of the pieces of sequence n, added up in float64; untouched where it has none."""
    carry = np.zeros(total.shape[1:])
    for i in range(len(total)):
        if i > 0 and owner[i] == owner[i - 1]:
            carry += total[i]
        else:
            carry[:] = total[i]
        out[owner[i]] = carry


@inlined
@no_type_check
def project_row(row, vector):
    """Σ_k vector_k w_k²."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        out += row[k] * row[k] * vector[k]
    return out


@compiled
@no_type_check
def assign(w, inverse, temperature, mask, first, last, owner, score, membership, total, mass, low, high):
    """Scores and memberships; total[i] = Σ_t Π w² and mass[i] = Σ_t Π over piece i, while w is in the cache.

    ``membership`` may be ``score``.
    """
    heads, width = w.shape[1], w.shape[2]
    local = np.zeros((heads, width), w.dtype)
    for i in range(low, high):
        total[i] = 0
        mass[i] = 0
        for chunk in range(first[i], last[i], CHUNK):
            stop = min(chunk + CHUNK, last[i])
            local[:] = 0
            for t in range(chunk, stop):
                if mask.size > 0 and not mask[t]:
                    score[t] = 0
                    continue
                for h in range(heads):
                    score[t, h] = project_row(w[t, h], inverse[owner[i], h])
            softmax_rows(score, temperature, mask, membership, chunk, stop)
            for t in range(chunk, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    mass[i, h] += membership[t, h]
                    add_energy_row(w[t, h], membership[t, h], local[h])
            total[i] += local


@inlined
@no_type_check
def scale_row(row, out, factor, vector):
    """-factor · vector · w."""
    for k in range(len(row)):
        out[k] = -factor * row[k] * vector[k]


@compiled
@no_type_check
def outputs(w, membership, factor, mask, first, last, owner, out, low, high):
    """Out = -Π w factor, factor = 1/(1 + m) of the token's sequence."""
    past, cell = streams(out), np.empty(w.shape[1:], w.dtype)
    for i in range(low, high):
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            row = cell if past else out[t]
            for h in range(w.shape[1]):
                scale_row(w[t, h], row[h], membership[t, h], factor[owner[i], h])
            if past:
                stream(cell, out, t)
    settle()


@inlined
@no_type_check
def output_row_back(row, given, factor, pi, sums):
    """Σ_k g w factor; adds Π g w factor² to the sums."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        x = given[k] * row[k] * factor[k]
        out += x
        sums[k] += pi * (x * factor[k])
    return out


@compiled
@no_type_check
def outputs_back(w, given, membership, factor, mask, first, last, owner, direct, total, low, high):
    """direct[t,h] = Σ_k g w factor; total[i] = Σ_t Π g w factor² over piece i, the gradient of m."""
    heads, width = w.shape[1], w.shape[2]
    local = np.zeros((heads, width), w.dtype)
    for i in range(low, high):
        total[i] = 0
        for chunk in range(first[i], last[i], CHUNK):
            local[:] = 0
            for t in range(chunk, min(chunk + CHUNK, last[i])):
                if mask.size > 0 and not mask[t]:
                    direct[t] = 0
                    continue
                for h in range(heads):
                    direct[t, h] = output_row_back(
                        w[t, h], given[t, h], factor[owner[i], h], membership[t, h], local[h]
                    )
            total[i] += local


@compiled
@no_type_check
def slopes(
    w, membership, score, temperature, given, moment, less, mask, first, last, owner,
    asked, slope, of_temperature, total, low, high,
):  # fmt: skip
    """Gradients of the scores and, by piece, of the temperature, from what the output asks of Π.

    asked[t,h] becomes Σ_k moment w² - asked + given - less; total[i] = Σ_t slope w² over piece i.
    """
    heads, width = w.shape[1], w.shape[2]
    local = np.zeros((heads, width), w.dtype)
    for i in range(low, high):
        total[i] = 0
        of_temperature[i] = 0
        n = owner[i]
        for chunk in range(first[i], last[i], CHUNK):
            stop = min(chunk + CHUNK, last[i])
            local[:] = 0
            for t in range(chunk, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    through = project_row(w[t, h], moment[n, h])
                    asked[t, h] = through - asked[t, h] + given[t, h] - less[n, h]
            softmax_rows_back(membership, asked, score, temperature, slope, of_temperature[i], chunk, stop)
            for t in range(chunk, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    add_energy_row(w[t, h], slope[t, h], local[h])
            total[i] += local


@inlined
@no_type_check
def token_row_back(row, given, out, factor, pi, asked, moment, inverse, energy):
    """One token's gradient from those of its sequence's sums."""
    two = row.dtype.type(2)
    for k in range(len(row)):
        g = moment[k] * pi + asked * inverse[k] + energy[k]
        out[k] = two * row[k] * g - pi * given[k] * factor[k]


@compiled
@no_type_check
def tokens_back(
    w, given, membership, asked, factor, moment, inverse, energy, mask, first, last, owner, out, low, high
):
    """Gradient of w: 2w (moment Π + asked · inverse + energy) - Π g factor."""
    past, cell = streams(out), np.empty(w.shape[1:], w.dtype)
    for i in range(low, high):
        n = owner[i]
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            row = cell if past else out[t]
            for h in range(w.shape[1]):
                token_row_back(
                    w[t, h], given[t, h], row[h], factor[n, h], membership[t, h], asked[t, h],
                    moment[n, h], inverse[n, h], energy[n, h],
                )  # fmt: skip
            if past:
                stream(cell, out, t)
    settle()
