"""Reference ranks equal the ranks of random, one-hot and uniform heads under the mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import matrices, normal
from tests.support.modules import GivenAttention, GivenOperator, sites_of
from tests.support.records import HEAD_MEASURES
from torch import Tensor

import rankwise as rw
from rankwise.auditing import reference_ranks
from rankwise.auditing.measure import measure_heads, sampled
from rankwise.auditing.reference_ranks import Mask, masks_of, one_hot_rank
from rankwise.errors import ShapeError
from rankwise.measures import estimate_spectrum, rank_summary
from rankwise.operators import DenseMixing, MixingOperator
from rankwise.theory import random_head_rank, rank_barrier_of_rows, uniform_rank
from rankwise.tracing import CapturedMixer


def band(tokens: int, sources: int, low: int, high: int) -> Tensor:
    offset = torch.arange(sources) - torch.arange(tokens)[:, None]
    return (offset >= low) & (offset <= high)


def random_heads(tokens: int, sources: int | None = None, heads: int = 4, width: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    sizes = (tokens, tokens if sources is None else sources)
    return tuple(torch.randn(1, heads, size, width, generator=generator) for size in sizes)


@pytest.mark.parametrize("is_causal", [False, True])
def test_random_heads_have_the_random_rank_at_all_lengths(is_causal):
    """The rank of random heads is a concave function of the length: a mean length has another rank."""
    batches = [random_heads(tokens, seed=seed) for tokens in (16, 512) for seed in range(4)]
    heads = rw.audit(GivenAttention(is_causal=is_causal), batches).heads
    # One matrix's rank varies by less than 4 % of it at these sizes; the mean of 8 of them, less than 1.5 %,
    # against the mean of 8 simulated at each length, as much: 5 % is beyond two standard errors of both.
    assert [head.numerical_rank / head.random_rank for head in heads] == pytest.approx([1] * 4, abs=0.05)


def test_cross_attention_has_the_random_rank_of_each_pair_of_lengths():
    """No pair is near the mean lengths (68, 68)."""
    batches = [random_heads(*pair, seed=seed) for pair in ((8, 128), (128, 8)) for seed in range(4)]
    for head in rw.audit(GivenAttention(), batches).heads:
        assert head.numerical_rank / head.random_rank == pytest.approx(1, abs=0.05)


def test_a_random_rank_is_unknown_if_one_sequence_has_none(monkeypatch):
    monkeypatch.setattr("rankwise.theory.random_rank.MAX_ENTRIES", 64 * 64)
    batches = [random_heads(16), random_heads(65)]
    assert all(math.isnan(head.random_rank) for head in rw.audit(GivenAttention(), batches).heads)
    assert all(head.random_rank > 1 for head in rw.audit(GivenAttention(), batches[:1]).heads)


@pytest.mark.parametrize("method", ["exact", "estimate"])
def test_ranks_and_references_are_counted_at_one_threshold(method):
    query, key = random_heads(100, heads=2)
    sigma = rw.measures.singular_values(rw.operators.SoftmaxMixing(query, key, is_causal=True))[0]
    heads = rw.audit(GivenAttention(is_causal=True), [(query, key)], 0.02, rank_method=method).heads
    for head, values in zip(heads, sigma, strict=True):
        # 16·64 probes span the whole space: an estimate is exact
        assert head.numerical_rank == head.rank_low == head.rank_high == (values >= 0.02).sum()
        assert head.random_rank == random_head_rank(100, 8, "causal", delta=0.02, interpolate=True).mean
        assert head.uniform_rank == uniform_rank(100, "causal", delta=0.02)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_equal_weights_under_a_causal_mask_have_the_uniform_rank(tokens):
    even = torch.ones(tokens, tokens).tril() / torch.arange(1, tokens + 1)[:, None]
    audit = rw.audit(
        GivenOperator(), [torch.ones(1, tokens, 4)], sites=sites_of(DenseMixing(even[None, None]))
    )
    assert (audit.heads[0].mask, audit.heads[0].numerical_rank) == ("causal", audit.heads[0].uniform_rank)


@pytest.mark.parametrize(("delta", "known"), [(1.0, True), (1.1, False)])
def test_the_one_hot_rank_is_unknown_above_one(delta: float, known: bool) -> None:
    """A column that one row selects has the singular value 1."""
    rank = rw.audit(GivenAttention(), [random_heads(20)], delta=delta).heads[0].one_hot_rank
    assert math.isfinite(rank) == known


WINDOW = torch.ones(40, 40, dtype=torch.bool).tril().triu(-9)
UNNAMED = WINDOW.clone()
UNNAMED[20, 30] = True


@pytest.mark.parametrize(
    ("mask", "name", "uniform"),
    [
        (band(12, 30, -4, 4), "window", None),
        (band(30, 12, -4, 4), "window", None),
        (WINDOW, "window", 10),
        (UNNAMED, "other", None),
    ],
)
def test_references_are_known_for_named_masks_of_square_attention(mask, name, uniform) -> None:
    [head] = rw.audit(GivenAttention(mask), [random_heads(*mask.shape, heads=1)]).heads
    assert head.mask == name
    assert head.one_hot_rank > 1
    if uniform is None:
        assert math.isnan(head.uniform_rank)
        assert math.isnan(head.random_rank)
    else:
        assert head.uniform_rank == uniform_rank(40, "causal", window=uniform)
        drawn = random_head_rank(40, 8, "causal", window=uniform, interpolate=True)
        assert head.random_rank == drawn.mean


def operator(mask: Tensor) -> DenseMixing:
    return DenseMixing(torch.ones(mask.shape), mask)


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (band(6, 6, -6, 6), Mask("full")),
        (band(6, 4, -6, 6), Mask("full")),
        (band(6, 6, -6, 0), Mask("causal")),
        (band(4, 9, -9, 5), Mask("causal")),  # rows are the last tokens of the columns
        (band(6, 6, -2, 0), Mask("window", "causal", 3)),
        (band(6, 6, -2, 2), Mask("window", "full", 3)),
        (band(6, 6, -1, 2), Mask("window", "", 2)),
        (band(6, 6, 1, 9), Mask("window", "", 0)),
        (torch.zeros(3, 3).bool(), Mask("other")),
        (band(6, 6, -6, 0) & (torch.arange(6) != 2), Mask("other")),
        (torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]).bool(), Mask("other")),
    ],
)
def test_masks_are_named_block_by_block(monkeypatch, mask, pattern):
    for entries in (1, 10, 10**6):
        monkeypatch.setattr(reference_ranks, "BLOCK_ENTRIES", entries)
        assert masks_of(operator(mask[None, None])) == [[pattern]], entries


@settings(max_examples=60)
@given(
    size=st.tuples(*(st.integers(1, top) for top in (2, 3, 7, 7))),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
    entries=st.integers(1, 60),
)
def test_the_hardmax_rank_of_blocks_equals_the_rank_of_the_whole_mask(size, seed, share, entries):
    seen = torch.rand(size, generator=torch.Generator().manual_seed(seed)) <= share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_ranks, "BLOCK_ENTRIES", entries)
        got = one_hot_rank(operator(seen))
    torch.testing.assert_close(got, rw.theory.rank_barrier(size[2], mask=seen), rtol=1e-12, atol=1e-12)


def test_each_head_has_its_own_mask():
    both = torch.stack([band(5, 5, -5, 0), band(5, 5, -5, 5)])[None]
    assert masks_of(operator(both)) == [[Mask("causal"), Mask("full")]]
    assert one_hot_rank(operator(both)).tolist()[0] == pytest.approx([3.0, rw.theory.rank_barrier(5)])


def test_a_mask_without_rows_is_refused():
    with pytest.raises(ShapeError, match="at least one block"):
        rank_barrier_of_rows([])


RANK = next(one for one in HEAD_MEASURES if one.name == "numerical_rank")


@given(m=matrices(batch=(3,)), power=st.integers(-60, 60))
def test_the_relative_rank_counts_singular_values_of_the_matrix_over_its_norm(m, power):
    sigma = torch.linalg.svdvals(m)
    counted = (sigma >= 0.05 * sigma[:, :1]).sum(-1).double()
    near = ((sigma / sigma[:, :1] - 0.05).abs() < 1e-9).any(-1) | (sigma[:, 0] == 0)
    found = rank_summary(m * 2.0**power, 0.05).scale_free_rank
    assert found[~near].equal(counted[~near])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 37.0])
def test_the_relative_rank_by_eigenvalues_equals_the_svd(scale):
    m = scale * normal(4, 130, 130) @ torch.diag(torch.logspace(0, -5, 130, dtype=torch.float64))
    sigma = torch.linalg.svdvals(m)
    for delta in (1e-2, 1e-4):
        wanted = (sigma >= delta * sigma[:, :1]).sum(-1).double()
        assert rank_summary(m, delta).scale_free_rank.equal(wanted)


def test_a_singular_value_at_the_relative_threshold_needs_the_svd():
    values = torch.ones(120, dtype=torch.float64)
    values[60:] = 0.01
    left = torch.linalg.qr(normal(120, 120, seed=1))[0]
    m = (left * values) @ torch.linalg.qr(normal(120, 120, seed=2))[0]
    summary = rank_summary(8 * m[None], 0.01)
    assert summary.used_svd.item() == 1


def test_the_relative_rank_of_zero_is_zero_and_of_nan_is_nan():
    m = torch.zeros(2, 100, 100, dtype=torch.float64)
    m[1, 0, 0] = math.nan
    found = rank_summary(m).scale_free_rank
    assert found[0] == 0
    assert found[1].isnan()


def test_the_interval_of_an_estimate_contains_the_relative_rank():
    m = 50 * normal(2, 90, 90) @ torch.diag(torch.logspace(0, -4, 90, dtype=torch.float64))
    exact = rank_summary(m, 0.01).scale_free_rank
    found = estimate_spectrum(m, 8, 30).relative_count(0.01)
    assert ((found.low <= exact) & (exact <= found.high)).all()


def record(kind: str, operator: MixingOperator, method: str = "auto"):
    valid = torch.ones(operator.shape[0], operator.shape[-1], dtype=torch.bool)
    site = CapturedMixer("mixer", 0, kind, operator, valid, valid, sequences=operator.shape[0], stack="s")
    return measure_heads(*sampled(site), 0.01, method).to_records()[0]


@pytest.mark.parametrize("method", ["exact", "estimate"])
def test_mixers_with_signs_are_shown_by_relative_rank_and_softmax_by_numerical_rank(method):
    matrix = normal(1, 1, 40, 40) @ torch.diag(torch.logspace(0, -3, 40, dtype=torch.float64))
    small, large = (record("selective", DenseMixing(scale * matrix), method) for scale in (1e-4, 1e3))
    assert small.scale_free_rank == large.scale_free_rank > 0
    assert small.numerical_rank < large.numerical_rank
    assert RANK.value(small) == RANK.value(large) == small.scale_free_rank / 40
    softmax = record("softmax", DenseMixing(1e-4 * matrix), method)
    assert RANK.value(softmax) == softmax.numerical_rank / 40
