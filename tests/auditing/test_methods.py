"""Exact, estimated, or both in one audit: the numbers agree, and the record says which is which."""

import math

import pytest
import torch
from experiments.zoo.transformers import BERT, LLAMA, hugging_face
from torch import Tensor

import rankwise as rw
from rankwise.auditing import AuditSettings, measure
from rankwise.auditing.records import HeadRecord
from rankwise.errors import InputError
from rankwise.operators import ToeplitzMixing

RANKS = ("numerical_rank", "relative_rank", "effective_rank", "stable_rank", "sigma_max")
OTHERS = (
    "row_entropy",
    "first_token_mass",
    "max_token_mass",
    "row_distance",
    "identity_distance",
    "hardmax_rank",
)


def ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(5, 60, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], left: bool = False) -> dict[str, Tensor]:
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids(len(lengths), max(lengths)),
        "attention_mask": (keep.flip(-1) if left else keep).long(),
    }


def assert_alike(one: HeadRecord, other: HeadRecord) -> None:
    for name in (*RANKS, *OTHERS):
        # where 16·64 vectors span everything, an estimate is exact to √ε = 1e-8 of σ_1 and T of that in sums
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6, abs=1e-6), name
    assert (one.mask, one.nearest_head) == (other.mask, other.nearest_head)


@pytest.mark.parametrize(
    ("family", "batch"),
    [
        ("BertModel", padded([12, 7, 1])),
        ("LlamaModel", padded([9, 12], left=True)),
        ("BertModel", padded([5])),
    ],
    ids=["right", "left", "none"],
)
def test_an_estimate_of_small_heads_is_exact(family, batch):
    model = hugging_face(family, **(BERT if family == "BertModel" else LLAMA))()
    exact, estimated = (rw.audit(model, [batch], method=method) for method in ("exact", "estimate"))
    for one, other in zip(exact.heads, estimated.heads, strict=True):
        assert_alike(one, other)
        assert (one.estimated, other.estimated) == (0, one.sequences)
        assert one.stderr == {}
        assert set(other.stderr) == set(RANKS)
        assert one.rank_low == one.rank_high == one.numerical_rank
        assert other.rank_low <= one.numerical_rank <= other.rank_high
        assert other.spectrum == []
    assert exact.provenance.method == "exact"
    assert estimated.provenance.method == "estimated with 16 probes, 64 steps, seed 0"


def test_the_method_goes_by_the_real_tokens_of_each_sequence(monkeypatch):
    monkeypatch.setattr(measure, "EXACT_BYTES", 8 * 8 * 8)
    model = hugging_face("BertModel", **BERT)()
    mixed = rw.audit(model, [padded([12, 8, 3])])
    exact = rw.audit(model, [padded([12, 8, 3])], method="exact")
    heads = len(mixed.heads)
    assert {head.estimated for head in mixed.heads} == {1}
    assert mixed.provenance.method.startswith(
        f"{2 * heads} of {3 * heads} spectra exact, the others estimated"
    )
    for one, other in zip(mixed.heads, exact.heads, strict=True):
        assert_alike(one, other)
        assert len(one.spectrum) == 8  # of the first sequence that has one


@pytest.mark.parametrize(("tokens", "sources"), [(8192, 8192), (4096, 16384)])
def test_auto_goes_by_the_memory_of_one_matrix(tokens, sources):
    """However many heads and sequences there are: those are taken one after another."""

    def made(columns: int) -> rw.operators.SoftmaxMixing:
        return rw.operators.SoftmaxMixing(torch.empty(3, 40, tokens, 1), torch.empty(3, 40, columns, 1))

    assert not measure.is_estimated(made(sources), "auto")  # 512 MiB
    assert measure.is_estimated(made(sources + 1), "auto")
    assert measure.is_estimated(made(1), "estimate")
    assert not measure.is_estimated(made(sources + 1), "exact")


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("batch", [padded([12, 7]), padded([12, 12, 12])], ids=["padded", "whole"])
def test_heads_formed_a_few_at_a_time_have_the_same_numbers(room, batch, monkeypatch):
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
        assert one.band == other.band
        assert one.spectrum == other.spectrum


def test_a_count_that_cannot_be_resolved_is_an_interval_never_a_number(monkeypatch):
    monkeypatch.setattr(measure, "PROBES", 8)
    monkeypatch.setattr(measure, "STEPS", 4)
    model = hugging_face("LlamaModel", **LLAMA)()
    batches = [{"input_ids": ids(1, 60)}, {"input_ids": ids(1, 4, seed=2)}]
    delta = 0.02
    exact = rw.audit(model, batches, delta, method="exact")
    coarse = rw.audit(model, batches, delta, method="estimate")
    open_ones = [head for head in coarse.heads if math.isnan(head.numerical_rank)]
    assert open_ones  # four products with eight vectors do not tell σ near 0.02 apart
    for one, other in zip(coarse.heads, exact.heads, strict=True):
        assert one.rank_low <= other.numerical_rank <= one.rank_high
        if math.isnan(one.numerical_rank):
            assert one.rank_low < one.rank_high
    again = rw.Audit.model_validate_json(coarse.model_dump_json())
    assert [head.rank_low for head in again.heads] == [head.rank_low for head in coarse.heads]


class Kept(torch.nn.Module):
    """A layer whose operator is told by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


@pytest.mark.parametrize(("delta", "fallbacks"), [(1.0, 2), (0.5, 0)])
def test_where_a_singular_value_sits_on_delta_the_svd_decides_and_is_counted(delta, fallbacks):
    sites = {"mix": lambda module, args, kwargs, output: rw.operators.DenseMixing(torch.eye(100)[None, None])}
    audit = rw.audit(Kept(), [torch.ones(1, 100, 4)] * 2, delta, sites=sites)
    assert [(head.numerical_rank, head.fallbacks) for head in audit.heads] == [(100.0, fallbacks)]


def test_an_unknown_method_is_named():
    with pytest.raises(
        InputError, match=r"`method`: expected one of auto, exact, estimate, got 'estimated'.*mean"
    ):
        AuditSettings.of(method="estimated")


@pytest.mark.parametrize(("channels", "measured"), [(128, 128), (129, 16)])
def test_of_a_mixer_with_a_matrix_for_every_channel_a_sample_is_measured(channels, measured):
    kernel = torch.rand(1, channels, 9, generator=torch.Generator().manual_seed(0))
    sites = {"mix": lambda module, args, kwargs, output: ToeplitzMixing(kernel)}
    audit = rw.audit(Kept(), [torch.ones(1, 9, 4)], sites=sites)
    assert len(audit.heads) == measured
    numbers = [head.head for head in audit.heads]
    assert numbers == sorted(set(numbers))
    assert all(0 <= number < channels for number in numbers)
    wanted = rw.measures.effective_rank(ToeplitzMixing(kernel))[0, numbers]
    assert [head.effective_rank for head in audit.heads] == pytest.approx(wanted.tolist(), rel=1e-9)
    assert all(head.nearest_head in numbers for head in audit.heads)
    assert {math.isnan(head.hardmax_rank) for head in audit.heads} == {True}
    assert any("16 of the 129 channels" in note for note in audit.provenance.notes) == (measured == 16)
