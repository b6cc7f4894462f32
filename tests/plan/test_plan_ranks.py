"""Ranks of random heads: the fast count against the definition, and the settings against theory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.plan.ranks import head_rank, nested_hardmax_ranks, trial_ranks
from rankwise.plan.states import RandomBlock, Setting, token_states, with_rope
from rankwise.theory import hardmax_rank, random_head_rank

CAUSAL = torch.ones(60, 60, dtype=torch.bool).tril()


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 300), widths=st.sets(st.integers(1, 12), min_size=1), seed=st.integers(0, 99))
def test_all_widths_at_once_are_what_each_is_alone(tokens: int, widths: set[int], seed: int) -> None:
    torch.manual_seed(seed)
    # Whole numbers: sums of products are exact in float32 in any order, and equal scores occur.
    query, key = torch.randint(-4, 5, (2, tokens, 12)).float()
    ordered = tuple(sorted(widths))
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for mask, seen in (("full", None), ("causal", causal)):
        wanted = [_first_winners(query[:, :k] @ key[:, :k].mT, seen) for k in ordered]
        assert nested_hardmax_ranks(query, key, ordered, mask) == wanted


def _first_winners(scores: torch.Tensor, seen: torch.Tensor | None) -> int:
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    first = (scores == scores.amax(-1, keepdim=True)).double().argmax(-1)
    return len(set(first.tolist()))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_width_is_counted_as_theory_counts(mask: str) -> None:
    query, key = torch.randn(2, 60, 5, generator=torch.Generator().manual_seed(0))
    seen = CAUSAL if mask == "causal" else None
    hard, soft = Setting(60, mask), Setting(60, mask, temperature=0.7)
    assert head_rank(hard, query, key) == hardmax_rank(query @ key.mT, seen)
    scores = (query.double() @ key.double().mT) / (0.7 * 5**0.5)
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    values = torch.linalg.svdvals(scores.softmax(-1))
    assert head_rank(soft, query, key) == int((values >= 0.01).sum())


def test_orthonormal_inputs_have_the_law_of_theory() -> None:
    """Two means of 30 trials: within 5 standard errors of each other."""
    own = torch.tensor([trial_ranks(Setting(80), (4, 8), trial)[0, 1] * 80 for trial in range(30)])
    null = random_head_rank(80, 8, temperature=0.0, trials=30, seed=7)
    assert abs(own.mean() - null.mean) < 5 * (own.std() ** 2 + null.std**2).sqrt() / 30**0.5


def test_narrow_heads_of_states_are_the_first_columns() -> None:
    setting = Setting(40, inputs="gaussian", width=32)
    assert trial_ranks(setting, (2, 8), 1)[0, 0] == trial_ranks(setting, (2, 4), 1)[0, 0]
    assert (trial_ranks(setting, (2, 8), 1) == trial_ranks(setting, (2, 8), 1)).all()


def test_rotary_scores_know_distances_alone() -> None:
    row = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).double().expand(20, 8)
    scores = with_rope(row) @ with_rope(row).mT
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-5, rtol=0)  # float32 angles
    torch.testing.assert_close(with_rope(row).norm(dim=-1), row.norm(dim=-1), atol=1e-5, rtol=0)


def test_states_have_rows_of_norm_root_d() -> None:
    for setting in (Setting(16, width=20), Setting(16, inputs="gaussian", width=8)):
        assert abs(token_states(setting, 0).square().mean() - 1) < 1e-5
    given = torch.randn(2, 16, 8)
    assert not torch.equal(*(token_states(Setting(16, given=given), trial) for trial in (0, 1)))


@pytest.mark.parametrize("block", ["pre", "post", "attention"])
def test_deeper_layers_take_groups_and_other_value_widths(block: str) -> None:
    setting = Setting(
        24,
        inputs="gaussian",
        width=16,
        heads=4,
        kv_heads=2,
        value_dim=3,
        layers=3,
        block=block,
        mask="causal",
    )
    ranks = trial_ranks(setting, (2, 5), 0) * 24
    assert ranks.shape == (3, 2)
    assert ranks.min() >= 1
    assert ranks.max() <= 24
    drawn = RandomBlock(setting, 5, torch.Generator().manual_seed(0))
    states = token_states(setting, 0)
    query, key = drawn.query_key(states)
    assert (query.shape, key.shape) == ((4, 24, 5), (2, 24, 5))
    # Causal mixing: the first token's next state knows the first token alone.
    one = drawn.mixed(states, query, key)[:1]
    again = RandomBlock(setting, 5, torch.Generator().manual_seed(0))
    query, key = again.query_key(states)
    changed = torch.cat([states[:1], states[1:] + 1])
    torch.testing.assert_close(again.mixed(changed, query, key)[:1], one)
