"""The barrier: against every assignment of winners, against simulation, and against itself."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.theory import rank_barrier

sizes = st.integers(1, 40)


def enumerated(mask):
    """Mean number of different winners over every assignment, exactly."""
    seen = [[j for j, allowed in enumerate(row) if allowed] for row in mask.tolist()]
    seen = [row for row in seen if row]
    total = sum(len(set(winners)) for winners in product(*seen))
    return Fraction(total, math.prod(len(row) for row in seen))


def band(tokens, window):
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    return ones.tril() & ones.triu(1 - window)


def near(got, wanted, tokens):
    """Each of S terms is a product of at most T factors: c·T·S·u, here relative to the sum."""
    assert float(got) == pytest.approx(float(wanted), rel=1e-15 * (8 + tokens), abs=1e-15)


@st.composite
def masks(draw):
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    bits = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return torch.tensor(bits).reshape(shape)


@settings(deadline=None)
@given(mask=masks())
def test_any_mask_against_every_assignment(mask):
    near(rank_barrier(len(mask), mask), enumerated(mask), 4)


@pytest.mark.parametrize("tokens", range(1, 6))
def test_named_masks_against_every_assignment(tokens):
    near(rank_barrier(tokens, "causal"), enumerated(band(tokens, tokens)), tokens)
    near(rank_barrier(tokens), enumerated(torch.ones(tokens, tokens)), tokens)


@settings(deadline=None)
@given(tokens=sizes)
def test_names_are_masks(tokens):
    near(rank_barrier(tokens), rank_barrier(tokens, torch.ones(tokens, tokens).bool()), tokens)
    near(rank_barrier(tokens, "causal"), rank_barrier(tokens, band(tokens, tokens)), tokens)


def test_the_limits_of_long_sequences():
    """Without a mask the share tends to 1 − 1/e, with an error of 1/(2e·T) to first order."""
    tokens = 10**6
    assert rank_barrier(tokens) / tokens == pytest.approx(1 - 1 / math.e, abs=1 / tokens)
    assert rank_barrier(tokens, "causal") == (tokens + 1) / 2


@pytest.mark.parametrize(("mask", "window"), [("full", None), ("causal", None), ("causal", 8)])
def test_simulated_hardmax_matrices_have_this_rank(mask, window):
    tokens, draws = 48, 4000
    seen = torch.ones(tokens, tokens).bool() if mask == "full" else band(tokens, window or tokens)
    generator = torch.Generator().manual_seed(0)
    winners = torch.multinomial(seen.double(), draws, replacement=True, generator=generator)  # T × draws
    ranks = torch.zeros(draws, tokens).scatter_(1, winners.T, 1.0).sum(1)
    stderr = ranks.std() / math.sqrt(draws)
    expected = rank_barrier(tokens, seen if window else mask)
    assert abs(ranks.mean() - expected) < 5 * stderr  # missed once in 2 million


def test_masks_come_in_batches():
    masks = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)) > 0.4
    got = rank_barrier(5, masks)
    assert got.dtype == torch.float64
    alone = torch.stack([torch.stack([rank_barrier(5, m) for m in row]) for row in masks])
    torch.testing.assert_close(got, alone, rtol=1e-14, atol=0)
    assert rank_barrier(5, torch.empty(0, 5, 7, dtype=torch.bool)).shape == (0,)


def test_rows_that_may_see_nothing_add_nothing():
    mask = band(4, 4)
    padded = torch.nn.functional.pad(mask, (0, 2, 0, 3))
    near(rank_barrier(7, padded), 2.5, 7)
    assert rank_barrier(3, torch.zeros(3, 3, dtype=torch.bool)) == 0
