"""GatedDeltaMixing: extreme decays, chunks, and the operators that it contains."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.linear_time_cases import gated_delta_by_hand
from tests.operators.mixing_laws import check, near, normal, uniform

from rankwise.operators import GatedDeltaMixing, LinearAttentionMixing, SemiseparableMixing
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


def test_a_small_beta_is_linear_attention_with_decay():
    """To first order in β the state is not corrected: M → (Q Kᵀ ⊙ decay) diag(β)."""
    query, key, _, decay = inputs(50, (2,))
    beta = torch.full((2, 50), 1e-9, dtype=torch.float64)
    gated = GatedDeltaMixing(query, key, beta, decay).dense() / 1e-9
    # each entry is corrected by at most T terms of size β ‖q‖
    slack = torch.tensor(50 * 1e-9 * float(query.norm(dim=-1).max()))
    near(gated, SemiseparableMixing(query, key, decay).dense(), slack)
    plain = GatedDeltaMixing(query, key, beta).dense() / 1e-9
    near(plain, LinearAttentionMixing(query, key, is_causal=True).dense(), slack)


def test_beta_of_one_overwrites_the_value_of_a_key():
    """With β = 1 and one key throughout, each token reads the last value alone."""
    key = torch.ones(1, 5, 1, dtype=torch.float64)
    op = GatedDeltaMixing(key, key, torch.ones(1, 5, dtype=torch.float64))
    assert torch.equal(op.dense()[0], torch.eye(5, dtype=torch.float64))


def test_a_decay_of_one_feature_is_that_feature_decayed():
    query, key, beta, decay = inputs(40, (2,), feature=True)
    same = decay[..., :1].expand_as(decay)
    by_feature, by_token = (GatedDeltaMixing(query, key, beta, d) for d in (same, decay[..., 0]))
    near(by_feature.dense(), by_token.dense(), 2 * gated_delta_by_hand(by_token).slack)


@pytest.mark.parametrize("feature", [False, True])
def test_blocks_below_the_diagonal_have_rank_at_most_k(feature):
    query, key, beta, decay = inputs(40, (), width=2, feature=feature)
    op = GatedDeltaMixing(query, key, beta, decay / 20)
    sigma = torch.linalg.svdvals(op.dense()[20:, :20])
    assert sigma[1] > 1e-6
    assert sigma[2] < 1e-14 * max(1.0, sigma[0].item())
    assert torch.linalg.svdvals(op.dense())[10] > 1e-3
