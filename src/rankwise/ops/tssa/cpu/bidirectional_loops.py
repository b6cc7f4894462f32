"""The compiled loops of bidirectional TSSA: three ways through the tokens, by threads that wait for all sums.

Arrays: w (M, H, K) with M the tokens of all sequences; piece i is the tokens first[i] ≤ t < last[i] of
sequence owner[i]. What is summed over tokens is summed by piece, in chunks, in float64.
"""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows
from rankwise.ops.tssa.cpu.lanes import address, lanes, load, narrower, store, zeros
from rankwise.ops.tssa.cpu.relay import post
from rankwise.ops.tssa.cpu.rows import GROUP, add_row, add_rows, lasting, project_row, stream
from rankwise.ops.tssa.cpu.streaming import settle, streams
from rankwise.ops.tssa.cpu.turns import all_posted, next_turn


@compiled
@no_type_check
def energies(w, mask, first, last, i, totals):
    """totals[i] = Σ_t w² over piece i."""
    total = totals[i].reshape(-1)  # heads do not matter
    one, row, local = w.dtype.type(1), len(total), np.empty(len(total), w.dtype)
    tokens, added = address(w), address(local)
    total[:] = 0
    for chunk in range(first[i], last[i], CHUNK):
        local[:] = 0
        for t in range(chunk, min(chunk + CHUNK, last[i])):
            if mask.size == 0 or mask[t]:
                add_row(tokens, t * row, row, None, added, 0, lasting(one))
        total += local


@compiled
@no_type_check
def gather(totals, low, high, out):
    """Σ totals[i] over the pieces of a sequence, in float64."""
    carry = np.zeros(out.shape)
    for i in range(low, high):
        carry += totals[i]
    out[:] = carry


@compiled
@no_type_check
def keep(sums, own, out):
    """out[own] = sums."""
    out[own] = sums


@compiled
@no_type_check
def invert(energy, eps, out):
    """1/max(Σ w², eps); what is NaN stays so."""
    one, tiny = energy.dtype.type(1), energy.dtype.type(eps)
    for h in range(len(energy)):
        for k in range(energy.shape[1]):
            out[h, k] = one / (tiny if energy[h, k] < tiny else energy[h, k])


@compiled
@no_type_check
def damp(assigned, mass, eps, out):
    """1/(1 + m), m = Σ Π w²/(Σ Π + eps)."""
    one, tiny = assigned.dtype.type(1), assigned.dtype.type(eps)
    for h in range(len(assigned)):
        for k in range(assigned.shape[1]):
            out[h, k] = one / (one + assigned[h, k] / (mass[h, 0] + tiny))


