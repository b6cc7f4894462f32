"""The chunked scan against the recurrence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.mixing_laws import near, normal

from rankwise.operators.scan import log_weights, scan, scan_transposed

EXTREME = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30, -math.inf]
EPS = torch.finfo(torch.float64).eps


def decays(tokens, seed):
    """Log decays of every size, from a = 1 to a = 0."""
    picks = torch.randint(len(EXTREME), (tokens,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(EXTREME, dtype=torch.float64)[picks]


def weights_by_hand(log_decay):
    """Π a_r for s < r ≤ t as a product of plain numbers, and 0 above the diagonal."""
    a = [math.exp(x) for x in log_decay.tolist()]
    rows = [[math.prod(a[s + 1 : t + 1]) if s <= t else 0.0 for s in range(len(a))] for t in range(len(a))]
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=25)
@given(tokens=st.integers(1, 12), seed=st.integers(0, 99), start=st.integers(0, 11))
def test_weights_are_products_of_decays(tokens, seed, start):
    log_decay, start = decays(tokens, seed), min(start, tokens - 1)
    got = log_weights(log_decay, start)
    assert got.shape == (tokens - start, tokens)
    # a log sum of n terms is off by n·u·|L| and e^L·|L| ≤ 1/e; a product of n numbers by n·u relatively
    near(got.exp(), weights_by_hand(log_decay)[start:], torch.tensor(2 * tokens * EPS))


def test_a_token_after_a_zero_decay_keeps_its_own_decay():
    """As a difference of running sums the last weight would be exp(−inf + inf) or exp(0)."""
    for wall in (-math.inf, -1e30):
        log_decay = torch.tensor([0.0, wall, -0.5, -0.25], dtype=torch.float64)
        got = log_weights(log_decay)
        assert got[3, 1] == -0.75
        assert got[3, 0] == wall


@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.parametrize("direction", [scan, scan_transposed])
@settings(max_examples=25)
@given(tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_chunks_change_nothing(decayed, direction, tokens, seed):
    left, right, values = (normal(2, tokens, n, seed=seed + n) for n in (3, 3, 2))
    log_decay = decays(tokens, seed).expand(2, -1) if decayed else None
    weights = weights_by_hand(decays(tokens, seed)) if decayed else torch.ones(tokens, tokens).tril().double()
    matrix = (left @ right.mT) * weights
    magnitude = left.abs() @ right.mT.abs() * torch.ones(tokens, tokens).tril()
    matrix, magnitude = (matrix, magnitude) if direction is scan else (matrix.mT, magnitude.mT)
    # 3 + T products are summed, and a weight ≤ 1 is off by 2T·u: γ of that many, for both sides
    slack = 2 * (3 * tokens + 3) * EPS * magnitude @ values.abs()
    for chunk in (1, 2, 7, 64, tokens):
        near(direction(left, right, log_decay, values, chunk), matrix @ values, slack)


def test_no_decay_over_a_long_sequence_counts_exactly():
    """With ones everywhere y_t = t + 1: whole numbers below 2^24, which float32 holds."""
    one = torch.ones(5000, 1)
    for log_decay in (None, torch.zeros(5000)):
        assert scan(one, one, log_decay, one).flatten().tolist() == list(range(1, 5001))
        assert scan_transposed(one, one, log_decay, one).flatten().tolist() == list(range(5000, 0, -1))
