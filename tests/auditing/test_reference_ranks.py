"""Reference ranks of heads: masks are named block by block, and a finding is against all references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import reference_ranks
from rankwise.auditing.reference_ranks import Mask, hardmax_rank, masks_of
from rankwise.errors import ShapeError
from rankwise.operators import DenseMixing
from rankwise.theory import random_head_rank, rank_barrier_of_rows, uniform_rank


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
    monkeypatch.setattr("rankwise.theory.random_rank.MAX_ENTRIES", 64 * 64)
    batches = [random_heads(16), random_heads(65)]
    assert all(math.isnan(head.random_rank) for head in rw.audit(Attention(), batches).heads)
    assert all(head.random_rank > 1 for head in rw.audit(Attention(), batches[:1]).heads)


def beyond(model: nn.Module, batch: tuple[Tensor, ...], delta: float = 1e-2) -> list[str]:
    found = rw.audit(model, [batch], delta=delta).findings
    return [finding.code for finding in found if finding.code in ("HIGH_RANK", "LOW_RANK")]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("delta", [1e-4, 1e-3, 1e-2, 1e-1])
def test_random_heads_at_another_temperature_are_not_beyond_the_nulls(is_causal, delta):
    """Between equal weights and hardmax lies nothing that was learnt, at whatever δ somebody may ask."""
    for sharpness in (0.0, 0.03, 0.1, 0.3, 3.0, 10.0, 100.0):
        query, key = random_heads(128, heads=2, width=16)
        assert beyond(Attention(is_causal), (sharpness * query, key), delta) == []


class Kept(nn.Module):
    """A layer whose operator is told by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_a_causal_mask_alone_is_neither_above_nor_below_chance(tokens):
    """Equal weights on all tokens up to each one: rank 0.94 T at T = 64, 0.15 T at 1,024."""
    even = torch.ones(tokens, tokens).tril() / torch.arange(1, tokens + 1)[:, None]
    sites = {"mix": lambda module, args, kwargs, output: rw.operators.DenseMixing(even[None, None])}
    audit = rw.audit(Kept(), [torch.ones(1, tokens, 4)], sites=sites)
    head = audit.heads[0]
    assert (head.mask, head.numerical_rank) == ("causal", head.uniform_rank)
    assert [point.numerical_rank for point in head.band] == [point.uniform_rank for point in head.band]
    assert [finding.code for finding in audit.findings if finding.code in ("HIGH_RANK", "LOW_RANK")] == []


def test_what_is_beyond_every_null_is_found():
    key = nn.functional.normalize(random_heads(256, heads=1, width=4)[0], dim=-1)
    # attention to the next token: full rank, of four features, of which random ones give 0.7 T at δ/√10
    assert beyond(Attention(), (1000 * key.roll(1, -2), key)) == ["HIGH_RANK"]
    first = torch.zeros(1, 1, 64, 8)
    first[..., 0, :] = 9.0  # all look at the first token: rank 1
    assert beyond(Attention(is_causal=True), (torch.ones_like(first), first)) == ["LOW_RANK"]


@pytest.mark.parametrize("method", ["exact", "estimate"])
def test_the_band_holds_the_ranks_at_its_thresholds(method):
    query, key = random_heads(100, heads=2)
    sigma = rw.measures.singular_values(rw.operators.SoftmaxMixing(query, key, is_causal=True))[0]
    audit = rw.audit(Attention(is_causal=True), [(query, key)], method=method)
    for head, values in zip(audit.heads, sigma, strict=True):
        assert [point.delta for point in head.band] == pytest.approx(
            [0.01 * 10 ** (step / 4) for step in (-2, -1, 0, 1, 2)]
        )
        for point in head.band:
            # 16·64 probes span everything here: an estimate is the count too
            assert point.numerical_rank == point.rank_low == point.rank_high == (values >= point.delta).sum()
            assert point.hardmax_rank == head.hardmax_rank
            assert (
                point.random_rank
                == random_head_rank(100, 8, "causal", delta=point.delta, interpolate=True).mean
            )
            assert point.uniform_rank == uniform_rank(100, "causal", delta=point.delta)
        middle = head.band[2]
        for name in ("numerical_rank", "rank_low", "rank_high", "random_rank", "uniform_rank"):
            assert getattr(middle, name) == getattr(head, name)