@compiled
@no_type_check
def assign(w, inverse, temperature, mask, first, last, i, score, membership, totals, masses):
    """Scores and memberships; totals[i] = Σ_t Π w² and masses[i] = Σ_t Π over piece i.

    ``membership`` may be ``score``.
    """
    heads, width = w.shape[1], w.shape[2]
    total, mass, local = totals[i], masses[i], np.empty((heads, width), w.dtype)
    tokens, vector, added, row = address(w), address(inverse), address(local), heads * width
    total[:] = 0
    mass[:] = 0
    for chunk in range(first[i], last[i], CHUNK):
        end = min(chunk + CHUNK, last[i])
        local[:] = 0
        for group in range(chunk, end, GROUP):
            stop, real = min(group + GROUP, end), 0
            for t in range(group, stop):
                if mask.size > 0 and not mask[t]:
                    score[t] = 0
                    continue
                real += 1
                for h in range(heads):
                    score[t, h] = project_row(tokens, t * row + h * width, width, vector, h * width)
            softmax_rows(score, temperature, mask, membership, group, stop)
            for t in range(group, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(heads):
                    pi = membership[t, h]
                    mass[h, 0] += pi
                    if real < GROUP:
                        add_row(tokens, t * row + h * width, width, pi, added, h * width, lasting(pi))
            if real == GROUP:
                for h in range(heads):
                    add_rows(
                        tokens, group * row + h * width, row, width, membership[group, h],
                        membership[group + 1, h], membership[group + 2, h], membership[group + 3, h],
                        added, h * width, lasting(membership[group, h]),
                    )  # fmt: skip
        total += local


@inlined
@no_type_check
def _scale_lines(w, i, k, width, factor, vector, j, out, past, line):
    while k + lanes(line) <= width:
        store(out, i + k, past, factor * stream(w, i + k, line) * load(vector, j + k, line))
        k += lanes(line)
    return k


@inlined
@no_type_check
def scale_row(w, i, width, factor, vector, j, out, past):
    """Factor · w · vector."""
    line = zeros(w)
    k = _scale_lines(w, i, 0, width, factor, vector, j, out, past, line)
    if k < width:
        k = _scale_lines(w, i, k, width, factor, vector, j, out, None, narrower(line))
        _scale_lines(w, i, k, width, factor, vector, j, out, None, narrower(narrower(line)))


@compiled
@no_type_check
def outputs(w, membership, factor, mask, first, last, i, out):
    """Out = -Π w factor, factor = 1/(1 + m), of piece i."""
    heads, width = w.shape[1], w.shape[2]
    tokens, vector, result, row = address(w), address(factor), address(out), heads * width
    past = streams(out)
    for t in range(first[i], last[i]):
        if mask.size > 0 and not mask[t]:
            out[t] = 0
            continue
        for h in range(heads):
            pi = membership[t, h]
            if past:
                scale_row(tokens, t * row + h * width, width, -pi, vector, h * width, result, True)
            else:
                scale_row(tokens, t * row + h * width, width, -pi, vector, h * width, result, None)
    settle()


SQUARED, ASSIGNED = 1, 2
"""Turns a piece has had: its w² are added up; so are its Π w² and Π."""


@compiled
@no_type_check
def forward(
    w, temperature, mask, first, last, owner, energy_eps, mass_eps, totals, more, masses,
    energy, assigned, mass, score, membership, out, board, spot,
):  # fmt: skip
    """Memberships and outputs of all pieces: True; False where one has waited a while for its relatives.

    Call again then: ``spot`` holds what was taken, -1 for nothing. ``totals``, ``more`` (P, H, K) and
    ``masses`` (P, H, 1) are room for what pieces add up; ``energy``, ``assigned`` (N, H, K) and ``mass``
    (N, H, 1), zeros before, become the sums of every sequence.
    """
    heads, width = w.shape[1], w.shape[2]
    sums, n = np.empty((heads, width), w.dtype), np.empty((heads, 1), w.dtype)
    inverse, factor = np.empty((heads, width), w.dtype), np.empty((heads, width), w.dtype)
    inverse_of = factor_of = -1  # sequences
    while True:
        turn, i, low, high = next_turn(board, owner, spot)
        if turn < 0:
            return True
        own, alone = owner[i], high - low == 1

        if turn == 0:
            energies(w, mask, first, last, i, totals)
            post(board, i, SQUARED)
        if turn == SQUARED or alone:
            if inverse_of != own:
                if not all_posted(board, low, high, SQUARED):
                    return False
                gather(totals, low, high, sums)
                invert(sums, energy_eps, inverse)
                inverse_of = own
                if i == low:
                    keep(sums, own, energy)
            assign(w, inverse, temperature, mask, first, last, i, score, membership, more, masses)
            post(board, i, ASSIGNED)
        if turn == ASSIGNED or alone:
            if factor_of != own:
                if not all_posted(board, low, high, ASSIGNED):
                    return False
                gather(more, low, high, sums)
                gather(masses, low, high, n)
                damp(sums, n, mass_eps, factor)
                factor_of = own
                if i == low:
                    keep(sums, own, assigned)
                    keep(n, own, mass)
            outputs(w, membership, factor, mask, first, last, i, out)
        spot[0] = -1
