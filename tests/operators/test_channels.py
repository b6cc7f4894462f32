"""Samples of channels: in order, spread, repeatable, and as likely one as another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unchecked import unchecked

from rankwise.errors import InputError, ShapeError
from rankwise.operators import DiagonalMixing, sample_channels


@settings(max_examples=20)
@given(heads=st.integers(1, 200), count=st.integers(1, 40), seed=st.integers(0, 9))
def test_a_sample_is_one_of_each_run(heads, count, seed):
    picked = sample_channels(DiagonalMixing(torch.ones(2, heads, 3)), count, seed).tolist()
    assert picked == sorted(set(picked))
    assert len(picked) == min(heads, count)
    assert 0 <= picked[0] <= picked[-1] < heads
    if heads <= count:
        assert picked == list(range(heads))
    else:
        runs = [sum(head >= heads * (at + 1) // count for at in range(count)) for head in picked]
        assert runs == list(range(count))


def test_the_seed_decides_and_nothing_else():
    operator = DiagonalMixing(torch.ones(1, 1536, 2))
    torch.manual_seed(1)
    one = sample_channels(operator)
    torch.manual_seed(2)
    assert torch.equal(sample_channels(operator), one)
    assert not torch.equal(sample_channels(operator, seed=1), one)
    assert len(one) == 16


def test_bad_input_is_refused():
    operator = DiagonalMixing(torch.ones(4, 2))
    with pytest.raises(InputError, match="`count` of `sample_channels`: expected a whole number of"):
        sample_channels(operator, 0)
    with unchecked(), pytest.raises(ShapeError, match=r"expected an operator of shape \(\.\.\., H, T, S\)"):
        sample_channels(operator[0])
