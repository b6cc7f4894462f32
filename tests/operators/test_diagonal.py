"""DiagonalMixing: the laws of every operator, and that it mixes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_matrix,
    check_products,
    normal,
    products,
)

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


def test_zeros_and_infinities_stay_in_their_token():
    op = DiagonalMixing(torch.tensor([0.0, float("inf"), -1.0]))
    assert (op @ torch.ones(3, 1)).flatten().tolist() == [0.0, float("inf"), -1.0]
    assert op.dense()[0].tolist() == [0.0, 0.0, 0.0]
    assert op.dense()[2].tolist() == [0.0, 0.0, -1.0]
