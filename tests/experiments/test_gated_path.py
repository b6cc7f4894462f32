"""The whole path through a gated layer is one operator, whose output is the layer's own."""

import pytest
import torch
from experiments.rank.gated_path import gated_paths
from experiments.zoo.state_space import STATE_SPACE, tiny

import rankwise as rw

EPS32 = torch.finfo(torch.float32).eps


def batch(padded):
    torch.manual_seed(1)
    given = {"input_ids": torch.randint(5, 60, (2, 12))}
    if padded:
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :4] = mask[1, 9:] = 0
        given["attention_mask"] = mask
    return given


@torch.no_grad()
def paths(model, given):
    with rw.tracing.record_calls(model, lambda *_: True) as calls, rw.capture(model, values=True) as trace:
        model(**given)
    found = gated_paths(trace, calls)
    assert found
    return found


@pytest.mark.parametrize("name", list(STATE_SPACE))
def test_the_whole_path_is_one_operator(name):
    """Short convolution, activation, scan, D-term and gate in one matrix, before norm and projection."""
    has_path, model = STATE_SPACE[name].has_path, tiny(name)
    for _, call, path in (*paths(model, batch(padded=False)), *paths(model, batch(padded=True))):
        assert (path is not None) == has_path
        if not has_path:
            continue
        for operator in (path.operator, rw.operators.DenseMixing(path.operator.dense(torch.float64))):
            with torch.no_grad():
                got = path.apply_output((operator @ path.values.double() + path.offset).float())
            # Two sums of ≤ 12·4 terms, then of ≤ 64 in the projection, 4·(48 + 64) roundings of its size, and
            # once more for the convolution; its transform rounds relative to the largest token.
            limit = 1000 * EPS32 * max(1.0, float(call.output.abs().max()))
            assert (got - call.output).abs().max() <= limit
