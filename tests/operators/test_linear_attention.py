"""LinearAttentionMixing: its rank, its normalizer, and causality."""

import pytest
import torch
from tests.operators.linear_time_cases import linear_by_hand
from tests.operators.mixing_laws import check, normal, uniform

from rankwise.operators.linear_attention import LinearAttentionMixing


def features(tokens, sources, normalized, width=3):
    """Positive if rows are divided by their sum, otherwise of any sign."""
    draw = uniform if normalized else normal
    return draw(tokens, width), draw(sources, width, seed=1)


@pytest.mark.parametrize(
    ("is_causal", "normalized"), [(True, True), (True, False), (False, True), (False, False)]
)
@pytest.mark.parametrize(("tokens", "sources"), [(70, 130), (130, 70)])
def test_more_rows_than_columns_and_fewer(tokens, sources, is_causal, normalized):
    query, key = features(tokens, sources, normalized)
    check(LinearAttentionMixing(query, key, is_causal, normalized), linear_by_hand)


def test_eps_is_added_to_the_row_sums():
    query, key = features(6, 6, True)
    op = LinearAttentionMixing(query, key, is_causal=True, normalized=True, eps=0.5)
    check(op, linear_by_hand)
    check(op[...], linear_by_hand)
    assert (op.dense().sum(-1) < 1).all()


def test_a_row_without_features_is_zero_and_has_gradients():
    query, key = features(5, 5, True)
    query[2] = 0
    query.requires_grad_()
    op = LinearAttentionMixing(query, key, normalized=True)
    assert op.dense()[2].tolist() == [0.0] * 5
    applied = op @ torch.ones(5, 1).double()
    assert applied[2] == 0
    applied.sum().backward()
    assert query.grad.isfinite().all()
