"""The compiled loops of the gradients of bidirectional TSSA; arrays and turns as in the loops forward."""

from typing import no_type_check

import numpy as np

from rankwise.ops.tssa.cpu.bidirectional_loops import damp, gather, invert
from rankwise.ops.tssa.cpu.compiled import CHUNK, compiled, inlined
from rankwise.ops.tssa.cpu.head_loops import softmax_rows_back
from rankwise.ops.tssa.cpu.lanes import address, lanes, load, narrower, store, zeros
from rankwise.ops.tssa.cpu.relay import post
from rankwise.ops.tssa.cpu.rows import add_row, lasting, project_row, stream
from rankwise.ops.tssa.cpu.streaming import settle, streams
from rankwise.ops.tssa.cpu.turns import all_posted, next_turn


@compiled
@no_type_check
def recall(all_sums, own, out):
    """Out = all_sums[own]."""
    out[:] = all_sums[own]


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
def outputs_back(w, given, membership, factor, mask, first, last, i, direct, totals):
    """direct[t,h] = Σ_k g w factor; totals[i] = Σ_t Π g w factor² over piece i, the gradient of m."""
    total, local = totals[i], np.empty(w.shape[1:], w.dtype)
    total[:] = 0
    for chunk in range(first[i], last[i], CHUNK):
        local[:] = 0
        for t in range(chunk, min(chunk + CHUNK, last[i])):
            if mask.size > 0 and not mask[t]:
                direct[t] = 0
                continue
            for h in range(len(local)):
                direct[t, h] = output_row_back(w[t, h], given[t, h], factor[h], membership[t, h], local[h])
        total += local


@compiled
@no_type_check
def divide(moment, assigned, mass, eps, less):
    """The gradient of m becomes that of Σ Π w²; less[h], its sum over k times m, is minus that of Σ Π."""
    one, tiny = moment.dtype.type(1), moment.dtype.type(eps)
    for h in range(len(moment)):
        each, out = one / (mass[h, 0] + tiny), moment.dtype.type(0)
        for k in range(moment.shape[1]):
            moment[h, k] *= each
            out += moment[h, k] * (assigned[h, k] * each)
        less[h] = out


@compiled
@no_type_check
def slopes(
    w, membership, score, temperature, given, moment, less, mask, first, last, i,
    asked, slope, of_temperature, totals,
):  # fmt: skip
    """Gradients of the scores and, by piece, of the temperature, from what the output asks of Π.

    asked[t,h] becomes Σ_k moment w² - asked + given - less; totals[i] = Σ_t slope w² over piece i.
    """
    heads, width = w.shape[1], w.shape[2]
    total, local = totals[i], np.empty((heads, width), w.dtype)
    tokens, vector, added, row = address(w), address(moment), address(local), heads * width
    total[:] = 0
    of_temperature[i] = 0
    for chunk in range(first[i], last[i], CHUNK):
        stop = min(chunk + CHUNK, last[i])
        local[:] = 0
        for t in range(chunk, stop):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(heads):
                through = project_row(tokens, t * row + h * width, width, vector, h * width)
                asked[t, h] = through - asked[t, h] + given[t, h] - less[h]
        softmax_rows_back(membership, asked, score, temperature, slope, of_temperature[i], chunk, stop)
        for t in range(chunk, stop):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(heads):
                each = slope[t, h]
                add_row(tokens, t * row + h * width, width, each, added, h * width, lasting(each))
        total += local


@no_type_check
def _share(energy, inverse, eps, sums):
    """Σ slope w² becomes the gradient of Σ w², zero where that was held at eps."""
    zero, tiny = energy.dtype.type(0), energy.dtype.type(eps)
    for h in range(len(sums)):
        for k in range(sums.shape[1]):
            x = sums[h, k] * inverse[h, k]
            sums[h, k] = zero if energy[h, k] < tiny else -x * inverse[h, k]


share = compiled(_share, {"contract"})  # nothing reordered: inverse² leaves float32 where channels are tiny


@inlined
@no_type_check
def _lines_back(w, given, i, k, width, factor, moment, inverse, energy, j, pi, asked, out, past, line):
    while k + lanes(line) <= width:
        g = load(moment, j + k, line) * pi + asked * load(inverse, j + k, line) + load(energy, j + k, line)
        x, y = stream(w, i + k, line), stream(given, i + k, line)
        store(out, i + k, past, 2 * x * g - pi * y * load(factor, j + k, line))
        k += lanes(line)
    return k