def test_the_hardmax_null_is_not_known_above_one():
    """A column that wins one row has the singular value 1."""
    head = rw.audit(Attention(), [random_heads(20)], delta=0.5).heads[0]
    assert [math.isnan(point.hardmax_rank) for point in head.band] == [False] * 4 + [True]
    assert math.isnan(rw.audit(Attention(), [random_heads(20)], delta=1.1).heads[0].hardmax_rank)


@pytest.mark.parametrize("sizes", [(12, 30), (30, 12)])
def test_a_window_over_another_sequence_has_one_null(sizes):
    class Near(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            away = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=away.abs() < 5)

    [head] = rw.audit(Near(), [random_heads(*sizes, heads=1)]).heads
    assert (head.mask, math.isnan(head.uniform_rank), math.isnan(head.random_rank)) == ("window", True, True)
    assert head.hardmax_rank > 1


def test_a_window_has_all_its_nulls_and_a_mask_without_a_name_one():
    class Masked(nn.Module):
        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.mask = mask

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=self.mask)

    near = torch.ones(40, 40, dtype=torch.bool).tril().triu(-9)
    [head] = rw.audit(Masked(near), [random_heads(40, heads=1)]).heads
    assert head.uniform_rank == uniform_rank(40, "causal", window=10)
    assert head.random_rank == random_head_rank(40, 8, "causal", window=10, interpolate=True).mean
    near[20, 30] = True
    [head] = rw.audit(Masked(near), [random_heads(40, heads=1)]).heads
    assert (head.mask, math.isnan(head.uniform_rank), math.isnan(head.random_rank)) == ("other", True, True)
    assert head.hardmax_rank > 1


def operator(mask: Tensor) -> DenseMixing:
    return DenseMixing(torch.ones(mask.shape), mask)


def band(tokens: int, sources: int, low: int, high: int) -> Tensor:
    offset = torch.arange(sources) - torch.arange(tokens)[:, None]
    return (offset >= low) & (offset <= high)


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (band(6, 6, -6, 6), Mask("full")),
        (band(6, 4, -6, 6), Mask("full")),
        (band(6, 6, -6, 0), Mask("causal")),
        (band(4, 9, -9, 5), Mask("causal")),  # the rows are the last of more columns
        (band(6, 6, -2, 0), Mask("window", "causal", 3)),
        (band(6, 6, -2, 2), Mask("window", "full", 3)),
        (band(6, 6, -1, 2), Mask("window", "", 2)),
        (band(6, 6, 1, 9), Mask("window", "", 0)),
        (torch.zeros(3, 3).bool(), Mask("other")),
        (band(6, 6, -6, 0) & (torch.arange(6) != 2), Mask("other")),
        (torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]).bool(), Mask("other")),
    ],
)
@pytest.mark.parametrize("entries", [1, 10, 10**6])
def test_names(monkeypatch, mask, pattern, entries):
    monkeypatch.setattr(reference_ranks, "BLOCK_ENTRIES", entries)
    assert masks_of(operator(mask[None, None])) == [[pattern]]


@settings(max_examples=60)
@given(
    size=st.tuples(*(st.integers(1, top) for top in (2, 3, 7, 7))),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
    entries=st.integers(1, 60),
)
def test_the_barrier_is_that_of_the_whole_mask(size, seed, share, entries):
    seen = torch.rand(size, generator=torch.Generator().manual_seed(seed)) <= share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_ranks, "BLOCK_ENTRIES", entries)
        got = hardmax_rank(operator(seen))
    torch.testing.assert_close(got, rw.theory.rank_barrier(size[2], mask=seen), rtol=1e-12, atol=1e-12)


def test_heads_may_see_differently():
    both = torch.stack([band(5, 5, -5, 0), band(5, 5, -5, 5)])[None]
    assert masks_of(operator(both)) == [[Mask("causal"), Mask("full")]]
    assert hardmax_rank(operator(both)).tolist()[0] == pytest.approx([3.0, rw.theory.rank_barrier(5)])


def test_no_rows_are_refused():
    with pytest.raises(ShapeError, match="at least one block"):
        rank_barrier_of_rows([])
