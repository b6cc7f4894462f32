"""DiagonalMixing: the laws of every operator, and that it mixes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_gradients,
    check_indexing,
    check_matrix,
    check_products,
    largest_tensor,
    normal,
    products,
)
from tests.unchecked import unchecked

from rankwise.errors import ShapeError
from rankwise.operators.diagonal import DiagonalMixing


def by_hand(diagonal):
    *lead, tokens = diagonal.shape
    matrix = torch.zeros(*lead, tokens, tokens, dtype=torch.float64)
    for t in range(tokens):
        matrix[..., t, t] = diagonal[..., t].double()
    return matrix


@settings(max_examples=25)
@given(tokens=st.integers(1, 9), lead=st.sampled_from([(), (2,), (2, 3)]), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_matrix_formed_by_hand(dtype, tokens, lead, seed):
    diagonal = normal(*lead, tokens, seed=seed, dtype=dtype)
    op, exact = DiagonalMixing(diagonal), by_hand(diagonal)
    check_matrix(op, exact, torch.zeros_like(exact), torch.eye(tokens, dtype=torch.bool))
    # one product each, rounded once
    work = torch.float64 if dtype == torch.float64 else torch.float32
    check_products(op, exact, products(exact.abs(), 1, work))


def test_indexing():
    check_indexing(DiagonalMixing(normal(2, 4, 5)))


def test_gradients():
    check_gradients(DiagonalMixing, normal(2, 5))


def test_no_matrix_is_formed():
    op, v = DiagonalMixing(normal(2, 2000)), normal(2, 2000, 3)
    assert largest_tensor(lambda: op @ v) == v.numel()
    assert largest_tensor(lambda: op.mT @ v) == v.numel()
    assert largest_tensor(op.dense) >= 2 * 2000 * 2000


def test_zeros_and_infinities_stay_in_their_token():
    op = DiagonalMixing(torch.tensor([0.0, float("inf"), -1.0]))
    assert (op @ torch.ones(3, 1)).flatten().tolist() == [0.0, float("inf"), -1.0]
    assert op.dense()[0].tolist() == [0.0, 0.0, 0.0]
    assert op.dense()[2].tolist() == [0.0, 0.0, -1.0]


def test_kind_type_and_place():
    op = DiagonalMixing(normal(3, dtype=torch.float16))
    assert (op.kind, op.dtype, op.device.type) == ("diagonal", torch.float16, "cpu")
    assert op.to(torch.float64).dtype == torch.float64
    assert op.dense(torch.float64).dtype == torch.float64


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_a_diagonal_without_tokens_is_refused(shape):
    with pytest.raises(ShapeError, match=r"`DiagonalMixing`: expected one number for each token"):
        DiagonalMixing(torch.zeros(shape))


def test_values_of_other_tokens_are_refused():
    op = DiagonalMixing(normal(2, 3))
    with (
        unchecked(),
        pytest.raises(ShapeError, match=r"`M @ values`: expected values of shape \(\.\.\., 3, V\)"),
    ):
        op @ normal(2, 4, 5)
    with (
        unchecked(),
        pytest.raises(ShapeError, match=r"`M.mT @ values`: expected .*\(\.\.\., 3, V\).*got \(3,\)"),
    ):
        op.apply_transposed(normal(3))
