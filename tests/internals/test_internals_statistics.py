"""Moments add up: any split of a stream has the statistics of the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankwise._internals.statistics import Moments

EPS = np.finfo(np.float64).eps
numbers = st.floats(-1e6, 1e6, allow_subnormal=False) | st.just(np.nan)
streams = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=numbers)
cuts = st.lists(st.integers(0, 12), max_size=4)


def of(values: np.ndarray) -> Moments:
    moments = Moments.empty(*values.shape[1:])
    moments.add(values)
    return moments


def parts(values: np.ndarray, at: list[int]) -> list[np.ndarray]:
    return np.split(values, sorted(min(cut, len(values)) for cut in at))


def agree(first: Moments, second: Moments, values: np.ndarray) -> None:
    """Equal up to a few rounding steps for each value, relative to the largest one and its square."""
    largest = max(1.0, np.nanmax(np.abs(values), initial=0.0))
    tolerance = 8 * len(values) * EPS
    assert np.array_equal(first.count, second.count)
    assert np.allclose(first.mean, second.mean, rtol=0, atol=tolerance * largest)
    assert np.allclose(first.m2, second.m2, rtol=1e-9, atol=len(values) * (tolerance * largest) ** 2 + 1e-300)


@given(streams)
def test_moments_equal_numpys_without_nan(values: np.ndarray) -> None:
    count, mean, std = of(values).to_record()
    for at in range(values.shape[1]):
        known = values[:, at][~np.isnan(values[:, at])]
        tolerance = 8 * EPS * len(values) * max(1.0, np.abs(known).max(initial=0.0))
        assert count[at] == len(known)
        assert np.isnan(mean[at]) if not len(known) else abs(mean[at] - known.mean()) <= tolerance
        defined = len(known) > 1
        assert (
            abs(std[at] - known.std(ddof=1)) <= 1e-9 * std[at] + tolerance if defined else np.isnan(std[at])
        )


@given(streams, cuts)
def test_any_split_in_any_order_is_the_whole(values: np.ndarray, at: list[int]) -> None:
    added, merged, reverse = (Moments.empty(values.shape[1]) for _ in range(3))
    for part in parts(values, at):
        added.add(part)
        merged.merge(of(part))
    for part in reversed(parts(values, at)):
        reverse.merge(of(part))
    for moments in (added, merged, reverse):
        agree(moments, of(values), values)


@given(streams)
def test_records_round_trip(values: np.ndarray) -> None:
    again = Moments.from_record(*of(values).to_record())
    agree(again, of(values), values)


@given(numbers.filter(np.isfinite), st.integers(1, 7), st.integers(1, 7))
def test_equal_values_have_exactly_their_mean_and_no_deviation(value: float, first: int, second: int) -> None:
    moments = of(np.full((first, 1), value))
    moments.merge(of(np.full((second, 1), value)))
    assert moments.mean[0] == value
    assert moments.m2[0] == 0


def test_an_unknown_deviation_of_several_values_stays_unknown() -> None:
    moments = Moments.from_record(np.array([3.0]), np.array([1.0]), np.array([np.nan]))
    moments.merge(of(np.ones((2, 1))))
    count, mean, std = moments.to_record()
    assert (count[0], mean[0]) == (5, 1.0)
    assert np.isnan(std[0])


def test_complete_is_unknown_where_values_are_missing() -> None:
    moments = of(np.array([[1.0, np.nan], [3.0, 5.0]]))
    count, mean, std = moments.complete(2).to_record()
    assert count.tolist() == [2, 1]
    assert mean[0] == 2
    assert std[0] == pytest.approx(2**0.5)
    assert np.isnan([mean[1], std[1]]).all()
