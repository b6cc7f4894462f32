"""The compiled loops over heads alone: memberships and their gradient, a row of H numbers a token."""

from math import exp
from typing import no_type_check

import numpy as np

from rankwise.ops.token_statistics.cpu.compiled import inlined


@no_type_check
def _exp32(x):
    """e^x in float32 for x ≤ 0 to 2 ulp, 0 below e^-87: 2^n e^r with |r| ≤ ln 2 / 2.

    Unlike `exp`, a call, it leaves a loop that can be vectorised.
    """
    real = np.float32
    n = np.floor(x * real(1.4426950408889634) + real(0.5))
    r = (x - n * real(0.693359375)) - n * real(-2.12194440054690583e-4)  # ln 2 in two parts, the first exact
    y = real(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2):
        y = y * r + real(factor)
    y = y * (r * r) + r + real(1)
    two_to_n = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return real(0) if x < real(-87) else y * two_to_n


exp32 = inlined(_exp32, {"contract"})  # nothing reordered: the two parts would be one again


@inlined
@no_type_check
def exponentials(row):
    """e^x of every number of a row, none above 0, in place."""
    if row.itemsize == 4:
        for i in range(len(row)):
            row[i] = exp32(row[i])
    else:
        for i in range(len(row)):
            row[i] = exp(row[i])


@inlined
@no_type_check
def softmax_rows(score, temperature, mask, out, low, high):
    """Π[t,·] = softmax over heads of temperature · score, 1/H without a temperature; zero where masked.

    ``out`` may be ``score``.
    """
    heads = score.shape[1]
    zero, one = score.dtype.type(0), score.dtype.type(1)
    if temperature.size == 0:
        out[low:high] = one / heads
    else:
        for t in range(low, high):
            top = temperature[0] * score[t, 0]
            for h in range(heads):
                out[t, h] = temperature[h] * score[t, h]
                if not out[t, h] <= top:
                    top = out[t, h]
            for h in range(heads):
                out[t, h] -= top
        exponentials(out[low:high].reshape(-1))
        for t in range(low, high):
            total = zero
            for h in range(heads):
                total += out[t, h]
            each = one / total
            for h in range(heads):
                out[t, h] *= each
    if mask.size > 0:
        for t in range(low, high):
            if not mask[t]:
                out[t] = zero


@inlined
@no_type_check
def softmax_rows_back(membership, given, score, temperature, out, of_temperature, low, high):
    """Gradient of the scores from that of Π: temperature · Π (g - Σ_h Π g); adds up that of the temperature.

    Without a temperature Π is no function of them: zeros.
    """
    heads = membership.shape[1]
    for t in range(low, high):
        if temperature.size == 0:
            out[t] = 0
            continue
        mean = membership.dtype.type(0)
        for h in range(heads):
            mean += membership[t, h] * given[t, h]
        for h in range(heads):
            slope = membership[t, h] * (given[t, h] - mean)
            of_temperature[h] += slope * score[t, h]
            out[t, h] = slope * temperature[h]
