"""The checks of shapes, which are on in all other tests, refuse wrong arguments."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError
from tests.typecheck import jaxtyped
from tests.unchecked import unchecked
from torch import Tensor

checked = jaxtyped(typechecker=None)
refused = pytest.raises((BeartypeCallHintViolation, TypeCheckError))
SQUARE, ROW = torch.zeros(3, 3), torch.zeros(3)


@checked
def product(x: Float[Tensor, "rows n"], y: Float[Tensor, " n"], flat: bool = True) -> Float[Tensor, " rows"]:
    return x @ y if flat else x


@checked
def first(given: list[Float[Tensor, " n"]], at: int = 0) -> Float[Tensor, " n"]:
    return product(SQUARE[:2], ROW).new_zeros(2) if at else given[0]


@checked
def each(given: list[Float[Tensor, " n"]]) -> Iterator[Float[Tensor, " n"]]:
    yield from given


@checked
def plain(at: int) -> str:
    return str(at)


@checked
@dataclass
class Row:
    numbers: Float[Tensor, " n"]
    again: Float[Tensor, " n"]


def test_right_arguments_pass() -> None:
    assert product(SQUARE, ROW).shape == (3,)
    assert product(torch.zeros(2, 4), torch.zeros(4)).shape == (2,)  # axis sizes are bound per call
    assert first([ROW], 0) is ROW  # the case of wrong results has arguments of this form, too
    assert list(each([ROW])) == [ROW]
    assert Row(ROW, ROW).again is ROW


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (product, (SQUARE, torch.zeros(4))),
        (product, (SQUARE, ROW.long())),
        (product, (SQUARE, ROW, False)),
        (product, (SQUARE, ROW, 1)),
        (first, ([SQUARE],)),
        (first, ([ROW], 1)),
        (Row, (ROW, torch.zeros(2))),
        (Row, (ROW, 1)),
    ],
)
def test_wrong_arguments_are_refused(call, given) -> None:
    with refused:
        call(*given)


def test_wrong_arguments_pass_without_checks() -> None:
    with unchecked():
        assert product(SQUARE, ROW, False) is SQUARE


def test_types_without_shapes_are_left_to_mypy() -> None:
    assert plain(ROW) == str(ROW)  # type: ignore[arg-type]
