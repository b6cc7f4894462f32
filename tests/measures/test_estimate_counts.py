"""Counts without the matrix: coverage of intervals, and numbers only if the interval is narrow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.estimate_cases import FEW_KINDS, KINDS, head
from tests.measures.measure_cases import generator, make, normal

from rankwise.errors import RankwiseError
from rankwise.measures import singular_values
from rankwise.measures.estimate import estimate_spectrum
from rankwise.measures.quadrature import SHARP, EigenvalueCounter

DELTAS = (0.5, 0.1, 0.03, 0.01, 0.001)


def exact(operator, delta):
    return int((singular_values(operator) >= delta).sum())


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(["signed", "stochastic", "causal", "low rank", "sparse"]),
    seed=st.integers(0, 2**31),
    delta=st.floats(1e-3, 3),
)
def test_where_the_space_is_whole_the_count_is_exact(shape, kind, seed, delta):
    if kind == "causal":
        shape = (max(shape),) * 2
    m = make(kind, shape, seed)
    sigma = singular_values(m)
    count = estimate_spectrum(m, probes=8, steps=8).count(delta)
    # MᵀM in float64 tells σ² from δ² down to 64 ε ‖M‖_F².
    unsure = ((sigma**2 - delta**2).abs() <= 1e-13 * m.square().sum()).sum()
    truth = (sigma >= delta).sum()
    assert count.low <= truth <= count.high
    assert count.high - count.low <= unsure
    assert abs(count.value - truth) <= unsure


@pytest.mark.parametrize("kind", KINDS)
def test_energy_bounds_the_count_for_certain(kind):
    operator = head(kind, 120)
    sigma = singular_values(operator)
    for seed in range(4):
        known = estimate_spectrum(operator, probes=8, steps=5, seed=seed)._matrices[0]
        counter = EigenvalueCounter(known.estimator, known.steps)
        for delta in DELTAS:
            fewest, most = counter.by_energy((delta / known.scale) ** 2)
            assert fewest <= int((sigma >= delta).sum()) <= most


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_intervals_hold_the_count(kind):
    """95 % nominal: of 12 seeds at most 3 may miss, which chance exceeds in 0.2 % of kinds."""
    operator = head(kind, 150)
    sigma = singular_values(operator)
    runs = [estimate_spectrum(operator, probes=8, steps=10, seed=seed) for seed in range(12)]
    for delta in DELTAS:
        truth = int((sigma >= delta).sum())
        counts = [run.count(delta) for run in runs]
        assert sum(not bool(c.low <= truth <= c.high) for c in counts) <= 3
        assert all(0 <= c.low <= c.high <= 150 for c in counts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_is_a_number_if_and_only_if_quadrature_leaves_little_open(kind):
    """At 16 probes chance is at most √(2/16)·√200 per count: 5 + 3·2.15 around the truth covers both."""
    operator = head(kind, 200)
    spectrum = estimate_spectrum(operator, probes=16, steps=8)
    for delta in DELTAS:
        count, truth = spectrum.count(delta), exact(operator, delta)
        assert bool(count.value.isnan()) == bool(count.stderr.isnan())
        if count.value.isnan():
            assert count.high - count.low > 2 * SHARP * count.low
        else:
            assert count.low <= count.value <= count.high
            assert abs(count.value - truth) <= 2 * SHARP * truth + 15


def test_a_count_that_is_not_sharp_is_nan_with_an_interval():
    """One σ of 17 by the sink; a third of the others are between 1e-4 and 1e-2, too close for few steps."""
    operator = head("sink", 300)
    spectrum = estimate_spectrum(operator, probes=8, steps=6)
    assert [float(x) for x in spectrum.count(5.0)] == [1, 0, 1, 1]
    fine = spectrum.count(1e-3)
    assert fine.value.isnan()
    assert fine.stderr.isnan()
    assert fine.low < exact(operator, 1e-3) < fine.high
    assert fine.high - fine.low > 30


def test_strong_directions_are_counted_exactly():
    matrix = normal(300, 20, seed=1) @ normal(20, 300, seed=2) / 300 + 1e-7 * normal(300, 300, seed=3)
    count = estimate_spectrum(matrix, probes=8, steps=12).count(1e-3)
    assert count.value == count.low == count.high == 20


@pytest.mark.parametrize(("delta", "low", "high"), [(1e200, 0, 0), (1e3, 0, 0), (1e-200, 100, 100)])
def test_far_from_the_spectrum(delta, low, high):
    """A full-rank matrix of σ in [1/2, 2], all of it in the space."""
    matrix = torch.linspace(0.5, 2, 100).double().diag()[torch.randperm(100, generator=generator(1))]
    count = estimate_spectrum(matrix).count(delta)
    assert (count.low, count.value, count.high) == (low, (low + high) / 2, high)


def test_the_threshold_follows_the_scale():
    matrix = head("plain", 150).dense(torch.float64)
    plain, scaled = (estimate_spectrum(x, probes=8, steps=8) for x in (matrix, 2.0**40 * matrix))
    for delta in DELTAS:
        for one, other in zip(plain.count(delta), scaled.count(2.0**40 * delta), strict=True):
            assert one.equal(other) or (one.isnan() and other.isnan())


def test_a_batch_is_counted_one_by_one():
    matrices = make("causal", (2, 3, 40, 40), seed=4)
    matrices[1, 2, 0, 0] = math.nan
    count = estimate_spectrum(matrices, probes=8, steps=4).count(0.1)
    assert count.value.shape == count.low.shape == (2, 3)
    assert count.low[1, 2].isnan()
    alone = estimate_spectrum(matrices[0, 1], probes=8, steps=4).count(0.1)
    assert count.low[0, 1] == alone.low
    assert count.high[0, 1] == alone.high


def test_counts_of_zero_are_zero():
    assert [float(x) for x in estimate_spectrum(torch.zeros(9, 9)).count(0.1)] == [0, 0, 0, 0]


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan, math.inf])
def test_a_threshold_must_be_positive(delta):
    with pytest.raises(RankwiseError, match=r"`delta`: expected a number in \(0, ∞\)"):
        estimate_spectrum(torch.eye(3)).count(delta)
