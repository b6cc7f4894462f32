"""Sums and parts of operators are sums and parts of their matrices."""

import torch
from tests.operators.mixing_laws import check_matrix, check_products, normal, products

from rankwise.operators import (
    DenseMixing,
    DiagonalMixing,
    IndexedMixing,
    SelectiveMixing,
    SoftmaxMixing,
    SumMixing,
)

EPS = torch.finfo(torch.float64).eps


def alike(tokens=7):
    c, b = normal(2, 1, tokens, 3, seed=4), normal(2, 1, tokens, 3, seed=5)
    scan = SelectiveMixing(c, b, -normal(4, 3, seed=6).abs(), normal(2, 4, tokens, seed=7).abs())
    return DiagonalMixing(normal(2, 4, tokens)), scan


def test_a_sum_is_the_sum_of_the_matrices():
    one, two = (part.dense() for part in alike())
    size = one.abs() + two.abs()
    slack = 64 * EPS * size.amax((-2, -1), keepdim=True).expand_as(size)
    support = torch.ones(7, 7, dtype=torch.bool).tril()
    check_matrix(SumMixing(*alike()), one + two, slack, support)
    check_products(SumMixing(*alike()), one + two, products(slack / (64 * EPS), 64, torch.float64))


def test_indexing_takes_rows_and_columns_of_the_matrix():
    torch.manual_seed(0)
    op = SoftmaxMixing(normal(2, 3, 7, 4), normal(2, 3, 7, 4), is_causal=True)
    rows = torch.tensor([0, 1, 1, 0, 0, 1, 1]).bool()
    columns = torch.tensor([1, 1, 0, 0, 1, 1, 0]).bool()
    wanted = op.dense()[:, :, rows][..., columns]
    part = IndexedMixing(op, rows, columns)
    assert part.kind == "softmax"
    assert torch.equal(part.dense(), wanted)
    assert torch.equal(part.support(), op.support()[:, :, rows][..., columns])


def test_an_entry_out_of_the_range_of_the_values_is_multiplied_first():
    op = DenseMixing(torch.full((1, 1), 1e5, dtype=torch.bfloat16))
    product = op @ torch.full((1, 1), 1e-3, dtype=torch.float16)
    assert abs(product.item() - 100) < 1


def test_zeros_and_infinities_of_a_diagonal_stay_in_their_token():
    op = DiagonalMixing(torch.tensor([0.0, float("inf"), -1.0]))
    assert (op @ torch.ones(3, 1)).flatten().tolist() == [0.0, float("inf"), -1.0]
    assert op.dense()[0].tolist() == [0.0, 0.0, 0.0]
    assert op.dense()[2].tolist() == [0.0, 0.0, -1.0]
