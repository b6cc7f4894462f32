"""Measures of rows: entropy, shares of tokens, distances, and the walk that they share."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import close, make, matrices, normal, sum_tolerance
from tests.operators.mixing_laws import largest_tensor
from tests.unchecked import unchecked

import rankwise.measures.row_walk as row_walk
from rankwise._internals.linalg import CANCELLATION
from rankwise.errors import ShapeError
from rankwise.measures import (
    MEASURES,
    compute_measures,
    first_token_mass,
    head_distance,
    identity_distance,
    max_token_index,
    max_token_mass,
    row_entropy,
    row_spread,
    spread,
    stable_rank,
)
from rankwise.operators import SoftmaxMixing

NONZERO = ("signed", "stochastic", "causal", "low rank")
seeds = st.integers(0, 2**31)


def tolerance(m):
    return sum_tolerance(m.shape[-1] * m.shape[-2])


def shares(row):
    whole = math.fsum(map(abs, row))
    return [abs(x) / whole for x in row]


# --- entropy and sinks -----------------------------------------------------------------------------------


@given(m=matrices())
def test_entropy_and_sink_against_their_definitions(m):
    live = [shares(row) for row in m.tolist() if any(row)]
    if not live:
        assert row_entropy(m).isnan()
        assert first_token_mass(m).isnan()
        assert max_token_mass(m).isnan()
        assert max_token_index(m) == -1
        return
    entropy = [-math.fsum(p * math.log(p) for p in row if p) for row in live]
    close(row_entropy(m), math.fsum(entropy) / len(live), rtol=tolerance(m), atol=tolerance(m))
    masses = [math.fsum(row[column] for row in live) / len(live) for column in range(m.shape[1])]
    for column, mass in enumerate(masses):
        close(first_token_mass(m.roll(-column, 1)), mass, rtol=tolerance(m))
    close(max_token_mass(m), max(masses), rtol=tolerance(m))
    close(masses[max_token_index(m).item()], max(masses), rtol=tolerance(m))


# --- distance to equal rows ------------------------------------------------------------------------------


@given(m=matrices(batch=(2,)))
def test_row_distance_is_the_collapse_of_rows(m):
    close(row_spread(m), spread(m), rtol=tolerance(m), atol=tolerance(m))


@given(row=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), rows=st.integers(1, 9))
def test_equal_rows_are_at_no_distance_at_all(row, rows):
    assert row_spread(torch.tensor([row] * rows, dtype=torch.float64)) == 0


def test_nearly_equal_rows_keep_their_digits():
    m = normal(1, 4, seed=2) + 1e-13 * normal(6, 4, seed=1)
    exact = [[Fraction(x) for x in row] for row in m.tolist()]
    mean = [sum(column) / 6 for column in zip(*exact, strict=True)]
    apart = sum((x - mu) ** 2 for row in exact for x, mu in zip(row, mean, strict=True))
    wanted = math.sqrt(apart / sum(x * x for row in exact for x in row))
    close(row_spread(m), wanted, rtol=tolerance(m))


# --- distance to the identity ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
def test_the_identity_its_opposite_and_the_previous_token(n):
    eye = torch.eye(n)
    assert identity_distance(eye) == 0
    close(identity_distance(-eye), math.sqrt(2), rtol=tolerance(eye))
    assert identity_distance(torch.zeros(n, n)) == 1
    if n > 1:
        close(identity_distance(eye.roll(1, 0)), 1.0, rtol=tolerance(eye))


def test_only_square_matrices_can_be_the_identity():
    assert identity_distance(torch.ones(2, 3, 4)).isnan().tolist() == [True, True]


# --- distance between heads ------------------------------------------------------------------------------


@given(heads=matrices(batch=(4,), kinds=("stochastic", "causal")))
def test_head_distance_is_symmetric_with_a_zero_diagonal_and_at_most_one(heads):
    got = head_distance(heads)
    assert got.equal(got.mT)
    assert (got.diagonal() == 0).all()
    assert (got <= 1 + tolerance(heads)).all()


@pytest.mark.parametrize("step", [1e-6, 1e-9, 1e-12])
def test_nearly_equal_heads_keep_their_digits(step):
    """‖A‖² + ‖B‖² − 2⟨A, B⟩ has no digit left for steps below 1e-8."""
    a = make("stochastic", (6, 6), seed=1)
    b = a + step * normal(6, 6, seed=2)
    c = normal(6, 6, seed=3)
    wanted = (a - b).norm() / math.hypot(a.norm().item(), b.norm().item())
    close(head_distance(torch.stack([a, c, b]))[0, 2], wanted, rtol=sum_tolerance(36))


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("step", [10.0**-power for power in range(0, 17, 2)])
def test_distances_equal_direct_sums_with_and_without_cancellation(step, rows, monkeypatch):
    """From far apart to equal within rounding, in one block or many, next to a pair that never cancels."""
    monkeypatch.setitem(row_walk.BLOCK_BYTES, "cpu", rows * 8 * 3 * 40)
    noise = step * normal(40, 40, seed=1) / 40
    row, other = normal(1, 40, seed=2).softmax(-1), normal(40, 40, seed=3).softmax(-1)
    near_mean, near_identity = row + noise, torch.eye(40).double() + noise
    stack = torch.stack([near_mean, row.expand(40, 40), other])
    # subtracting rounded numbers errs by at most ε per entry: relative to the distance, by 2ε/step
    limit = {"rtol": CANCELLATION + 4 * 2**-52 / step, "atol": 1e-16}
    centered = near_mean - near_mean[0]
    centered = centered - centered.mean(0)
    close(row_spread(stack)[0], centered.norm() / near_mean.norm(), **limit)
    whole = (near_identity.norm() ** 2 + 40).sqrt()
    close(identity_distance(near_identity), (near_identity - torch.eye(40)).norm() / whole, **limit)
    got = head_distance(stack)
    for first in range(3):
        for second in range(first):
            a, b = stack[first], stack[second]
            close(got[first, second], (a - b).norm() / torch.hypot(a.norm(), b.norm()), **limit)


def test_a_head_that_is_not_finite_has_no_distances():
    heads = make("stochastic", (3, 4, 4), seed=4)
    clean = head_distance(heads)
    heads[1, 0, 0] = math.inf
    got = head_distance(heads)
    assert got[1].isnan().all()
    assert got[:, 1].isnan().all()
    assert got[::2, ::2].equal(clean[::2, ::2])


def test_zero_heads_are_equal_and_far_from_others():
    heads = torch.stack([torch.zeros(2, 2), torch.zeros(2, 2), torch.eye(2)])
    wanted = torch.tensor([[0.0, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(head_distance(heads), wanted, rtol=2**-52, atol=0)


def test_heads_of_any_dtype_and_number():
    half = make("stochastic", (3, 4, 5), seed=5).to(torch.bfloat16)
    assert head_distance(half).equal(head_distance(half.double()))
    assert head_distance(torch.ones(1, 1, 1)).tolist() == [[0]]
    assert head_distance(torch.empty(0, 3, 2, 2)).shape == (0, 3, 3)


def test_one_matrix_is_not_a_stack_of_heads():
    with unchecked(), pytest.raises(ShapeError, match=r"`head_distance`: expected shape \(\.\.\., H, T, S\)"):
        head_distance(torch.eye(3))


# --- one walk for all -------------------------------------------------------------------------------------

BY_ROWS = [name for name, measure in MEASURES.items() if measure.statistics]


def assert_shared_walk_changes_nothing(x):
    """Sums of T·S terms of one sign in another order: T·S roundings, and square roots halve them.

    If rows are equal up to rounding, a distance is the rounding itself: √(T·S)·ε of the norm.
    """
    slack = 4 * x.shape[-1] * x.shape[-2] * torch.finfo(torch.float64).eps
    for name, together in compute_measures(BY_ROWS, x).items():
        torch.testing.assert_close(
            together, MEASURES[name].function(x), rtol=slack, atol=slack, equal_nan=True
        )


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["signed", "stochastic"]),
    shape=st.tuples(*(st.integers(1, top) for top in (2, 3, 9, 9))),
    seed=seeds,
    scale=st.sampled_from([1.0, 1e-200, 1e200, 3.7]),
)
def test_measures_that_share_a_walk_are_the_same_alone(kind, shape, seed, scale):
    assert_shared_walk_changes_nothing(make(kind, shape, seed) * scale)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_blocks_change_nothing(monkeypatch, rows):
    monkeypatch.setitem(row_walk.BLOCK_BYTES, "cpu", rows * 8 * 2 * 3 * 11)
    assert_shared_walk_changes_nothing(normal(2, 3, 11, 11, seed=1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_leaves_the_others_of_a_shared_walk_alone(bad):
    x = make("stochastic", (2, 3, 5, 5), seed=3)
    x[1, 0, 2, 4] = bad
    assert_shared_walk_changes_nothing(x)
    assert compute_measures(["row_entropy"], x)["row_entropy"].isnan().sum() == 1


def test_measures_without_a_walk_are_evaluated_too():
    x = normal(2, 3, 5, 5, seed=4)
    found = compute_measures(["stable_rank", "row_entropy"], x)
    assert found["stable_rank"].equal(stable_rank(x))
    assert found["row_entropy"].equal(row_entropy(x))


def test_operators_are_walked_a_block_at_a_time(monkeypatch):
    seen = []
    rows = SoftmaxMixing.rows_with_logits

    def watched(self, start, stop):
        seen.append(stop - start)
        return rows(self, start, stop)

    monkeypatch.setattr(SoftmaxMixing, "rows_with_logits", watched)
    monkeypatch.setitem(row_walk.BLOCK_BYTES, "cpu", 8 * 64 * 4)
    op = SoftmaxMixing(normal(1, 64, 8), normal(1, 64, 8, seed=1))
    compute_measures(BY_ROWS, op)
    assert seen == [4] * 16


@pytest.mark.parametrize("names", [*([name] for name in BY_ROWS), BY_ROWS], ids=lambda names: names[-1])
def test_no_measure_of_rows_forms_the_matrix(names):
    """1,500² entries are over four blocks of 4 MiB; the largest tensor fits one block."""
    op = SoftmaxMixing(normal(1, 1500, 4), normal(1, 1500, 4, seed=1))
    assert largest_tensor(lambda: compute_measures(names, op)) <= row_walk.BLOCK_BYTES["cpu"] // 8
