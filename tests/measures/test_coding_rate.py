"""The coding rate: against its two determinants, its laws, its extremes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.measure_cases import close, normal, rotation, sigma_tolerance, token_batches

from rankwise.errors import RankwiseError
from rankwise.measures import coding_rate

scales = st.floats(1e-2, 1e2)
distortions = st.floats(0.05, 5)


def tolerance(x, eps):
    """σ² moves by c·n·u·σ_1², so each of n logarithms by at most that times D/(nε²)."""
    top = x.square().sum((1, 2)).max().item() * x.shape[2] / (x.shape[1] * eps**2)
    return 4 * sigma_tolerance(x) * max(x.shape[1:]) * (1 + top)


@given(x=token_batches(), eps=distortions)
def test_the_rate_is_both_determinants(x, eps):
    _, tokens, width = x.shape
    weight = width / (tokens * eps**2)
    by_tokens = torch.eye(tokens, dtype=torch.float64) + weight * x @ x.mT
    by_features = torch.eye(width, dtype=torch.float64) + weight * x.mT @ x
    for gram in (by_tokens, by_features):
        close(coding_rate(x, eps), torch.linalg.slogdet(gram).logabsdet / 2, rtol=0, atol=tolerance(x, eps))


@given(x=token_batches(), eps=distortions, seed=st.integers(0, 2**31))
def test_rotations_do_not_matter(x, eps, seed):
    turned = rotation(x.shape[1], seed) @ x @ rotation(x.shape[2], seed + 1)
    close(coding_rate(turned, eps), coding_rate(x, eps), rtol=0, atol=tolerance(x, eps))


@given(x=token_batches(), low=scales, high=scales)
def test_the_rate_grows_with_the_scale(x, low, high):
    low, high = sorted((low, high))
    assert (coding_rate(low * x) <= coding_rate(high * x) + tolerance(high * x, 0.5)).all()
    assert (coding_rate(x) >= 0).all()


@given(x=token_batches(), factor=scales)
def test_scale_and_distortion_are_one_thing(x, factor):
    close(coding_rate(factor * x, eps=factor * 0.5), coding_rate(x, eps=0.5), rtol=0, atol=tolerance(x, 0.5))


@given(x=token_batches())
def test_saying_everything_twice_costs_nothing(x):
    """D/(2n)·(ZZᵀ + ZZᵀ) = D/n·ZZᵀ."""
    close(coding_rate(torch.cat([x, x], 1)), coding_rate(x), rtol=0, atol=4 * tolerance(x, 0.5))


def test_known_rates():
    assert coding_rate(torch.zeros(2, 3, 4)).tolist() == [0, 0]
    close(coding_rate(torch.eye(4)[None], eps=0.5), [4 * math.log(5) / 2], rtol=1e-15)
    close(coding_rate(torch.tensor([[[3.0]]]), eps=1.0), [math.log(10) / 2], rtol=1e-15)


def test_eps_is_one_half_by_default():
    x = normal(1, 3, 4)
    assert coding_rate(x).equal(coding_rate(x, eps=0.5))
    assert not coding_rate(x).equal(coding_rate(x, eps=0.25))


def test_small_directions_beside_large_ones_are_coded():
    """A determinant of I + ZZᵀ in float64 cannot see the 1 beside 1e20."""
    x = torch.diag(torch.tensor([1e10, 1.0], dtype=torch.float64)) @ rotation(2, seed=1)
    # D/n = 1, ε = 1: ½ log(1 + 1e20) + ½ log 2; σ_2 is known to 1e-16·1e10
    close(coding_rate(x[None], eps=1.0), [math.log(1e10) + math.log(2) / 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e150, 1e200])
def test_the_rate_of_huge_tokens_is_finite(scale):
    x = torch.full((1, 1, 1), scale, dtype=torch.float64)
    close(coding_rate(x, eps=1.0), [math.log(scale)], rtol=1e-15)


def test_the_rate_of_tiny_tokens_is_not_rounded_away():
    x = torch.full((1, 1, 1), 1e-20, dtype=torch.float64)
    close(coding_rate(x, eps=1.0), [5e-41], rtol=1e-14)


@pytest.mark.parametrize("eps", [0.0, -0.5, math.nan, math.inf])
def test_an_eps_that_is_no_distortion_is_refused(eps):
    with pytest.raises(RankwiseError, match="`eps`: expected a finite number above 0"):
        coding_rate(torch.ones(1, 2, 3), eps=eps)
