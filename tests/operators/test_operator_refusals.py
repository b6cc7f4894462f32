"""Operators refuse tensors that do not fit together, and say what would."""

import pytest
import torch
from tests.operators.linear_time_cases import LINEAR_TIME
from tests.unchecked import unchecked

from rankwise.errors import ShapeError
from rankwise.operators import (
    DenseMixing,
    DiagonalMixing,
    IndexedMixing,
    SoftmaxMixing,
    SumMixing,
    ToeplitzMixing,
)

SHAPES: list[tuple[type, str, tuple]] = [
    (SoftmaxMixing, "query (..., H, T, K) and key (..., Hkv, S, K)", shapes)
    for shapes in [
        ((2, 3, 4, 5), (2, 3, 4, 6)),
        ((2, 3, 4, 5), (2, 2, 4, 5)),
        ((2, 3, 4, 5), (3, 3, 4, 5)),
        ((2, 3, 4, 5), (3, 4, 5)),
        ((5,), (5,)),
        ((2, 3, 0, 5), (2, 3, 4, 5)),
        ((2, 3, 4, 0), (2, 3, 4, 0)),
        ((0, 3, 4, 5), (0, 3, 4, 5)),
    ]
]
SHAPES += [
    (DenseMixing, "a matrix of shape (..., T, S)", shapes) for shapes in [((5,),), ((0, 3),), ((2, 3, 0),)]
]
SHAPES += [
    (type(case.make(1, 1, 1, 1, 1)), case.error, shapes)
    for case in LINEAR_TIME.values()
    for shapes in case.refused
]


def refused(subject, expected, make):
    with unchecked(), pytest.raises(ShapeError) as raised:
        make()
    assert raised.value.subject.strip("`").startswith(subject)
    assert expected in raised.value.expected


@pytest.mark.parametrize(("kind", "expected", "shapes"), SHAPES)
def test_tensors_that_do_not_fit(kind, expected, shapes):
    tensors = [shape if shape is None else torch.zeros(shape) for shape in shapes]
    refused(kind.__name__, expected, lambda: kind(*tensors))


@pytest.mark.parametrize("shape", [(2, 0), (2, 4)])
def test_a_kernel_without_a_middle(shape):
    refused("ToeplitzMixing", "(..., 2T − 1) lags", lambda: ToeplitzMixing(torch.zeros(shape), False))


def test_a_complex_kernel():
    refused("ToeplitzMixing", "real numbers", lambda: ToeplitzMixing(torch.zeros(3, dtype=torch.complex64)))


@pytest.mark.parametrize(
    ("shapes", "tokens"),
    [
        (((2, 3), (2, 3), (2, 3), (3,)), 4),
        (((2, 3), (2, 4), (2, 3), (2,)), 4),
        (((2, 3), (2, 3), (3,), (2,)), 4),
        (((2, 3), (2, 3), (2, 3), (2,)), 0),
        (((), (), (), ()), 4),
    ],
    ids=str,
)
def test_a_state_space_that_does_not_fit(shapes, tokens):
    tensors = [torch.ones(shape) for shape in shapes]
    refused("ToeplitzMixing.from_ssm", "a, b and c", lambda: ToeplitzMixing.from_ssm(*tensors, tokens))


@pytest.mark.parametrize("shape", [(3, 5), (2, 4), (3, 1, 4, 5), (1, 2, 3, 4, 5)])
def test_a_mask_that_does_not_fit(shape):
    query, key = torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 5, 6)
    broadcasts = "a shape that broadcasts to (2, 3, 4, 5)"
    refused("SoftmaxMixing` mask", broadcasts, lambda: SoftmaxMixing(query, key, torch.zeros(shape)))
    allowed = torch.zeros(shape, dtype=torch.bool)
    refused("allowed entries", broadcasts, lambda: DenseMixing(torch.zeros(2, 3, 4, 5), allowed))


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3), (1, 3)), ()], ids=str)
def test_parts_that_do_not_fit(shapes):
    parts = [DiagonalMixing(torch.ones(shape)) for shape in shapes]
    refused("SumMixing", "operators of the same shape", lambda: SumMixing(*parts))


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (4, 3), (3, 2)])
def test_an_index_that_does_not_fit_or_keeps_nothing(rows, columns):
    keep = [torch.arange(max(count, 3)) < count for count in (rows, columns)]
    keep[1] = keep[1][:columns] if columns == 2 else keep[1]
    refused("IndexedMixing", "some rows and some", lambda: IndexedMixing(DenseMixing(torch.eye(3)), *keep))
