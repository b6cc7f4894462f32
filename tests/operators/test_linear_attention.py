"""LinearAttentionMixing: the laws of every operator, its normaliser, and its memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_matrix,
    check_products,
    near,
    normal,
    odd_sizes,
    products,
    uniform,
)

from rankwise.operators.linear_attention import LinearAttentionMixing

modes = pytest.mark.parametrize(
    ("is_causal", "normalized"), [(True, True), (True, False), (False, True), (False, False)]
)


def by_hand(query, key, is_causal, normalized, eps=0.0):
    """Row by row, from the definition."""
    *lead, tokens, _ = query.shape
    sources = key.shape[-2]
    query, key = query.double(), key.double()
    matrix = torch.zeros(*lead, tokens, sources, dtype=torch.float64)
    for t in range(tokens):
        seen = min(t + 1, sources) if is_causal else sources
        matrix[..., t, :seen] = (query[..., t, None, :] * key[..., :seen, :]).sum(-1)
    if normalized:
        for t in range(tokens):
            matrix[..., t, :] = matrix[..., t, :] / (matrix[..., t, :].sum(-1, keepdim=True) + eps)
    return matrix


def terms(query, key):
    """Roundings behind one entry: a product of F, a sum of S, the same for the row sum, the division."""
    return 2 * (query.shape[-1] + key.shape[-2]) + 2


def check(query, key, is_causal, normalized, dtype=torch.float64):
    op = LinearAttentionMixing(query, key, is_causal, normalized)
    exact = by_hand(query, key, is_causal, normalized)
    # the terms: for positive features the entries themselves, else the products of magnitudes
    size = exact if normalized else by_hand(query.abs(), key.abs(), is_causal, normalized)
    seen = torch.ones(exact.shape[-2:], dtype=torch.bool)
    rounding = 2 * terms(query, key) * torch.finfo(dtype).eps * size
    check_matrix(op, exact, rounding, seen.tril() if is_causal else seen)
    check_products(op, exact, products(size, terms(query, key), dtype))


def features(tokens, sources, normalized, *lead, width=3, seed=0, dtype=torch.float64):
    """Positive if rows are divided by their sum, otherwise of any sign."""
    draw = uniform if normalized else normal
    return draw(*lead, tokens, width, seed=seed, dtype=dtype), draw(
        *lead, sources, width, seed=seed + 1, dtype=dtype
    )


@modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", odd_sizes())
def test_it_is_the_matrix_formed_by_hand(tokens, dtype, is_causal, normalized):
    check(*features(tokens, tokens, normalized, 2, dtype=dtype), is_causal, normalized, dtype)


@modes
@settings(max_examples=25)
@given(
    tokens=st.integers(1, 9),
    sources=st.integers(1, 9),
    width=st.integers(1, 4),
    lead=st.sampled_from([(), (2, 3)]),
)
def test_any_small_size(is_causal, normalized, tokens, sources, width, lead):
    check(*features(tokens, sources, normalized, *lead, width=width, seed=tokens), is_causal, normalized)


@modes
@pytest.mark.parametrize(("tokens", "sources"), [(70, 130), (130, 70)])
def test_more_rows_than_columns_and_fewer(tokens, sources, is_causal, normalized):
    check(*features(tokens, sources, normalized), is_causal, normalized)


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
    exact = by_hand(query, key, True, True, eps=0.5)
    torch.testing.assert_close(op.dense(), exact, rtol=1e-13, atol=0)
    torch.testing.assert_close(op @ exact.mT, exact @ exact.mT, rtol=1e-13, atol=0)
    torch.testing.assert_close(op[...].dense(), exact, rtol=1e-13, atol=0)


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
