"""GatedDeltaMixing: extreme decays, chunks, and the operators that it contains."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.linear_time_cases import gated_delta_by_hand
from tests.operators.mixing_laws import check, near, normal, uniform

from rankwise.operators import GatedDeltaMixing
from rankwise.operators.gated_delta import delta_scan, delta_scan_transposed

EXTREME = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30, -math.inf]


def inputs(tokens, heads=(2, 4), width=3, seed=0, feature=False):
    """Query, keys of norm 1, β in (0, 2) and a decay for each token, or for each token and feature."""
    query, key = (normal(*heads, tokens, width, seed=seed + i) for i in range(2))
    beta = 2 * uniform(*heads, tokens, seed=seed + 2)
    decay = -normal(*heads, tokens, *([width] if feature else []), seed=seed + 3).abs()
    return query, torch.nn.functional.normalize(key, dim=-1), beta, decay


@pytest.mark.parametrize("feature", [False, True])
@settings(max_examples=10)
@given(tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_decays_of_every_size(feature, tokens, seed):
    query, key, beta, decay = inputs(tokens, (2,), seed=seed, feature=feature)
    picks = torch.randint(len(EXTREME), decay.shape, generator=torch.Generator().manual_seed(seed))
    decay = torch.tensor(EXTREME, dtype=torch.float64)[picks]
    check(GatedDeltaMixing(query, key, beta, decay), gated_delta_by_hand)


@pytest.mark.parametrize("feature", [False, True])
def test_the_size_of_a_chunk_changes_rounding_alone(feature):
    query, key, beta, decay = inputs(90, (2,), feature=feature)
    given = query, key, beta, decay if feature else decay[..., None]
    values, slack = (
        normal(2, 90, 3, seed=9),
        gated_delta_by_hand(GatedDeltaMixing(query, key, beta, decay)).products,
    )
    for run, allowed in zip((delta_scan, delta_scan_transposed), slack, strict=True):
        whole = run(*given, values, chunk=90)
        for chunk in (1, 7, 64, 89):
            near(run(*given, values, chunk=chunk), whole, allowed(values))
