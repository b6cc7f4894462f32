"""Singular values and the three ranks: laws, known spectra, edges."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.measures.measure_cases import (
    U,
    close,
    make,
    matrices,
    rank_tolerance,
    rotation,
    sigma_tolerance,
)

from rankwise.errors import RankwiseError
from rankwise.measures import (
    effective_rank,
    numerical_rank,
    rank_summary,
    singular_values,
    stable_rank,
)

NONZERO = ("signed", "stochastic", "causal", "low rank")
SMOOTH = [effective_rank, stable_rank]
smooth = pytest.mark.parametrize("rank", SMOOTH, ids=lambda f: f.__name__)
seeds = st.integers(0, 2**31)
deltas = st.floats(1e-3, 3)


def apart(m, delta):
    """No singular value so near δ that rounding decides whether it counts."""
    sigma = singular_values(m)
    assume(((sigma - delta).abs() > sigma_tolerance(m) * sigma.max()).all())


def ranks(m, delta):
    return torch.stack([effective_rank(m), stable_rank(m), numerical_rank(m, delta)])


# --- laws ------------------------------------------------------------------------------------------------


@given(m=matrices())
def test_singular_values_carry_the_norm_and_fall(m):
    sigma = singular_values(m)
    assert sigma.shape == (min(m.shape),)
    assert (sigma >= 0).all()
    assert (sigma.diff() <= 0).all()
    close(sigma.square().sum(), m.square().sum(), rtol=2 * sigma_tolerance(m))


@given(m=matrices(kinds=NONZERO), factor=st.floats(1e-6, 1e6), sign=st.sampled_from([-1, 1]))
def test_ranks_do_not_depend_on_the_scale_if_delta_follows(m, factor, sign):
    delta = 0.1
    apart(m, delta)
    close(ranks(sign * factor * m, factor * delta), ranks(m, delta), rtol=rank_tolerance(m))


@given(m=matrices(kinds=NONZERO))
def test_stable_is_at_most_effective_is_at_most_full(m):
    """Σσ²/σ_1² ≤ Σσ/σ_1 = exp(min-entropy) ≤ exp(entropy) ≤ N."""
    up = 1 + rank_tolerance(m)
    assert 1 <= stable_rank(m) <= effective_rank(m) * up
    assert effective_rank(m) <= min(m.shape) * up


@given(m=matrices(batch=(2,)), delta=deltas)
def test_the_summary_is_the_functions(m, delta):
    summary = rank_summary(m, delta)
    assert summary.singular_values.equal(singular_values(m))
    assert summary.numerical_rank.equal(numerical_rank(m, delta))
    assert summary.effective_rank.equal(effective_rank(m))
    assert summary.stable_rank.equal(stable_rank(m))
    assert summary.sigma_max.equal(torch.linalg.matrix_norm(m, 2))


# --- known spectra ---------------------------------------------------------------------------------------


@given(sigma=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), seed=seeds)
def test_a_matrix_with_a_known_spectrum(sigma, seed):
    sigma = torch.tensor(sorted(sigma, reverse=True), dtype=torch.float64)
    n = len(sigma)
    m = rotation(n, seed) @ sigma.diag() @ rotation(n, seed + 1)
    close(singular_values(m), sigma, rtol=0, atol=sigma_tolerance(m) * sigma[0].item())
    p = sigma / sigma.sum()
    close(effective_rank(m), math.prod(p.pow(-p).tolist()), rtol=rank_tolerance(m))
    close(stable_rank(m), (sigma / sigma[0]).square().sum(), rtol=rank_tolerance(m))


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1), (5, 5)])
@smooth
def test_ranks_of_a_rank_one_matrix_are_1(rank, shape):
    m = make("low rank", shape, seed=2)
    close(rank(m), 1.0, rtol=rank_tolerance(m))
    assert numerical_rank(m, delta=1e-6 * m.norm().item()) == 1


@smooth
def test_the_zero_matrix_has_rank_zero(rank):
    assert rank(torch.zeros(2, 3, 4)).tolist() == [0, 0]
    assert numerical_rank(torch.zeros(2, 3, 4)).tolist() == [0, 0]


def test_a_singular_value_of_exactly_delta_counts():
    assert numerical_rank(torch.tensor([[0.25]]), delta=0.25) == 1


def test_small_singular_values_are_exact_to_rounding_of_the_largest():
    """A Gram matrix would lose everything below 1e-8."""
    sigma = torch.tensor([1.0, 1e-9, 1e-12], dtype=torch.float64)
    m = rotation(3, seed=4) @ sigma.diag() @ rotation(3, seed=5)
    close(singular_values(m), sigma, rtol=0, atol=64 * U)


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("call", [numerical_rank, rank_summary], ids=lambda f: f.__name__)
def test_a_delta_that_is_not_positive_and_finite_is_refused(call, delta):
    m = torch.eye(2, dtype=torch.float64)
    with pytest.raises(RankwiseError, match="`delta`: expected a number in \\(0, ∞\\)"):
        call(m, delta=delta)
