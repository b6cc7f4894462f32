"""Exact and estimated ranks agree, and the records name the method of each rank."""

import math

import pytest
import torch
from experiments.zoo.transformers import BERT, LLAMA, hugging_face
from tests.support.modules import GivenOperator, sites_of, token_ids
from torch import Tensor

import rankwise as rw
from rankwise.auditing import HeadRecord, measure
from rankwise.operators import ToeplitzMixing

RANKS = ("numerical_rank", "scale_free_rank", "effective_rank", "stable_rank", "sigma_max")
OTHERS = ("row_entropy", "first_token_mass", "max_token_mass", "row_spread", "one_hot_rank")


def padded(lengths: list[int], left: bool = False) -> dict[str, Tensor]:
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {
        **token_ids(len(lengths), max(lengths)),
        "attention_mask": (keep.flip(-1) if left else keep).long(),
    }


def assert_alike(one: HeadRecord, other: HeadRecord) -> None:
    for name in (*RANKS, *OTHERS):
        # 16·64 vectors span the space: an estimate is exact to √ε = 1e-8 of σ_1, times T in sums
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6, abs=1e-6), name
    assert (one.mask, one.nearest_head) == (other.mask, other.nearest_head)


@pytest.mark.parametrize(
    ("family", "sizes", "batch"),
    [
        ("BertModel", BERT, padded([12, 7, 1])),
        ("LlamaModel", LLAMA, padded([9, 12], left=True)),
        ("BertModel", BERT, padded([5])),
    ],
    ids=["right", "left", "none"],
)
def test_an_estimate_of_small_heads_is_exact(family, sizes, batch):
    model = hugging_face(family, **sizes)()
    exact, estimated = (rw.audit(model, [batch], rank_method=method) for method in ("exact", "estimate"))
    for one, other in zip(exact.heads, estimated.heads, strict=True):
        assert_alike(one, other)
        assert (one.estimated_sequences, other.estimated_sequences) == (0, one.sequences)
        assert (one.stderr, set(other.stderr)) == ({}, set(RANKS))
        assert one.rank_low == one.rank_high == one.numerical_rank
        assert other.rank_low <= one.numerical_rank <= other.rank_high
        assert other.spectrum == []
    assert exact.provenance.rank_method == "exact"
    assert estimated.provenance.rank_method == "estimated with 16 probes, 64 steps, seed 0"


def test_the_method_depends_on_the_tokens_of_each_sequence_without_padding(monkeypatch):
    monkeypatch.setattr(measure, "EXACT_BYTES", 8 * 8 * 8)
    model = hugging_face("BertModel", **BERT)()
    mixed = rw.audit(model, [padded([12, 8, 3])])
    exact = rw.audit(model, [padded([12, 8, 3])], rank_method="exact")
    heads = len(mixed.heads)
    assert {head.estimated_sequences for head in mixed.heads} == {1}
    spectra = f"{2 * heads} of {3 * heads} spectra exact, the others estimated"
    assert mixed.provenance.rank_method.startswith(spectra)
    for one, other in zip(mixed.heads, exact.heads, strict=True):
        assert_alike(one, other)
        assert len(one.spectrum) == 8  # from the first sequence with a spectrum


@pytest.mark.parametrize(("tokens", "sources"), [(8192, 8192), (4096, 16384)])
def test_the_automatic_method_depends_on_the_memory_of_one_matrix(tokens, sources):
    """The numbers of heads and sequences do not matter: they are measured in turn."""

    def made(columns: int) -> rw.operators.SoftmaxMixing:
        return rw.operators.SoftmaxMixing(torch.empty(3, 40, tokens, 1), torch.empty(3, 40, columns, 1))

    assert not measure.is_estimated(made(sources), "auto")  # 512 MiB
    assert measure.is_estimated(made(sources + 1), "auto")
    assert measure.is_estimated(made(1), "estimate")
    assert not measure.is_estimated(made(sources + 1), "exact")


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("batch", [padded([12, 7]), padded([12, 12, 12])], ids=["padded", "whole"])
def test_limits_of_memory_do_not_change_the_numbers(room, batch, monkeypatch):
    model = hugging_face("BertModel", **BERT)()
    whole = rw.audit(model, [batch])
    decomposed = []
    decompose = measure.measures.rank_summary

    def spy(operator: rw.MixingOperator, *args: float, **options: object) -> object:
        decomposed.append(math.prod(operator.shape))
        return decompose(operator, *args, **options)

    monkeypatch.setattr(measure.measures, "rank_summary", spy)
    monkeypatch.setattr(measure, "MATRIX_BYTES", room * 8 * 12 * 12)
    few = rw.audit(model, [batch])
    assert max(decomposed) == min(room, BERT["num_attention_heads"]) * 12 * 12
    for one, other in zip(whole.heads, few.heads, strict=True):
        assert_alike(one, other)
        assert one.numerical_rank == other.numerical_rank
        assert one.spectrum == other.spectrum


def test_a_count_that_cannot_be_resolved_is_an_interval(monkeypatch):
    monkeypatch.setattr(measure, "PROBES", 8)
    monkeypatch.setattr(measure, "STEPS", 4)
    model = hugging_face("LlamaModel", **LLAMA)()
    batches, delta = [token_ids(1, 60), token_ids(1, 4, seed=2)], 0.02
    exact = rw.audit(model, batches, delta, rank_method="exact")
    coarse = rw.audit(model, batches, delta, rank_method="estimate")
    # four products with eight vectors do not resolve σ near 0.02
    assert any(math.isnan(head.numerical_rank) for head in coarse.heads)
    for one, other in zip(coarse.heads, exact.heads, strict=True):
        assert one.rank_low <= other.numerical_rank <= one.rank_high
        if math.isnan(one.numerical_rank):
            assert one.rank_low < one.rank_high
    again = rw.Audit.model_validate_json(coarse.model_dump_json())
    assert [head.rank_low for head in again.heads] == [head.rank_low for head in coarse.heads]


@pytest.mark.parametrize(("channels", "measured"), [(128, 128), (129, 16)])
def test_a_sample_of_channels_is_measured_if_there_are_many(channels, measured):
    kernel = torch.rand(1, channels, 9, generator=torch.Generator().manual_seed(0))
    audit = rw.audit(GivenOperator(), [torch.ones(1, 9, 4)], sites=sites_of(ToeplitzMixing(kernel)))
    assert len(audit.heads) == measured
    numbers = [head.head for head in audit.heads]
    assert numbers == sorted(set(numbers))
    assert all(0 <= number < channels for number in numbers)
    wanted = rw.measures.effective_rank(ToeplitzMixing(kernel))[0, numbers]
    assert [head.effective_rank for head in audit.heads] == pytest.approx(wanted.tolist(), rel=1e-9)
    assert all(head.nearest_head in numbers for head in audit.heads)
    assert {math.isnan(head.one_hot_rank) for head in audit.heads} == {True}
    assert any("16 of the 129 channels" in note for note in audit.provenance.notes) == (measured == 16)
