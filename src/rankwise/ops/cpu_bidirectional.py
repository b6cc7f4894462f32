"""Bidirectional token statistics self-attention (TSSA) on a CPU: forward and backward passes.

Formula for token t, per head and channel; w_t is the projection of the token, sums run over all tokens::

    inverse = 1/max(Σ_t w_t², eps)
    s_t = Σ_k w_t² inverse                         score, a sum over the K channels
    Π_t = softmax over heads of temperature · s_t    memberships: weights of the heads, which sum to 1
    m = Σ_t Π_t w_t²/(Σ_t Π_t + eps)               moment: mean of w² weighted by Π
    output_t = -Π_t w_t factor, factor = 1/(1 + m)

d_x is the gradient of the loss with respect to x. In chunk i, arrays with one entry per sequence, such as
inverse (N, H, K), are read at sequence[i]. `cpu_chunks` describes chunks and arrays; here λ = 1 (no decay).
"""

from typing import no_type_check

import numpy as np
from torch import Tensor

from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums, as_dtype
from rankwise.ops.cpu_chunks import (
    ChunkedCall,
    add_chunk,
    array,
    flat,
    project_row,
    softmax_rows,
    softmax_rows_back,
    tensor,
)
from rankwise.ops.cpu_compile import Loop, inlined
from rankwise.ops.reference import MASS_EPS, NORM_EPS


def forward(call: Call, keep_scores: bool) -> tuple[Tensor, Saved]:
    """Return the output, and memberships, scores and sums for the backward pass."""
    work = ChunkedCall(call)
    w, dtype, tokens, chunks = work.w, work.dtype, work.tokens, work.chunks
    membership = np.empty(w.shape[:2], w.dtype)
    score = np.empty_like(membership) if keep_scores else membership

    energy = work.total(work.sums(None)[0])
    added, masses = work.empty_sums()
    read = (w, _inverse(energy), work.temperature, *tokens, *chunks)
    work.run(assign, *read, score, membership, added, masses)
    assigned, mass = work.total(added), work.total(masses)
    output = work.new()
    work.run(outputs, w, membership, _factor(assigned, mass), tokens[0], *chunks, flat(output, dtype))
    sums = work.narrow(energy, assigned, mass)
    return as_dtype(output, call.w.dtype), Saved(work.per_token(membership), work.per_token(score), sums)