@inlined
@no_type_check
def token_row_back(w, given, i, width, factor, moment, inverse, energy, j, pi, asked, out, past):
    """One token's gradient from those of its sequence's sums."""
    line = zeros(w)
    k = _lines_back(w, given, i, 0, width, factor, moment, inverse, energy, j, pi, asked, out, past, line)
    if k < width:
        part, one = narrower(line), narrower(narrower(line))
        k = _lines_back(w, given, i, k, width, factor, moment, inverse, energy, j, pi, asked, out, None, part)
        _lines_back(w, given, i, k, width, factor, moment, inverse, energy, j, pi, asked, out, None, one)


@compiled
@no_type_check
def tokens_back(w, given, membership, asked, factor, moment, inverse, energy, mask, first, last, i, out):
    """Gradient of w in piece i: 2w (moment Π + asked · inverse + energy) - Π g factor."""
    heads, width = w.shape[1], w.shape[2]
    tokens, asks, result = address(w), address(given), address(out)
    sums = address(factor), address(moment), address(inverse), address(energy)
    past, row = streams(out), heads * width
    for t in range(first[i], last[i]):
        if mask.size > 0 and not mask[t]:
            out[t] = 0
            continue
        for h in range(heads):
            j, pi, slope = h * width, membership[t, h], asked[t, h]
            if past:
                token_row_back(tokens, asks, t * row + j, width, *sums, j, pi, slope, result, True)
            else:
                token_row_back(tokens, asks, t * row + j, width, *sums, j, pi, slope, result, None)
    settle()


MOMENTS, SLOPES = 1, 2
"""Turns a piece has had: it has added to the gradient of m; to that of Σ w²."""


@compiled
@no_type_check
def backward(
    w, given, membership, score, temperature, given_membership, mask, first, last, owner,
    energy_eps, mass_eps, all_energy, all_assigned, all_mass, totals, more,
    asked, slope, of_temperature, out, board, spot,
):  # fmt: skip
    """Gradients of all pieces: True; False where one has waited a while for its relatives: call again then.

    The sums of sequences, ``totals``, ``more`` and ``spot`` as forward; ``asked``, ``slope`` (M, H) and
    ``of_temperature`` (P, H) are room.
    """
    heads, width = w.shape[1], w.shape[2]
    energy, assigned = np.empty((heads, width), w.dtype), np.empty((heads, width), w.dtype)
    mass = np.empty((heads, 1), w.dtype)
    inverse, factor = np.empty((heads, width), w.dtype), np.empty((heads, width), w.dtype)
    moment, less = np.empty((heads, width), w.dtype), np.empty(heads, w.dtype)
    shared = np.empty((heads, width), w.dtype)
    known = moment_of = shared_of = -1  # sequences
    while True:
        turn, i, low, high = next_turn(board, owner, spot)
        if turn < 0:
            return True
        own, alone = owner[i], high - low == 1

        if known != own:
            recall(all_energy, own, energy)
            recall(all_assigned, own, assigned)
            recall(all_mass, own, mass)
            invert(energy, energy_eps, inverse)
            damp(assigned, mass, mass_eps, factor)
            known = own
        if turn == 0:
            outputs_back(w, given, membership, factor, mask, first, last, i, asked, totals)
            post(board, i, MOMENTS)
        if (turn > 0 or alone) and moment_of != own:
            if not all_posted(board, low, high, MOMENTS):
                return False
            gather(totals, low, high, moment)
            divide(moment, assigned, mass, mass_eps, less)
            moment_of = own
        if turn == MOMENTS or alone:
            slopes(
                w, membership, score, temperature, given_membership, moment, less, mask, first, last, i,
                asked, slope, of_temperature, more,
            )  # fmt: skip
            post(board, i, SLOPES)
        if turn == SLOPES or alone:
            if shared_of != own:
                if not all_posted(board, low, high, SLOPES):
                    return False
                gather(more, low, high, shared)
                share(energy, inverse, energy_eps, shared)
                shared_of = own
            tokens_back(
                w, given, membership, slope, factor, moment, inverse, shared, mask, first, last, i, out
            )  # fmt: skip
        spot[0] = -1
