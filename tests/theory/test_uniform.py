"""The rank of equal weights under a mask: against singular values, and far beyond what can be decomposed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.theory import random_head_rank, uniform_rank


def even(tokens: int, mask: str, window: int | None = None) -> torch.Tensor:
    ahead = torch.arange(tokens) - torch.arange(tokens)[:, None]
    seen = ahead <= (0 if mask == "causal" else tokens)
    seen = seen if window is None else seen & (ahead.abs() < window)
    return seen.double() / seen.sum(-1, keepdim=True)


@given(
    tokens=st.integers(1, 60),
    delta=st.sampled_from([1e-6, 1e-3, 0.0137, 0.037, 0.11, 0.29, 0.51, 1.13, 1.7]),
)
def test_pivots_count_singular_values_of_the_causal_mask(tokens, delta):
    sigma = torch.linalg.svdvals(even(tokens, "causal"))
    # rounding of σ, some T·1e-16, may decide about a σ as near to δ
    assert (sigma >= delta + 1e-13).sum() <= uniform_rank(tokens, "causal", delta=delta)
    assert uniform_rank(tokens, "causal", delta=delta) <= (sigma >= delta - 1e-13).sum()


@pytest.mark.parametrize(("tokens", "share"), [(64, 0.94), (1024, 0.15)])
def test_a_causal_mask_alone_makes_rank_and_less_of_it_the_longer_it_is(tokens, share):
    sigma = torch.linalg.svdvals(even(tokens, "causal"))
    assert uniform_rank(tokens, "causal") == (sigma >= 1e-2).sum()
    assert uniform_rank(tokens, "causal") / tokens == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("delta", [0.002, 0.3])
def test_a_long_causal_one_grows_slower_than_its_length(delta):
    """σ of 1/i rows approach the continuous average, whose density in log T is fixed."""
    ranks = [uniform_rank(tokens, "causal", delta=delta) for tokens in (4096, 16384, 65536)]
    assert ranks[0] < ranks[1] < ranks[2] < 4 * ranks[0]


def test_without_a_mask_all_rows_are_the_same():
    assert [uniform_rank(9, sources=4, delta=delta) for delta in (0.01, 1.49, 1.51)] == [1, 1, 0]
    assert uniform_rank(10**9) == 1


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_windows_are_decomposed(mask, window):
    sigma = torch.linalg.svdvals(even(20, mask, window))
    assert uniform_rank(20, mask, window, delta=0.0371) == (sigma >= 0.0371).sum()
    assert uniform_rank(20, mask, window=20) == uniform_rank(20, mask)


def test_windows_of_sequences_that_are_too_long_have_none():
    assert math.isnan(uniform_rank(4097, "causal", window=40))
    assert uniform_rank(4097, "causal", window=4097) == uniform_rank(4097, "causal") > 1


def test_it_is_the_null_at_infinite_temperature():
    for mask in ("full", "causal"):
        assert random_head_rank(40, 3, mask, temperature=math.inf, trials=1).mean == uniform_rank(40, mask)


@pytest.mark.parametrize("delta", [1e-200, 5e-324])
def test_the_smallest_thresholds_count_all(delta):
    assert uniform_rank(30, "causal", delta=delta) == 30
