"""The nulls of a head: of each sequence's own length, over a band of δ, and a finding only against all."""

import math

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw


class Attention(nn.Module):
    """Attention of queries and keys that are given."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=self.is_causal)


def random_heads(tokens: int, sources: int | None = None, heads: int = 4, width: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    sizes = (tokens, tokens if sources is None else sources)
    return tuple(torch.randn(1, heads, size, width, generator=generator) for size in sizes)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_that_are_the_null_have_its_rank_whatever_their_lengths(is_causal):
    """The rank of random heads is a concave function of the length: it may not be taken at a mean length."""
    batches = [random_heads(tokens, seed=seed) for tokens in (16, 512) for seed in range(4)]
    heads = rw.audit(Attention(is_causal), batches).heads
    # One matrix's rank varies by less than 4 % of it at these sizes; the mean of 8 of them, less than 1.5 %,
    # against the mean of 8 simulated at each length, as much: 5 % is beyond two standard errors of both.
    assert [head.numerical_rank / head.random_rank for head in heads] == pytest.approx([1] * 4, abs=0.05)


def test_cross_attention_has_the_null_of_each_pair_of_lengths():
    """At the mean lengths (68, 68) both sides would be as long, as no sequence is."""
    batches = [random_heads(*pair, seed=seed) for pair in ((8, 128), (128, 8)) for seed in range(4)]
    for head in rw.audit(Attention(), batches).heads:
        assert head.numerical_rank / head.random_rank == pytest.approx(1, abs=0.05)


def test_a_null_that_one_sequence_lacks_is_not_the_mean_of_the_others(monkeypatch):
    monkeypatch.setattr("rankwise.theory.null.MAX_ENTRIES", 64 * 64)
    batches = [random_heads(16), random_heads(65)]
    assert all(math.isnan(head.random_rank) for head in rw.audit(Attention(), batches).heads)
    assert all(head.random_rank > 1 for head in rw.audit(Attention(), batches[:1]).heads)
