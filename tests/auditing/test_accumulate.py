import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankwise.auditing.heads import RunningMoments

streams = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=st.floats(-1e6, 1e6))


@given(streams)
def test_equals_numpy(values: np.ndarray) -> None:
    moments = RunningMoments(values.shape[1:])
    for row in values:
        moments.add(row)
    # Welford's error: n rounding steps relative to the largest magnitude
    tolerance = 1e-15 * len(values) * max(1.0, np.abs(values).max())
    assert np.allclose(moments.mean, values.mean(0), rtol=0, atol=tolerance)
    if len(values) > 1:
        # the squares lose as many digits; a spread is their root
        assert np.allclose(
            moments.spread**2, values.var(0, ddof=1), rtol=1e-9, atol=tolerance**2 * 1e3 + 1e-12
        )


def test_nan_is_left_out_entry_by_entry() -> None:
    moments = RunningMoments((2,))
    for row in ([1.0, np.nan], [3.0, 5.0], [np.nan, np.nan]):
        moments.add(np.array(row))
    assert moments.mean.tolist() == [2.0, 5.0]
    assert moments.count.tolist() == [2.0, 1.0]
    assert moments.spread[0] == np.sqrt(2.0)
    assert np.isnan(moments.spread[1])


def test_nothing_is_nan_and_not_zero() -> None:
    assert np.isnan(RunningMoments((3,)).mean).all()
