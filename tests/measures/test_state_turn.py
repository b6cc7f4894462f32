"""`relative_update`: scale, sign and padding do not matter; what a block adds does."""

import math

import pytest
import torch
from tests.measures.measure_cases import normal
from tests.unchecked import unchecked

import rankwise.measures as rm
from rankwise.errors import ShapeError


def test_it_is_the_sine_between_the_states():
    y, z = normal(3, 5, 4, seed=1), normal(3, 5, 4, seed=2)
    cosine = (y * z).sum((1, 2)) / (y.norm(dim=(1, 2)) * z.norm(dim=(1, 2)))
    torch.testing.assert_close(rm.relative_update(y, z), (1 - cosine**2).sqrt(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1.0, -3.0, 1e-200, 1e200])
def test_scale_and_sign_do_not_matter(scale):
    y, z = normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2)
    torch.testing.assert_close(rm.relative_update(y, scale * z), rm.relative_update(y, z), rtol=1e-12, atol=0)
    assert (rm.relative_update(y, scale * y) < 1e-14).all()


def test_a_small_turn_keeps_its_digits():
    y, b = normal(1, 5, 4, seed=1), normal(1, 5, 4, seed=2)
    b = b - (b * y).sum() / y.square().sum() * y
    # Y is as exact as its own rounding, 1e-16 of it: of a turn of 1e-10 that leaves six digits
    assert rm.relative_update(y, y + 1e-10 * b).item() == pytest.approx(
        1e-10 * b.norm().item() / y.norm().item(), rel=1e-5
    )


def test_padding_is_left_out_and_nan_is_told():
    y, z = normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    wanted = [rm.relative_update(y[:1, :3], z[:1, :3]).item(), rm.relative_update(y[1:], z[1:]).item()]
    y[0, 3:] = math.nan
    assert rm.relative_update(y, z, keep).tolist() == pytest.approx(wanted, rel=1e-12)
    z[1, 0, 0] = math.inf
    assert rm.relative_update(y, z, keep).isnan().tolist() == [False, True]
    assert rm.relative_update(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)).item() == 0


def test_states_of_two_shapes_are_refused():
    with unchecked(), pytest.raises(ShapeError, match=r"one shape before and after, got \(1, 2, 3\)"):
        rm.relative_update(torch.ones(1, 2, 3), torch.ones(1, 2, 4))
