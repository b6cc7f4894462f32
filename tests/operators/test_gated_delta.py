"""GatedDeltaMixing: the laws of every operator against the rule run token by token, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_matrix,
    check_products,
    largest_tensor,
    near,
    normal,
    odd_sizes,
    products,
    uniform,
)

from rankwise.operators import GatedDeltaMixing, LinearAttentionMixing, SemiseparableMixing
from rankwise.operators.gated_delta import delta_scan, delta_scan_transposed

EXTREME = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30, -math.inf]


def by_hand(query, key, beta, log_decay=None):
    """The state token by token, as its definition has it, with the unit vectors as values."""
    query, key, beta = query.double(), key.double(), beta.double()
    decay = torch.ones_like(beta) if log_decay is None else log_decay.double().exp()
    decay = decay[..., None] if decay.ndim == beta.ndim else decay
    tokens, width = query.shape[-2:]
    unit, one = torch.eye(tokens, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    state, rows = query.new_zeros(*query.shape[:-2], width, tokens), []
    for t in range(tokens):
        k, b = key[..., t, :, None], beta[..., t, None, None]
        state = (one - b * k @ k.mT) @ (decay[..., t, :, None] * state) + b * k * unit[t]
        rows.append((query[..., t, None, :] @ state)[..., 0, :])
    return torch.stack(rows, dim=-2)


def size_and_terms(query):
    """Size to which rounding errors of one entry are relative, and their number.

    With ‖k‖ = 1, β in [0, 2] and a ≤ 1 no step makes a state longer, and one source leaves a state of norm at
    most 2: an entry is at most 2 ‖q_t‖, and each of T steps adds an error of (K + 4) u of that, which no
    later step enlarges.
    """
    tokens, width = query.shape[-2:]
    size = query.double().norm(dim=-1, keepdim=True).expand(*query.shape[:-1], tokens)
    return 2 * size, tokens + width + 4


def check(query, key, beta, log_decay=None, dtype=torch.float64):
    op, exact = GatedDeltaMixing(query, key, beta, log_decay), by_hand(query, key, beta, log_decay)
    size, terms = size_and_terms(query)
    slack = 2 * terms * torch.finfo(dtype).eps * size
    check_matrix(op, exact, slack, torch.ones(exact.shape[-2:], dtype=torch.bool).tril())
    check_products(op, exact, products(size, terms, dtype))


def inputs(tokens, heads=(2, 4), width=3, seed=0, dtype=torch.float64, feature=False):
    """Query, keys of norm 1, β in (0, 2) and a decay for each token, or for each token and feature."""
    query, key = (normal(*heads, tokens, width, seed=seed + i) for i in range(2))
    beta = 2 * uniform(*heads, tokens, seed=seed + 2)
    decay = -normal(*heads, tokens, *([width] if feature else []), seed=seed + 3).abs()
    key = torch.nn.functional.normalize(key, dim=-1)
    return [tensor.to(dtype) for tensor in (query, key, beta, decay)]


@pytest.mark.parametrize("feature", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", odd_sizes())
def test_it_is_the_rule_run_token_by_token(tokens, dtype, feature):
    check(*inputs(tokens, dtype=dtype, feature=feature), dtype)


@pytest.mark.parametrize("feature", [False, True])
@pytest.mark.parametrize("heads", [(), (3,), (2, 1, 2)])
@settings(max_examples=5)
@given(tokens=st.integers(1, 9), width=st.integers(1, 4), seed=st.integers(0, 9))
def test_any_small_size(heads, feature, tokens, width, seed):
    check(*inputs(tokens, heads, width, seed, feature=feature))


def test_without_decay_it_is_the_delta_rule():
    check(*inputs(70)[:3])


@pytest.mark.parametrize("feature", [False, True])
@settings(max_examples=10)
@given(tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_decays_of_every_size(feature, tokens, seed):
    query, key, beta, decay = inputs(tokens, (2,), seed=seed, feature=feature)
    picks = torch.randint(len(EXTREME), decay.shape, generator=torch.Generator().manual_seed(seed))
    check(query, key, beta, torch.tensor(EXTREME, dtype=torch.float64)[picks])


@pytest.mark.parametrize("feature", [False, True])
def test_the_size_of_a_chunk_changes_rounding_alone(feature):
    query, key, beta, decay = inputs(90, (2,), feature=feature)
    given = query, key, beta, decay if feature else decay[..., None]
    values, size = normal(2, 90, 3, seed=9), size_and_terms(query)
    slack = products(*size, torch.float64)
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
    size, terms = size_and_terms(query)
    near(by_feature.dense(), by_token.dense(), 4 * terms * torch.finfo(torch.float64).eps * size)


@pytest.mark.parametrize("feature", [False, True])
def test_gradients_through_several_chunks(feature):
    """Too many inputs for differences: against autograd through the rule run token by token."""
    given = [tensor.requires_grad_() for tensor in inputs(70, (), feature=feature)]
    v, weight = normal(70, 2), normal(70, 2, seed=1)
    op, slow = GatedDeltaMixing(*given), by_hand(*given)
    for fast, wanted in ((op @ v, slow @ v), (op.apply_transposed(v), slow.mT @ v)):
        ours = torch.autograd.grad((fast * weight).sum(), given, retain_graph=True)
        theirs = torch.autograd.grad((wanted * weight).sum(), given, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            # sums of some 70² terms of size 1 in another order: 1e4 roundings of 1e-16
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("feature", "block"), [(False, 64 * 64), (True, 16 * 16 * 4)])
def test_no_matrix_is_formed(feature, block):
    tokens, width = 300, 4
    op, v = GatedDeltaMixing(*inputs(tokens, (2,), width, feature=feature)), normal(2, tokens, 3)
    for work in (lambda: op @ v, lambda: op.mT @ v):
        assert largest_tensor(work) <= 2 * max(tokens * width, block)  # two heads
    assert largest_tensor(op.dense) >= 2 * tokens * tokens


@pytest.mark.parametrize("feature", [False, True])
def test_blocks_below_the_diagonal_have_rank_at_most_k(feature):
    query, key, beta, decay = inputs(40, (), width=2, feature=feature)
    op = GatedDeltaMixing(query, key, beta, decay / 20)
    sigma = torch.linalg.svdvals(op.dense()[20:, :20])
    assert sigma[1] > 1e-6
    assert sigma[2] < 1e-14 * max(1.0, sigma[0].item())
    assert torch.linalg.svdvals(op.dense())[10] > 1e-3
