from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.data.evenly import check_positive, evenly
from rankwise.errors import InputError

COUNTS = st.integers(0, 500)


@given(COUNTS, st.integers(1, 500))
def test_takes_as_many_as_wanted_or_all_in_order_and_within(count: int, wanted: int) -> None:
    taken = evenly(count, wanted)
    assert len(taken) == min(count, wanted)
    assert taken == sorted(set(taken))
    assert all(0 <= i < count for i in taken)


@given(st.integers(1, 500), st.integers(1, 500))
def test_gaps_differ_by_one_at_most(count: int, wanted: int) -> None:
    ends = [*evenly(count, wanted), count]
    gaps = [b - a for a, b in pairwise(ends)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("number", [0, -1])
def test_counts_below_one_are_named(number: int) -> None:
    with pytest.raises(
        InputError, match=r"--batch-size: expected a whole number, 1 or more, got " + str(number)
    ):
        check_positive(tokens=1, batch_size=number)
