"""Merged audits of shards equal the audit of all sequences, in any order and grouping."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.auditing.same_audits import OF_THE_FIRST, compared
from tests.support.records import changed
from torch import nn
from typer.testing import CliRunner

import rankwise as rw
from rankwise.auditing.provenance import DataDigest, weights_digest
from rankwise.cli import app
from rankwise.errors import RecordError


def made() -> nn.Module:
    """Return two blocks over embedded tokens; token 7 is not finite."""
    embed, layer = nn.Embedding(16, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    embed.weight.data[7] = math.nan
    return nn.Sequential(embed, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return made()


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    """Return sequences of several lengths, one with a token that is not finite."""
    torch.manual_seed(1)
    rows = [torch.randint(0, 7, (1, length)) for length in (9, 12, 9, 2, 12, 9)]
    rows[2][0, 4] = 7
    return rows


@pytest.fixture(scope="module")
def shards(model, sequences) -> list[rw.Audit]:
    """Return an audit of each sequence."""
    return [rw.audit(model, [batch]) for batch in sequences]


def tree(parts: Sequence[rw.Audit], cuts: Sequence[int]) -> rw.Audit:
    """Merge the first parts, then the result with the next parts, and so on."""
    merged: list[rw.Audit] = []
    for start, stop in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        merged = [rw.Audit.merge([*merged, *parts[start:stop]])]
    return merged[0]


def test_merged_shards_equal_an_audit_of_all_sequences(model, sequences, shards) -> None:
    whole = rw.audit(model, sequences)
    kept = [finding for finding in whole.findings if finding.code != "OVERSIZED_HEADS"]  # rests on `OF_ALL`
    whole = whole.model_copy(update={"findings": kept})
    merged = rw.Audit.merge(shards)
    assert compared(whole, merged) == []
    assert merged.provenance.sequences == len(sequences)
    assert whole.heads[0].nonfinite_sequences == 1
    for first in OF_THE_FIRST:
        assert getattr(merged.heads[0], first) == getattr(whole.heads[0], first)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(6)), cuts=st.lists(st.integers(1, 5), max_size=3, unique=True))
def test_order_and_grouping_do_not_matter(shards, order, cuts) -> None:
    ordered = [shards[at] for at in order]
    assert compared(tree(ordered, sorted(cuts)), rw.Audit.merge(shards)) == []


def test_the_comparison_above_can_fail(shards) -> None:
    other = rw.Audit.merge(shards[:-1])
    found = " ".join(compared(rw.Audit.merge(shards), other))
    assert ".effective_rank:" in found
    assert ".std.effective_rank:" in found
    assert ".distances[1]:" in found
    assert ".sequences:" in found


def test_loaded_audits_merge_like_audits_in_memory(shards, tmp_path) -> None:
    loaded = [rw.Audit.load(audit.save(tmp_path / f"{n}.json")) for n, audit in enumerate(shards)]
    assert compared(rw.Audit.merge(loaded), rw.Audit.merge(shards)) == []
    assert rw.Audit.merge(loaded[:1]) is loaded[0]


def layer_and_batches(heads: int, lengths: Sequence[int]) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8 * heads, heads, 16, batch_first=True).eval()
    return layer, [3 * torch.randn(1, length, 8 * heads) for length in lengths]


def test_the_nearest_head_has_the_least_mean_distance_over_all_sequences() -> None:
    layer, batches = layer_and_batches(6, [9] * 5)
    apart = [rw.audit(layer, [batch]) for batch in batches]
    nearest = [[head.nearest_head for head in audit.heads] for audit in apart]
    assert any(one != nearest[0] for one in nearest), "nearest heads should differ between shards"
    assert compared(rw.audit(layer, batches), rw.Audit.merge(apart)) == []


def test_estimates_keep_their_standard_errors() -> None:
    layer, batches = layer_and_batches(2, (12, 9))
    apart = [rw.audit(layer, [batch], rank_method="estimate") for batch in batches]
    whole = rw.audit(layer, batches, rank_method="estimate")
    assert compared(whole, rw.Audit.merge(apart)) == []
    assert math.isfinite(whole.heads[0].stderr["effective_rank"])
    assert whole.provenance.rank_method.startswith("estimated")


def test_the_longest_sequences_determine_the_mask(shards) -> None:
    """A short sequence may fit into a window, or show only the causal part of a mask."""
    parts = [{"mask": "causal", "tokens": 4.0}, {"mask": "window", "tokens": 9.0}]
    audits = [
        changed(
            shards[index], every=part | {"merging": shards[index].heads[0].merging.model_copy(update=longest)}
        )
        for index, (part, longest) in enumerate(zip(parts, ({"longest": 4}, {"longest": 9}), strict=True))
    ]
    for order in (audits, audits[::-1]):
        assert {head.mask for head in rw.Audit.merge(order).heads} == {"window"}


def test_an_incomplete_shard_makes_the_merged_audit_incomplete(shards) -> None:
    assert rw.Audit.merge(shards[:2]).complete
    assert not rw.Audit.merge([shards[0], changed(shards[1], complete=False)]).complete


def test_a_rank_that_is_unknown_in_a_shard_is_unknown_after_merging(shards) -> None:
    unknown = changed(shards[0], every={"numerical_rank": math.nan, "first_token_mass": math.nan})
    merged = rw.Audit.merge([unknown, shards[1]]).heads[0]
    assert math.isnan(merged.numerical_rank)
    assert merged.first_token_mass == shards[1].heads[0].first_token_mass
    assert merged.counts["first_token_mass"] == 1


def test_costs_are_means_over_tokens_and_the_removable_set_is_dropped() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=32)).eval()
    batches = [{"input_ids": torch.randint(0, 32, (1, length))} for length in (9, 14)]
    apart = [rw.audit(model, [batch], importance="exact") for batch in batches]
    whole, merged = rw.audit(model, batches, importance="exact"), rw.Audit.merge(apart)
    random = {"curvature", "estimate"}  # probes of the second batch differ
    left_out = random | {"removable", "findings", "forward", "backward"}
    assert compared(whole, merged, left_out) == []
    assert whole.importance.removable is not None
    assert merged.importance.removable is None
    assert "takes runs on all of the data" in " ".join(merged.importance.notes)
    assert rw.Audit.merge([apart[0], rw.audit(model, batches[1:])]).importance is None


def test_measures_that_need_all_sequences_at_once_are_left_out_with_one_note(shards) -> None:
    layer, batches = layer_and_batches(2, (9, 9))
    merged = rw.Audit.merge([rw.audit(layer, [batch], at_init=2) for batch in batches])
    assert merged.at_init is merged.heads[0].at_init is None
    merged = rw.Audit.merge([rw.Audit.merge(shards[:2]), shards[3]])
    assert all(math.isnan(head.required_head_dim) and head.head_dim == 4 for head in merged.heads)
    assert sum("no required widths" in note for note in merged.provenance.notes) == 1


ORIGIN = {
    "model": "another", "model_class": "x.Y", "revision": "abc", "parameters": 5, "delta": 0.5,
    "model_dtype": "float16", "weights_digest": "abc",
}  # fmt: skip


@pytest.mark.parametrize("field", ORIGIN)
def test_audits_that_differ_in_more_than_sequences_are_refused(shards, field) -> None:
    values = f".*{getattr(shards[0].provenance, field)!r}.*{ORIGIN[field]!r}"
    with pytest.raises(RecordError, match=f"the same {field} in all of them{values}"):
        rw.Audit.merge([shards[0], changed(shards[1], origin={field: ORIGIN[field]})])


def test_sequences_in_two_audits_are_refused_with_both_numbers(model, sequences, shards) -> None:
    both = rw.Audit.merge(shards[:2])
    again = rw.audit(model, sequences[:1])
    doubled = [
        ([shards[0], shards[0]], "1 and 2"),
        ([*shards[:2], both], "[12] and 3"),
        ([both, rw.Audit.merge([shards[3], shards[1]])], "1 and 2"),
        ([shards[0], shards[1], again], "1 and 3"),
    ]
    for audits, numbers in doubled:
        with pytest.raises(RecordError, match=f"got the same data in audits {numbers}"):
            rw.Audit.merge(audits)
    unread = changed(shards[0], origin={"data_digests": []})
    assert rw.Audit.merge([unread, unread, shards[1]]).provenance.sequences == 3


@pytest.mark.parametrize("out", ["a", "c"])
def test_a_merge_replaces_no_audit(out, shards, tmp_path) -> None:
    files = [audit.save(tmp_path / name / "audit.json") for name, audit in zip("abc", shards, strict=False)]
    before = [file.read_bytes() for file in files]
    words = ["merge", str(tmp_path / "a"), str(files[1]), "--out", str(tmp_path / out)]
    merged = CliRunner().invoke(app, words)
    assert "expected a folder without other audits, got the audit of one model" in str(merged.exception)
    assert [file.read_bytes() for file in files] == before
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path not in files] == []


def test_wrappers_have_the_digest_of_the_model_and_other_weights_another(model, shards) -> None:
    torch.manual_seed(5)
    other = made()
    assert weights_digest(other) != weights_digest(model)
    assert (
        weights_digest(nn.Sequential(model)) == weights_digest(model) == shards[0].provenance.weights_digest
    )
    names = [name for name, _ in model.named_parameters()]
    assert weights_digest(model, names) == weights_digest(other, names)
    assert weights_digest(other.to("meta")) == ""


class Refusing(torch.Tensor):
    """Numbers that no operation returns, as in classes of torchao."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("reshape", "to", "numpy"):
            raise AssertionError(function.__name__)
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize(
    "held",
    [
        lambda numbers: numbers.to_sparse(),
        lambda numbers: numbers.as_subclass(Refusing),
        lambda numbers: torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "a tensor class", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*dtype=torch.quint8")
def test_weights_that_cannot_be_read_have_no_digest(held):
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(held(model.weight.detach()), requires_grad=False)
    assert weights_digest(model) == ""


def test_a_digest_of_data_depends_on_values_types_and_order() -> None:
    def digest(*batches: object) -> str:
        read = DataDigest()
        for batch in batches:
            read.add(batch)
        return read.value

    first, other = torch.arange(4).view(1, 4), torch.ones(1, 4, dtype=torch.int64)
    made = [
        digest(first), digest(other), digest(first, other), digest(other, first), digest(first.int()),
        digest(first.view(2, 2)), digest({"ids": first}), digest({"ids": first, "mask": first > 1}),
    ]  # fmt: skip
    assert len(set(made)) == len(made)
    assert digest(first.clone()) == digest(first)
    assert digest() == digest(first, ("no tensor",)) == digest(("no tensor",), first) == ""


def test_weights_that_are_random_in_a_shard_are_a_finding_of_the_merged_audit(shards) -> None:
    names = {"random_weights": ["blocks.0.weight"]}
    lacks = changed(shards[1], provenance=shards[1].provenance.model_copy(update=names))
    for audits in ([shards[0], lacks], [lacks, shards[0]]):
        found = [finding for finding in rw.Audit.merge(audits).findings if finding.code == "RANDOM_WEIGHTS"]
        assert [finding.evidence for finding in found] == [{"weights": 1}]
