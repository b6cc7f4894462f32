"""Ranks of random heads: against singular values of the same draws, their limits, and interpolation."""

import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.torch_names import Operations

from rankwise.errors import ShapeError
from rankwise.theory import random_head_rank, random_rank, rank_barrier
from rankwise.theory.random_heads import Spectra, simulate_spectra


def band(tokens, window):
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    return ones.tril(window - 1) & ones.triu(1 - window)


def by_hand(tokens, head_dim, seen, temperature, delta, trials, seed):
    """Singular values of every matrix, row by row from its own columns."""
    generator = torch.Generator().manual_seed(seed)
    ranks = []
    for _ in range(trials):
        query, key = (
            torch.randn(n, head_dim, dtype=torch.float64, generator=generator)
            for n in (tokens, seen.shape[1])
        )
        matrix = torch.zeros(seen.shape, dtype=torch.float64)
        for i in range(tokens):
            columns = seen[i].nonzero().flatten()
            if len(columns):
                scores = key[columns] @ query[i]
                if temperature == 0:
                    matrix[i, columns[scores.argmax()]] = 1
                else:
                    matrix[i, columns] = (scores / temperature).softmax(-1)
        ranks.append(int((torch.linalg.svdvals(matrix) >= delta).sum()))
    return ranks


@pytest.mark.parametrize("temperature", [0.0, 0.3, None, 5.0])
@pytest.mark.parametrize(("mask", "window"), [("full", None), ("causal", None), ("causal", 5), ("full", 5)])
def test_it_counts_singular_values_of_its_draws(mask, window, temperature):
    for tokens, head_dim in ((1, 1), (2, 3), (17, 2), (40, 16)):
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        seen = seen.tril() if mask == "causal" else seen
        seen = seen & band(tokens, window) if window else seen
        tau = math.sqrt(head_dim) if temperature is None else temperature
        # δ of an odd value: that a singular value lies within 1e-15 of it is as good as impossible
        ranks = by_hand(tokens, head_dim, seen, tau, 0.0137, 5, seed=11)
        got = random_head_rank(tokens, head_dim, mask, window, temperature, delta=0.0137, trials=5, seed=11)
        assert got == (statistics.mean(ranks), pytest.approx(statistics.stdev(ranks)), 5), tokens


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_columns_may_outnumber_rows(temperature):
    ranks = by_hand(12, 4, torch.ones(12, 30, dtype=torch.bool), temperature, 0.0137, 4, seed=0)
    assert random_head_rank(12, 4, "full", None, temperature, 0.0137, 4, sources=30).mean == statistics.mean(
        ranks
    )


def test_one_simulation_serves_every_delta():
    """Below the accuracy of the Gram matrix, a second simulation with singular values."""
    asked = (0.5, 0.1, 1e-2, 1e-3)
    random_head_rank(77, 3, trials=2, seed=5)
    with Operations() as seen:
        ranks = [random_head_rank(77, 3, trials=2, seed=5, delta=delta).mean for delta in asked]
    assert not seen.functions
    assert ranks == [
        statistics.mean(by_hand(77, 3, torch.ones(77, 77, dtype=torch.bool), 3**0.5, delta, 2, seed=5))
        for delta in asked
    ]
    with Operations() as seen:
        fine = random_head_rank(77, 3, trials=2, seed=5, delta=1e-9).mean
    assert seen.functions
    assert fine == statistics.mean(
        by_hand(77, 3, torch.ones(77, 77, dtype=torch.bool), 3**0.5, 1e-9, 2, seed=5)
    )


def test_the_limits_of_the_temperature():
    for mask in ("full", "causal"):
        cold = random_head_rank(50, 8, mask, temperature=1e-12, trials=4)
        assert cold == random_head_rank(50, 8, mask, temperature=0.0, trials=4)
        assert random_head_rank(50, 8, mask, temperature=1e-320, trials=4) == cold
    # at 10⁶ every row is 1/T to six digits: singular values 1 and at most T·10⁻⁶·8/T
    assert random_head_rank(50, 8, temperature=1e6, trials=4) == (1.0, 0.0, 4)


def test_equal_weights_are_the_limit_of_a_high_temperature():
    for mask, window in (("causal", None), ("full", 5), ("causal", 7)):
        even = random_head_rank(50, 8, mask, window, temperature=math.inf, trials=3)
        assert even == random_head_rank(50, 1, mask, window, temperature=1e9, trials=3)
        assert even.std == 0


@pytest.mark.parametrize("delta", [1.0, 1.2, 1.9, 3.0])
def test_hardmax_columns_count_by_how_often_they_win(delta):
    """Their singular values are √wins: above δ = 1, a column that wins once no longer counts."""
    ranks = by_hand(60, 2, torch.ones(60, 60, dtype=torch.bool), 0, delta - 1e-9, 4, seed=0)
    assert random_head_rank(60, 2, temperature=0.0, trials=4, delta=delta).mean == statistics.mean(ranks)


def test_wide_hardmax_heads_reach_the_barrier_from_below():
    """Keys of equal length would make winners uniform; the variance of their lengths falls as 1/K."""
    for mask in ("full", "causal"):
        barrier = rank_barrier(60, mask)
        null = random_head_rank(60, 6000, mask, temperature=0.0, trials=60)
        # five standard errors, and 2 % for the last spread of the lengths: they vary by 1/√(2K) = 0.9 %
        assert abs(null.mean - barrier) < 5 * null.std / math.sqrt(60) + 0.02 * barrier
        assert random_head_rank(60, 4, mask, temperature=0.0, trials=60).mean < 0.8 * barrier


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = random_head_rank(19, 7, seed=1, trials=3)
    assert torch.equal(torch.get_rng_state(), before)
    simulate_spectra.cache_clear()
    torch.manual_seed(6)
    assert random_head_rank(19, 7, seed=1, trials=3) == one
    assert random_head_rank(190, 7, seed=2, trials=3) != random_head_rank(190, 7, seed=1, trials=3)


