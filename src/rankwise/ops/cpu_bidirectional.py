"""The compiled loops of bidirectional TSSA; arrays and pieces as in `sum_loops`, where nothing decays.

What belongs to a sequence n, such as inverse[n] (H, K), is read at n = owner[i] for piece i.
"""

from typing import no_type_check

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums, as_dtype
from rankwise.ops.cpu_chunks import (
    FlatCall,
    add_rows,
    array,
    flat,
    fold,
    new,
    project_row,
    softmax_rows,
    softmax_rows_back,
    sum_squares,
    tensor,
)
from rankwise.ops.cpu_compile import CHUNK, Loop, inlined
from rankwise.ops.reference import MASS_EPS, NORM_EPS


@Loop
@no_type_check
def assign(
    w, inverse, temperature, mask, power, rate, first, last, owner, score, membership, totals, masses,
    low, high,
):  # fmt: skip
    """Scores Σ_k w² inverse and memberships, which may lie over them; totals[i] = Σ Π w², masses[i] = Σ Π."""
    local = np.zeros(w.shape[1:], w.dtype)
    for i in range(low, high):
        totals[i] = 0
        masses[i] = 0
        for c in range(first[i], last[i], CHUNK):
            stop = min(c + CHUNK, last[i])
            for t in range(c, stop):
                if mask.size > 0 and not mask[t]:
                    score[t] = 0
                    continue
                for h in range(w.shape[1]):
                    score[t, h] = project_row(w[t, h], inverse[owner[i], h])
            softmax_rows(score, temperature, mask, membership, c, stop)
            add_rows(w, membership, mask, power, rate, c, stop, local, masses[i])
            fold(totals[i], local, rate, 1)


@Loop
@no_type_check
def outputs(w, membership, factor, mask, first, last, owner, out, low, high):
    """Out = -Π w factor, factor = 1/(1 + m)."""
    for i in range(low, high):
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            for h in range(w.shape[1]):
                pi, q = membership[t, h], factor[owner[i], h]
                for k in range(w.shape[2]):
                    out[t, h, k] = -pi * w[t, h, k] * q[k]


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


@Loop
@no_type_check
def outputs_back(w, given, membership, factor, mask, rate, first, last, owner, direct, totals, low, high):
    """direct[t,h] = Σ_k g w factor; totals[i] = Σ_t Π g w factor² over piece i, the gradient of m."""
    local = np.zeros(w.shape[1:], w.dtype)
    for i in range(low, high):
        totals[i] = 0
        for c in range(first[i], last[i], CHUNK):
            for t in range(c, min(c + CHUNK, last[i])):
                if mask.size > 0 and not mask[t]:
                    direct[t] = 0
                    continue
                for h in range(w.shape[1]):
                    q, pi = factor[owner[i], h], membership[t, h]
                    direct[t, h] = output_row_back(w[t, h], given[t, h], q, pi, local[h])
            fold(totals[i], local, rate, 1)


@Loop
@no_type_check
def slopes(
    w, membership, score, temperature, given, moment, less, mask, power, rate, first, last, owner,
    asked, slope, of_temperature, totals, unread, low, high,
):  # fmt: skip
    """Gradients of the scores and, by piece, of the temperature, from what the output asks of Π.

    asked[t,h] becomes Σ_k moment w² - asked + given - less; totals[i] = Σ_t slope w² over piece i.
    """
    local = np.zeros(w.shape[1:], w.dtype)
    for i in range(low, high):
        totals[i] = 0
        of_temperature[i] = 0
        for c in range(first[i], last[i], CHUNK):
            stop = min(c + CHUNK, last[i])
            for t in range(c, stop):
                if mask.size > 0 and not mask[t]:
                    continue
                for h in range(w.shape[1]):
                    through = project_row(w[t, h], moment[owner[i], h])
                    asked[t, h] = through - asked[t, h] + given[t, h] - less[owner[i], h]
            softmax_rows_back(membership, asked, score, temperature, slope, of_temperature[i], c, stop)
            add_rows(w, slope, mask, power, rate, c, stop, local, unread[i])
            fold(totals[i], local, rate, 1)


@inlined
@no_type_check
def token_row_back(row, given, factor, moment, inverse, energy, pi, asked, out):
    """One token's gradient from those of its sequence's sums."""
    two = row.dtype.type(2)
    for k in range(len(row)):
        g = moment[k] * pi + asked * inverse[k] + energy[k]
        out[k] = two * row[k] * g - pi * given[k] * factor[k]


