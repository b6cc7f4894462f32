"""A part of an operator is that part of its matrix; what leaves nothing is refused."""

import pytest
import torch
from operator_cases import normal
from tests.unchecked import unchecked

from rankwise.errors import ShapeError
from rankwise.operators import DenseMixing, IndexedMixing, SoftmaxMixing


def test_it_is_that_part_of_the_matrix():
    torch.manual_seed(0)
    op = SoftmaxMixing(normal(2, 3, 7, 4), normal(2, 3, 7, 4), is_causal=True)
    rows = torch.tensor([0, 1, 1, 0, 0, 1, 1]).bool()
    columns = torch.tensor([1, 1, 0, 0, 1, 1, 0]).bool()
    wanted = op.dense()[:, :, rows][..., columns]
    part = IndexedMixing(op, rows, columns)
    assert part.kind == "softmax"
    assert torch.equal(part.dense(), wanted)
    assert torch.equal(part.support(), op.support()[:, :, rows][..., columns])


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0)])
def test_nothing_is_refused(rows, columns):
    keep = [torch.arange(3) < count for count in (rows, columns)]
    with pytest.raises(ShapeError, match=rf"{rows} of 3 rows, {columns} of 3 columns"):
        IndexedMixing(DenseMixing(torch.eye(3)), *keep)


def test_truth_values_that_do_not_fit_are_refused():
    with unchecked(), pytest.raises(ShapeError, match="4 of 4 rows"):
        IndexedMixing(DenseMixing(torch.eye(3)), torch.ones(4).bool(), torch.ones(3).bool())
