"""The compiled loops over heads alone: memberships and their gradient, a row of H numbers a token."""

from math import exp
from typing import no_type_check

from rankwise.ops.tssa.cpu.compiled import compiled


@compiled
@no_type_check
def softmax_rows(score, temperature, mask, out, low, high):
    """Π[t,·] = softmax over heads of temperature · score, 1/H without a temperature; zero where masked.

    ``out`` may be ``score``.
    """
    heads = score.shape[1]
    zero, one = score.dtype.type(0), score.dtype.type(1)
    for t in range(low, high):
        if mask.size > 0 and not mask[t]:
            out[t] = zero
            continue
        if temperature.size == 0:
            out[t] = one / heads
            continue
        top = temperature[0] * score[t, 0]
        for h in range(heads):
            out[t, h] = temperature[h] * score[t, h]
            if not out[t, h] <= top:
                top = out[t, h]
        total = zero
        for h in range(heads):
            out[t, h] = exp(out[t, h] - top)
            total += out[t, h]
        for h in range(heads):
            out[t, h] = out[t, h] / total


@compiled
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
