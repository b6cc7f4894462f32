"""Ranks of random heads: the fast count against the definition, and the settings against theory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.plan.ranks import RandomHead, count_winners, hardmax_ranks
from rankwise.theory import hardmax_rank, random_head_rank

CAUSAL = torch.ones(60, 60, dtype=torch.bool).tril()


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 300), widths=st.sets(st.integers(1, 12), min_size=1), seed=st.integers(0, 99))
def test_ranks_of_all_widths_equal_the_rank_of_each_width(tokens: int, widths: set[int], seed: int) -> None:
    torch.manual_seed(seed)
    # Whole numbers: sums of products are exact in float32 in any order, and equal scores occur.
    query, key = torch.randint(-4, 5, (2, tokens, 12)).float()
    ordered = tuple(sorted(widths))
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for mask, seen in (("full", None), ("causal", causal)):
        wanted = [_first_winners(query[:, :k] @ key[:, :k].mT, seen) for k in ordered]
        assert hardmax_ranks(query, key, ordered, mask) == wanted


def _first_winners(scores: torch.Tensor, seen: torch.Tensor | None) -> int:
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    first = (scores == scores.amax(-1, keepdim=True)).double().argmax(-1)
    return len(set(first.tolist()))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_width_is_counted_as_theory_counts(mask: str) -> None:
    query, key = torch.randn(2, 60, 5, generator=torch.Generator().manual_seed(0))
    seen = CAUSAL if mask == "causal" else None
    assert count_winners(query, key, mask) == hardmax_rank(query @ key.mT, seen)


def test_orthonormal_inputs_have_the_law_of_theory() -> None:
    """Two means of 30 trials: within 5 standard errors of each other."""
    ranks = torch.tensor([RandomHead(80).trial((4, 8), trial)[1] * 80 for trial in range(30)])
    null = random_head_rank(80, 8, temperature=0.0, trials=30, seed=7)
    assert abs(ranks.mean() - null.mean) < 5 * (ranks.std() ** 2 + null.std**2).sqrt() / 30**0.5


def test_narrow_heads_are_the_first_columns_of_wider_ones() -> None:
    head = RandomHead(40)
    assert head.trial((2, 8), 1)[0] == head.trial((2, 4), 1)[0]
    assert (head.trial((2, 8), 1) == head.trial((2, 8), 1)).all()


def test_rotary_positions_give_equal_tokens_different_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without positions equal tokens have one winner; with rotary positions rows prefer different keys."""
    monkeypatch.setattr("torch.randn", lambda *size, **_: torch.ones(size))
    assert RandomHead(30).trial((8,), 0)[0] == 1 / 30
    assert RandomHead(30, positions="rope").trial((8,), 0)[0] > 2 / 30
