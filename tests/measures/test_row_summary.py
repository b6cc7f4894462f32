"""`row_summary` is every measure of rows; what it holds does not grow with the matrix."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import make, normal
from tests.operators.mixing_laws import largest_tensor
from tests.unchecked import unchecked

import rankwise.measures as rm
import rankwise.measures.row_sums as module
from rankwise.errors import ShapeError
from rankwise.measures.row_sums import ROW_MEASURES
from rankwise.measures.rows import row_measures
from rankwise.operators import SoftmaxMixing

ALONE = (
    rm.row_entropy,
    rm.first_token_mass,
    rm.max_token_mass,
    rm.row_distance,
    rm.identity_distance,
    rm.head_distance,
)


def check(x: torch.Tensor) -> None:
    """Sums of T·S terms of one sign in another order: T·S roundings, and square roots halve them.

    Where rows are equal up to rounding, a distance is the rounding itself: √(T·S)·ε of the norm.
    """
    slack = 4 * x.shape[-1] * x.shape[-2] * torch.finfo(torch.float64).eps
    together = rm.row_summary(x)
    for alone in ALONE:
        torch.testing.assert_close(
            getattr(together, alone.__name__), alone(x), rtol=slack, atol=slack, equal_nan=True
        )


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["normal", "stochastic"]),
    shape=st.tuples(*(st.integers(1, top) for top in (2, 3, 9, 9))),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 1e-200, 1e200, 3.7]),
)
def test_it_is_every_measure_alone(kind, shape, seed, scale):
    x = normal(*shape, seed=seed) if kind == "normal" else make("stochastic", shape, seed=seed)
    check(x * scale)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_blocks_change_nothing(monkeypatch, rows):
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", rows * 8 * 2 * 3 * 11)
    check(normal(2, 3, 11, 11, seed=1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_answers_nan_and_leaves_the_others_alone(bad):
    x = make("stochastic", (2, 3, 5, 5), seed=3)
    x[1, 0, 2, 4] = bad
    check(x)
    assert rm.row_summary(x).row_entropy[1, 0].isnan()


def test_heads_of_unlike_scale_are_compared_as_they_are():
    x = torch.stack([torch.eye(4), 1e-3 * torch.eye(4), 1e3 * torch.eye(4)]).double()
    check(x)
    assert rm.row_summary(x).head_distance[0, 1] > 0.99


def test_rows_that_are_nearly_equal_keep_their_digits():
    x = torch.full((1, 50, 50), 0.02, dtype=torch.float64)
    x[0, :, 0] += 1e-12 * normal(50, seed=2)
    x[0, 0] = 0.02
    distance = x - x[:, :1]
    distance = (distance - distance.mean(-2, keepdim=True)).norm() / x.norm()
    assert rm.row_summary(x).row_distance.item() == pytest.approx(distance.item(), rel=1e-9)


def test_operators_are_walked_a_block_at_a_time(monkeypatch):
    seen = []
    rows = SoftmaxMixing.rows

    def watched(self, start, stop):
        seen.append(stop - start)
        return rows(self, start, stop)

    monkeypatch.setattr(SoftmaxMixing, "rows", watched)
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 8 * 64 * 4)
    op = SoftmaxMixing(normal(1, 64, 8), normal(1, 64, 8, seed=1))
    summary = rm.row_summary(op)
    assert max(seen) == 4
    assert summary.row_entropy.item() == pytest.approx(rm.row_entropy(op).item(), rel=1e-12)


@pytest.mark.parametrize("measure", [*ALONE, rm.row_summary], ids=lambda measure: measure.__name__)
def test_no_measure_of_rows_forms_the_matrix(measure):
    """1,500² entries are over four blocks of 4 MiB, in one of which the largest tensor fits."""
    op = SoftmaxMixing(normal(1, 1500, 4), normal(1, 1500, 4, seed=1))
    assert largest_tensor(lambda: measure(op)) <= module.BLOCK_BYTES["cpu"] // 8


def test_every_measure_of_rows_is_in_the_summary_under_its_name():
    x = normal(2, 3, 5, 5, seed=4)
    together = row_measures(x)
    assert set(ROW_MEASURES) <= set(together)
    for name, measure in ROW_MEASURES.items():
        torch.testing.assert_close(together[name], measure.function(x))


@pytest.mark.parametrize("x", [torch.ones(3, 3), torch.ones(2, 0, 3), torch.ones(0, 3, 3)])
def test_matrices_without_heads_are_refused(x):
    with unchecked(), pytest.raises(ShapeError, match="Stack the heads"):
        rm.row_summary(x)