def backward(call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Return the gradients of w and of the temperature."""
    work = ChunkedCall(call)
    w, dtype, tokens, chunks = work.w, work.dtype, work.tokens, work.chunks
    membership, score, d_output, given = (flat(x, dtype) for x in (*saved[:2], *cotangents[:2]))
    energy, assigned, mass = (array(part, dtype) for part in saved.sums)
    inverse, factor = _inverse(energy), _factor(assigned, mass[..., None])
    d_membership, d_score = np.empty_like(membership), np.empty_like(membership)
    added, unused = work.empty_sums()  # `add_chunk` also writes sums of d_score, which are not used
    d_temperature, dw = np.empty(unused.shape[:2]), work.new()

    work.run(outputs_back, w, d_output, membership, factor, tokens[0], *chunks, d_membership, added)
    with np.errstate(all="ignore"):  # infinite sums make ∞ − ∞ = NaN, about which numpy would warn
        each = 1 / (mass[..., None] + w.dtype.type(MASS_EPS))
        d_moment = work.total(added) * each
        d_mass = (d_moment * (assigned * each)).sum(-1)
    read = (w, membership, score, work.temperature, given, d_moment, d_mass, *tokens, *chunks)
    work.run(scores_back, *read, d_membership, d_score, d_temperature, added, unused)
    with np.errstate(all="ignore"):
        d_energy = -(work.total(added) * inverse) * inverse  # inverse² would overflow float32
    d_energy[energy < NORM_EPS**2] = 0
    known = (factor, d_moment, inverse, d_energy, tokens[0], *chunks)
    work.run(tokens_back, w, d_output, membership, d_score, *known, flat(dw, dtype))
    empty = [saved.score.new_empty(0) for _ in range(4)]
    tau = tensor(d_temperature.sum(0), dtype)
    return Gradients(as_dtype(dw, call.w.dtype), tau, empty[0], Sums(*empty[1:]))


def _inverse(energy: np.ndarray) -> np.ndarray:
    """Return inverse = 1/max(energy, eps), where energy is Σ w² over the tokens; NaN stays NaN."""
    return 1 / np.maximum(energy, energy.dtype.type(NORM_EPS**2))


def _factor(assigned: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return 1/(1 + m), where m = assigned/(mass + eps) is the mean of w² weighted by memberships."""
    with np.errstate(all="ignore"):
        return 1 / (1 + assigned / (mass + mass.dtype.type(MASS_EPS)))


@Loop
@no_type_check
def assign(
    w, inverse, temperature, mask, power, rate, first, last, sequence, score, membership, added, masses,
    low, high,
):  # fmt: skip
    """Write the scores and memberships Π of the tokens, and the sums of Π w² and Π over each chunk."""
    for i in range(low, high):
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                score[t] = 0
                continue
            for h in range(w.shape[1]):
                score[t, h] = project_row(w[t, h], inverse[sequence[i], h])
        softmax_rows(score, temperature, mask, membership, first[i], last[i])
        add_chunk(w, membership, mask, power, rate, first[i], last[i], added[i], masses[i])


@Loop
@no_type_check
def outputs(w, membership, factor, mask, first, last, sequence, out, low, high):
    """Write the output -Π w factor of each token (Π: membership, w: projection); 0 at padding."""
    for i in range(low, high):
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            for h in range(w.shape[1]):
                pi, q = membership[t, h], factor[sequence[i], h]
                for k in range(w.shape[2]):
                    out[t, h, k] = -pi * w[t, h, k] * q[k]


@inlined
@no_type_check
def output_row_back(row, d_output, factor, membership, sums):
    """Return minus d_Π through one token's output; add the token's part of d_m to `sums`."""
    out = row.dtype.type(0)
    for k in range(len(row)):
        x = d_output[k] * row[k] * factor[k]
        out += x
        sums[k] += membership * (x * factor[k])
    return out


@Loop
@no_type_check
def outputs_back(w, d_output, membership, factor, mask, first, last, sequence, direct, added, low, high):
    """Write minus d_Π through the outputs to `direct`, and each chunk's part of d_m to `added`."""
    for i in range(low, high):
        added[i] = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                direct[t] = 0
                continue
            for h in range(w.shape[1]):
                q, pi = factor[sequence[i], h], membership[t, h]
                direct[t, h] = output_row_back(w[t, h], d_output[t, h], q, pi, added[i, h])


@Loop
@no_type_check
def scores_back(
    w, membership, score, temperature, given, d_moment, d_mass, mask, power, rate, first, last, sequence,
    d_membership, d_score, d_temperature, added, unused, low, high,
):  # fmt: skip
    """Write the gradients of scores and, per chunk, of temperatures, and the sums Σ_t d_score w².

    On input, d_membership contains minus the gradient of memberships through the outputs. It is overwritten
    by their whole gradient. `given` is the gradient of memberships from the loss directly.
    """
    for i in range(low, high):
        n = sequence[i]
        d_temperature[i] = 0
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                continue
            for h in range(w.shape[1]):
                through = project_row(w[t, h], d_moment[n, h])
                d_membership[t, h] = through - d_membership[t, h] + given[t, h] - d_mass[n, h]
        softmax_rows_back(
            membership, d_membership, score, temperature, d_score, d_temperature[i], first[i], last[i]
        )
        add_chunk(w, d_score, mask, power, rate, first[i], last[i], added[i], unused[i])


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
def tokens_back(
    w, d_output, membership, d_score, factor, d_moment, inverse, d_energy, mask, first, last, sequence, out,
    low, high,
):  # fmt: skip
    """Write the gradient of w: 2w (d_moment Π + d_score inverse + d_energy) - Π d_output factor.

    Π is the membership, and d_x the gradient of the loss with respect to x.
    """
    for i in range(low, high):
        n = sequence[i]
        for t in range(first[i], last[i]):
            if mask.size > 0 and not mask[t]:
                out[t] = 0
                continue
            for h in range(w.shape[1]):
                token_row_back(
                    w[t, h], d_output[t, h], factor[n, h], d_moment[n, h], inverse[n, h], d_energy[n, h],
                    membership[t, h], d_score[t, h], out[t, h],
                )  # fmt: skip