interpolated = partial(random_head_rank, interpolate=True)


def test_one_trial_has_no_spread():
    null = random_head_rank(10, 4, trials=1)
    assert (math.isnan(null.std), null.trials) == (True, 1)


# --- between simulated lengths ------------------------------------------------------------------


def simulated_by(monkeypatch, ask):
    """The (rows, trials) that are simulated, if each has the rank of its number of rows; and the answer."""
    simulated = []

    def spectra_of(rows, *key, **_):
        simulated.append((rows, key[5]))
        return Spectra(np.ones((key[5], rows)), 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(random_rank, "simulate_spectra", spectra_of)
        return simulated, ask()


def lengths_simulated(size: int, window: int | None) -> tuple[list[int], float]:
    """The lengths that are simulated, and the mean if the rank is the length itself."""
    simulated, got = simulated_by(
        pytest.MonkeyPatch(), lambda: interpolated(size, 4, window=window, trials=1)
    )
    return [rows for rows, _ in simulated], got.mean


@given(size=st.integers(1, 4096), window=st.none() | st.integers(1, 6000))
def test_simulated_lengths_lie_on_either_side_and_are_few(size, window):
    """A null that grows with the length, or with a power of it, is met in between."""
    lengths, between = lengths_simulated(size, window)
    assert len(lengths) <= 2
    assert min(lengths) <= size <= max(lengths) <= 1.5 * min(lengths)
    assert between == pytest.approx(size, rel=1e-12)


def test_all_lengths_of_a_data_set_take_few_simulations():
    for window in (None, 100):
        lengths = {at for size in range(1, 4097, 3) for at in lengths_simulated(size, window)[0]}
        assert len(lengths) <= 32 + 14 + 4
        assert max(lengths) == 4096


@pytest.mark.parametrize(
    ("mask", "window", "temperature"),
    [
        ("full", None, None),
        ("causal", None, None),
        ("full", None, 0.0),
        ("causal", None, 0.0),
        ("causal", 60, None),
        ("full", 60, None),
    ],
)
@pytest.mark.parametrize("head_dim", [1, 4, 32])
def test_interpolation_is_within_its_documented_error(mask, window, temperature, head_dim):
    for tokens in (34, 60, 76, 108, 150):  # half way between simulated lengths, and nearer to an end
        options = (head_dim, mask, window, temperature)
        got = interpolated(tokens, *options, trials=24)
        direct = random_head_rank(tokens, *options, trials=24, seed=1)
        stderr = math.hypot(got.std, direct.std) / math.sqrt(24)
        allowed = 0.01 if head_dim >= 4 else 0.04
        assert abs(got.mean - direct.mean) < 4 * stderr + allowed * direct.mean
        assert got.trials == 24


def test_the_spread_is_interpolated_too():
    got, ends = interpolated(54, 8), [random_head_rank(n, 8) for n in (45, 64)]
    assert min(end.std for end in ends) <= got.std <= max(end.std for end in ends)
    assert ends[0].mean < got.mean < ends[1].mean


def test_short_and_simulated_lengths_are_exact():
    for tokens in (1, 2, 31, 32, 45, 64, 91, 128):
        assert interpolated(tokens, 8) == random_head_rank(tokens, 8)
    assert interpolated(70, 8, "causal", window=70) == random_head_rank(70, 8, "causal", window=70)


def test_cross_attention_between_lengths():
    for tokens, sources in ((38, 76), (76, 38), (20, 76), (76, 64)):
        got = interpolated(tokens, 16, sources=sources, trials=16)
        direct = random_head_rank(tokens, 16, sources=sources, trials=16, seed=1)
        stderr = math.hypot(got.std, direct.std) / 4
        assert abs(got.mean - direct.mean) < 4 * stderr + 0.01 * direct.mean


@pytest.mark.parametrize(("mask", "window"), [("full", None), ("causal", None), ("full", 40)])
def test_as_many_columns_as_rows_may_be_said(mask, window):
    got = interpolated(54, 8, mask, window, sources=54)
    assert got == interpolated(54, 8, mask, window)


def test_no_singular_value_reaches_delta():
    assert interpolated(54, 8, delta=50.0).mean == 0


def test_long_sequences_have_fewer_trials_and_too_long_ones_none(monkeypatch):
    for tokens, trials in ((1024, 8), (1448, 4), (2048, 2), (4096, 2)):
        assert simulated_by(monkeypatch, lambda at=tokens: interpolated(at, 8))[0] == [(tokens, trials)]
    for options in ({}, {"temperature": 0.0, "tokens": 16385}, {"tokens": 64, "sources": 10**6}):
        simulated, lost = simulated_by(
            monkeypatch, lambda given=options: interpolated(**{"tokens": 4097, "head_dim": 8} | given)
        )
        assert simulated == []
        assert (math.isnan(lost.mean), math.isnan(lost.std), lost.trials) == (True, True, 0)
    assert simulated_by(monkeypatch, lambda: interpolated(16384, 8, temperature=0.0))[1].mean == 16384


def test_a_matrix_of_the_largest_size_is_simulated_and_one_row_more_is_not(monkeypatch):
    monkeypatch.setattr(random_rank, "MAX_ENTRIES", 64 * 32)
    assert 1 <= random_head_rank(64, 2, sources=32, trials=1).mean <= 32
    assert interpolated(64, 2, sources=32, trials=1).trials == 1
    with pytest.raises(ShapeError, match="65 × 32"):
        random_head_rank(65, 2, sources=32, trials=1)
    assert interpolated(128, 2, sources=32).trials == 0