@Loop
@no_type_check
def tokens_back(
    w, given, membership, asked, factor, moment, inverse, energy, mask, first, last, owner, out, low, high
):  # fmt: skip
    """Gradient of w: 2w (moment Π + asked · inverse + energy) - Π g factor."""
    for i in range(low, high):
        n = owner[i]
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            for h in range(w.shape[1]):
                token_row_back(
                    w[t, h], given[t, h], factor[n, h], moment[n, h], inverse[n, h], energy[n, h],
                    membership[t, h], asked[t, h], out[t, h],
                )  # fmt: skip


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Output, memberships, scores and the sums over all tokens; beside them, memory O(1) in T.

    That is four sums for every sequence, and two float64 ones for every piece, of which it has one at least.
    Half-precision w and the output of it are there in float32 as well, and w out of order in order.
    """
    work, shape = FlatCall(call), call.w.shape
    x, dtype, tokens, runs = work.x, work.dtype, work.tokens, work.runs
    score, membership = work.memberships(keep_scores)
    output, (totals, masses) = new(shape, dtype), work.room()

    work.run(sum_squares, x, flat(None, dtype), *tokens, *runs[:2], totals, masses)
    energy = _gathered(work, totals)
    read = (x, _inverse(energy), work.temperature, *tokens, *runs)
    work.run(assign, *read, score, membership, totals, masses)
    assigned, mass = _gathered(work, totals), _gathered(work, masses)
    work.run(outputs, x, membership, _factor(assigned, mass), tokens[0], *runs, flat(output, dtype))
    pi, scores = (torch.from_numpy(part.reshape(shape[:3])) for part in (membership, score))
    sums = Sums(*(tensor(part, dtype) for part in (energy, assigned, mass[..., 0])))
    return as_dtype(output, call.w.dtype), Saved(pi, scores, sums)


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Gradients of w and of the temperature; memory O(B T H) beside them."""
    membership, score, sums = saved
    given, given_membership = cotangents[:2]
    work = FlatCall(call)
    x, dtype, tokens, runs = work.x, work.dtype, work.tokens, work.runs
    go, pi, scores, dpi = (flat(part, dtype) for part in (given, membership, score, given_membership))
    energy, assigned, mass = (array(part, dtype) for part in sums)
    inverse, factor = _inverse(energy), _factor(assigned, mass[..., None])
    totals, masses = work.room()
    asked, slope, of_temperature = np.empty_like(pi), np.empty_like(pi), np.empty((len(totals), pi.shape[1]))
    out = new(call.w.shape, dtype)

    work.run(outputs_back, x, go, pi, factor, *tokens[::2], *runs, asked, totals)
    with np.errstate(all="ignore"):
        each = 1 / (mass[..., None] + x.dtype.type(MASS_EPS))
        moment = _gathered(work, totals) * each
        less = (moment * (assigned * each)).sum(-1)
    read = (x, pi, scores, work.temperature, dpi, moment, less, *tokens, *runs)
    work.run(slopes, *read, asked, slope, of_temperature, totals, masses)
    with np.errstate(all="ignore"):
        shared = -(_gathered(work, totals) * inverse) * inverse  # inverse² would leave float32
    shared[energy < NORM_EPS**2] = 0
    known = (factor, moment, inverse, shared, tokens[0], *runs)
    work.run(tokens_back, x, go, pi, slope, *known, flat(out, dtype))
    empty = [membership.new_empty(0) for _ in range(4)]
    return Gradients(
        as_dtype(out, call.w.dtype), tensor(of_temperature.sum(0), dtype), empty[0], Sums(*empty[1:])
    )


def _gathered(work: FlatCall, totals: np.ndarray) -> np.ndarray:
    """Σ over the pieces of every sequence, (N, H, …), in the dtype of the sums."""
    start = np.zeros((work.call.sequences, *totals.shape[1:]))
    return work.carry(totals, start)[1].astype(work.x.dtype)


def _inverse(energy: np.ndarray) -> np.ndarray:
    """1/max(Σ w², eps); what is NaN stays so."""
    return 1 / np.maximum(energy, energy.dtype.type(NORM_EPS**2))


def _factor(assigned: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """1/(1 + m), m = Σ Π w²/(Σ Π + eps)."""
    with np.errstate(all="ignore"):
        return 1 / (1 + assigned / (mass + mass.dtype.type(MASS_EPS)))
