"""Theorem 1: its bound over every head width, matrices above it, and the kept curves."""

import math

import pytest
import torch
from experiments.rank.rank_barrier import (
    STUDY,
    Settings,
    almost_orthonormal,
    measure,
    tables,
    theorem1_bound,
    theorem1_rank,
)
from hypothesis import given
from hypothesis import strategies as st

from rankwise.theory import hardmax_rank, rank_barrier

MISSED = 1e-7
"""Probability that a test of a mean fails by chance, if the seed were not fixed."""
SMALL = Settings(tokens=(6, 12), head_dims=(1, 4), temperatures=(1.0,), trials=3)


def sampling_error(tokens, trials):
    """Return how far a mean may exceed its expectation.

    Given the keys, the rows are independent and each changes the count by one at most, so by McDiarmid the
    mean of n counts exceeds its expectation by t with probability at most exp(−2 n t²/T).
    """
    return math.sqrt(tokens * math.log(1 / MISSED) / (2 * trials))


@given(tokens=st.integers(1, 10**6))
def test_the_exact_expectation_exceeds_the_bound_by_at_most_1_over_e(tokens):
    """T(1 − (1 − 1/T)^T) − (1 − 1/e)T falls from 1/e at T = 1 towards 1/(2e)."""
    excess = rank_barrier(tokens) - theorem1_bound(tokens)
    slack = 1e-14 * tokens
    assert 1 / (2 * math.e) - slack <= excess <= 1 / math.e + slack


@pytest.mark.parametrize("tokens", [4, 16, 48])
def test_no_head_width_brings_the_expectation_above_the_bound(tokens):
    """K from 1 to 4T: the O(1) is 1/e for orthonormal tokens (see theorem1_bound), the rest is sampling."""
    trials = 60
    allowed = theorem1_bound(tokens) + 1 / math.e + sampling_error(tokens, trials)
    means = [
        theorem1_rank(tokens, k, width=max(tokens, 8), trials=trials, seed=k).mean
        for k in sorted({1, 2, 3, 5, 8, 13, tokens // 2, tokens, 2 * tokens, 3 * tokens, 4 * tokens})
    ]
    assert max(means) < allowed
    # and pooled over the widest heads, for which the bound is tight, more sharply
    wide = [theorem1_rank(tokens, k, trials=trials, seed=100 + k).mean for k in range(3 * tokens, 4 * tokens)]
    allowed = theorem1_bound(tokens) + 1 / math.e + sampling_error(tokens, trials * len(wide))
    assert sum(wide) / len(wide) < allowed


def test_the_causal_counterpart_is_near_half():
    """No proof bounds it: wide heads approach (T + 1)/2 from either side."""
    tokens, barrier = 48, rank_barrier(48, "causal")
    mean = theorem1_rank(tokens, 40 * tokens, mask="causal", trials=200).mean
    assert abs(mean - barrier) < sampling_error(tokens, 200) + 0.03 * barrier
    assert mean < 0.9 * rank_barrier(tokens)


def test_single_matrices_exceed_the_bound():
    """It bounds a mean over weights: weights made for it reach any rank."""
    tokens = 40
    x = almost_orthonormal(tokens, 64)
    scores = x @ x.T  # Q = K = X
    assert hardmax_rank(scores) == tokens
    cold = (scores / 0.05).softmax(-1)  # e^−20 off the diagonal
    assert (torch.linalg.svdvals(cold) >= 1e-2).sum() == tokens
    previous = x @ x.roll(-1, 0).T  # row i scores the token before it
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    previous[0] = 0
    assert hardmax_rank(previous, causal) == tokens - 1
    assert tokens - 1 > theorem1_bound(tokens) + 1


@given(
    tokens=st.integers(1, 20),
    more=st.integers(0, 10),
    share=st.sampled_from([0.0, 1e-6, 0.5, 0.99]),
    seed=st.integers(0, 99),
)
def test_tokens_are_orthonormal_up_to_epsilon(tokens, more, share, seed):
    epsilon = share / tokens
    x = almost_orthonormal(tokens, tokens + more, epsilon, seed)
    assert x.shape == (tokens, tokens + more)
    error = x @ x.T - torch.eye(tokens)
    # QR, eigenvectors and products: some 10·T roundings of entries of size 1
    rounding = 1e-14 * (10 + tokens)
    assert error.abs().max() <= epsilon + rounding
    assert torch.equal(almost_orthonormal(tokens, tokens + more, epsilon, seed), x)
    if share > 0.1 and tokens > 4:  # ε is used: the largest of 15 uniform entries
        assert error.abs().max() > 0.5 * epsilon


# --- the experiment --------------------------------------------------------------------------------------


def test_every_mask_temperature_and_length_has_a_curve_and_a_row() -> None:
    report = measure(SMALL)
    lines = [line for table in tables(report).values() for line in table.splitlines()]
    assert [(one["mask"], one["temperature"], one["tokens"]) for one in report["curves"]] == [
        (mask, temperature, tokens)
        for mask in ("full", "causal")
        for temperature in (0.0, 1.0)
        for tokens in (6, 12)
    ]
    for one in report["curves"]:
        assert 1 <= min(one["mean"]) <= max(one["mean"]) <= one["tokens"]
        assert one["barrier"] == pytest.approx(rank_barrier(one["tokens"], one["mask"]), abs=1e-4)
        cells = [f"{mean / one['tokens']:.3f}" for mean in one["mean"]]
        assert any(
            line.startswith(f"| {one['tokens']} | {cells[0]} (") and cells[1] in line for line in lines
        )
    assert report["theorem1_bound"]["12"] == pytest.approx(theorem1_bound(12), abs=1e-4)


@pytest.mark.parametrize(
    ("tokens", "shares"), [(50, (0.04, 0.54, 0.63)), (200, (0.01, 0.44, 0.61)), (800, (0.003, 0.34, 0.60))]
)
def test_kept_curves_are_below_the_bound_and_as_announced(tokens, shares) -> None:
    report, dims = STUDY.kept(), Settings().head_dims
    assert report["settings"]["head_dims"] == list(dims)
    found = {(one["mask"], one["temperature"], one["tokens"]): one for one in report["curves"]}
    one = found["full", 0.0, tokens]
    for mean, std in zip(one["mean"], one["std"], strict=True):
        assert mean < theorem1_bound(tokens) + 1 + 4 * std / math.sqrt(Settings().trials)
    for k, share in zip((1, 16, 256), shares, strict=True):
        assert one["mean"][dims.index(k)] / tokens == pytest.approx(share, abs=0.02)


def test_kept_curves_are_repeated() -> None:
    """Each curve has its own seeds, so a part of the run repeats that part."""
    part = Settings(tokens=(50,), head_dims=(1, 8, 64), temperatures=(1.0,))
    kept = {(one["mask"], one["temperature"], one["tokens"]): one for one in STUDY.kept()["curves"]}
    for one in measure(part)["curves"]:
        stored = kept[one["mask"], one["temperature"], 50]["mean"]
        # another processor may round a tie the other way: one winner in one of ten trials
        wanted = [stored[Settings().head_dims.index(k)] for k in part.head_dims]
        assert one["mean"] == pytest.approx(wanted, abs=0.11)
