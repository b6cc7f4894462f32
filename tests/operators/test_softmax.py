"""Softmax attention agrees with torch's own, entry by entry, gradients and empty rows included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.mixing_laws import largest_tensor
from tests.operators.operator_cases import MASKS, normal, sizes, softmax_of, tolerance
from torch.nn import functional as F

import rankwise as rw
from rankwise.operators.base import ROW_BLOCK
from rankwise.operators.softmax import MASKED_BELOW

TIGHT = tolerance(torch.float64, 8)


def weights_of_torch(op):
    """Fused attention, applied to the unit vectors, returns its matrix."""
    sources = torch.eye(op.shape[-1], dtype=op.dtype).expand(*op.shape[:-2], -1, -1)
    mask, causal = op.mask, op.is_causal
    if causal and mask is not None:
        seen = torch.ones(op.shape[-2:], dtype=torch.bool).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
        causal = False
    key = op.key.repeat_interleave(op.heads_per_group, -3) if op.heads_per_group > 1 else op.key
    return F.scaled_dot_product_attention(op.query, key, sources, mask, is_causal=causal, scale=op.scale)


@pytest.mark.parametrize("mask", MASKS)
@settings(max_examples=16)
@given(size=sizes, causal=st.booleans(), groups=st.integers(1, 2))
def test_the_matrix_equals_fused_attention(mask, causal, groups, size):
    op = softmax_of(mask, causal, groups)(*size)
    assert (op.dense() - weights_of_torch(op)).abs().max() < TIGHT


def test_grouped_heads_read_the_key_head_of_their_group():
    q, k = normal(2, 6, 4, 3), normal(2, 2, 5, 3)
    op = rw.operators.SoftmaxMixing(q, k)
    for head in range(6):
        alone = rw.operators.SoftmaxMixing(q[:, head], k[:, head // 3])
        assert (op.dense()[:, head] - alone.dense()).abs().max() < TIGHT
        assert (op[:, head].dense() - alone.dense()).abs().max() < TIGHT
    values = normal(2, 2, 5, 7)
    assert (op @ values - op.dense() @ values.repeat_interleave(3, 1)).abs().max() < TIGHT


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "low", [-math.inf, -1e9, -1e4, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, False]
)
def test_whatever_people_mask_with_is_masked(low, causal):
    hidden = torch.rand(4, 4) < 0.5
    hidden[:, 0] = False
    mask = ~hidden if low is False else torch.zeros(4, 4).masked_fill(hidden, low)
    op = rw.operators.SoftmaxMixing(normal(1, 2, 4, 3), normal(1, 2, 4, 3), mask, causal)
    seen = ~hidden & (torch.ones(4, 4, dtype=torch.bool).tril() if causal else torch.tensor(True))
    assert torch.equal(op.support(), seen.expand(1, 2, 4, 4))
    assert (op.dense()[~op.support()] < 1e-300).all()
    assert low is False or low < MASKED_BELOW


def test_extreme_scores_stay_finite():
    op = rw.operators.SoftmaxMixing(1e6 * normal(1, 2, 5, 3), 1e6 * normal(1, 2, 5, 3))
    assert op.dense().isfinite().all()
    assert (op.dense().sum(-1) - 1).abs().max() < TIGHT


def test_nan_is_not_hidden():
    q = normal(1, 1, 3, 2)
    q[0, 0, 1, 0] = math.nan
    matrix = rw.operators.SoftmaxMixing(q, normal(1, 1, 3, 2)).dense()
    assert matrix[0, 0, 1].isnan().all()
    assert matrix[0, 0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=6)
@given(size=sizes, seed=st.integers(0, 99))
def test_dense_is_at_least_as_near_the_truth_as_torch_in_that_precision(dtype, size, seed):
    torch.manual_seed(seed)
    op = softmax_of("bool")(*size).to(dtype)
    truth = op.dense(torch.float64)
    ours = (op.dense() - truth).abs().max()
    theirs = (weights_of_torch(op).double() - truth).abs().max()
    # One float32 rounding band on top of twice the error of torch's own kernel.
    assert ours <= 2 * theirs + tolerance(torch.float32, 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "bias"])
def test_gradients_flow_to_queries_and_keys(mask, causal):
    made = softmax_of(mask, causal)(1, 2, 3, 3, 2)
    q, k = made.query.requires_grad_(), made.key.requires_grad_()
    values, rows = normal(1, 2, 3, 2), normal(1, 2, 3, 2)

    def everything(q, k):
        op = rw.operators.SoftmaxMixing(q, k, made.mask, causal)
        return op.dense(), op @ values, op.mT @ rows, op[0, 1].dense()

    assert torch.autograd.gradcheck(everything, (q, k))


def test_gradients_flow_to_a_bias():
    q, k, bias = normal(1, 2, 3, 2), normal(1, 2, 3, 2), normal(1, 2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: rw.operators.SoftmaxMixing(q, k, b).dense(), (bias,))


def test_nothing_is_expanded_in_memory():
    """A padding mask stays small, also in another dtype."""
    mask = torch.zeros(2, 1, 1, 6)
    op = rw.operators.SoftmaxMixing(normal(2, 8, 5, 3), normal(2, 8, 6, 3), mask)
    assert op.mask.untyped_storage().nbytes() == mask.untyped_storage().nbytes()
    assert op.to(torch.float64).mask.numel() == mask.numel()
    assert op.dense(torch.float64).shape == (2, 8, 5, 6)


@pytest.mark.parametrize("width", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("mask", [None, "causal", "both"])
def test_values_of_any_width_never_form_the_matrix(width, mask):
    tokens = 600
    q, k = torch.randn(2, 1, 2, tokens, 4)
    hidden = None if mask != "both" else torch.zeros(1, 1, 1, tokens)
    op = rw.operators.SoftmaxMixing(q, k, hidden, is_causal=mask is not None)
    values = torch.randn(1, 2, tokens, width)
    got = op @ values
    torch.testing.assert_close(got, op.dense() @ values, rtol=1e-4, atol=1e-5)
    assert largest_tensor(lambda: op @ values) <= 2 * max(ROW_BLOCK * tokens, tokens * 16) < 2 * tokens**2


def test_a_bias_out_of_the_range_of_half_precision_is_a_bias():
    q, k = torch.randn(2, 1, 1, 4, 8)
    for bias in (
        torch.full((4, 4), torch.finfo(torch.float32).min),
        torch.tensor([7e4, 0, 0, 0]).expand(4, 4),
    ):
        op = rw.operators.SoftmaxMixing(q, k, bias)
        ones = torch.ones(1, 1, 4, 2, dtype=torch.float16)
        torch.testing.assert_close((op @ ones).float(), op.dense() @ ones.float(), rtol=2e-3, atol=2e-3)
