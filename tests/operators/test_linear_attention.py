"""LinearAttentionMixing: its rank, its normalizer, and causality."""

import pytest
import torch
from tests.operators.linear_time_cases import linear_by_hand
from tests.operators.mixing_laws import check, near, normal, uniform

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


def test_the_rank_is_at_most_the_number_of_features():
    op = LinearAttentionMixing(normal(20, 3), normal(20, 3, seed=1))
    sigma = torch.linalg.svdvals(op.dense())
    assert sigma[2] > 1e-3
    assert sigma[3] < 1e-13 * sigma[0]


def test_positive_features_give_rows_that_sum_to_one():
    for is_causal in (True, False):
        op = LinearAttentionMixing(*features(200, 200, True), is_causal, normalized=True)
        ones = torch.ones(200, 1).double()
        near(op @ ones, ones, torch.tensor(2 * 210 * 2.3e-16))  # F + S roundings, relative to a sum of 1


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


def test_the_future_has_no_part():
    query, key = features(100, 100, True)
    v = normal(100, 2)
    before = LinearAttentionMixing(query, key, is_causal=True, normalized=True) @ v
    key[70:], v[70:] = 1e3, -1e3
    after = LinearAttentionMixing(query, key, is_causal=True, normalized=True) @ v
    assert torch.equal(before[:70], after[:70])
    assert not torch.equal(before[70:], after[70:])
