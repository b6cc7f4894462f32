"""Audits of shards, merged, are the audit of all sequences; their order and their grouping do not matter."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.auditing.same_audits import OF_THE_FIRST, compared
from tests.unchecked import unchecked
from torch import nn

import rankwise as rw
from rankwise.auditing import HeadRecord, Provenance
from rankwise.auditing.provenance import DataDigest, weights_digest
from rankwise.auditing.statistics import HeadStatistics
from rankwise.cli.audit import merge_files
from rankwise.errors import InputError, RecordError


class Model(nn.Module):
    """Two blocks over embedded tokens; token 7 is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        with torch.no_grad():
            self.embed.weight[7] = math.nan

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(ids))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    """Of several lengths, one with a token that is not finite."""
    torch.manual_seed(1)
    rows = [torch.randint(0, 7, (1, length)) for length in (9, 12, 9, 2, 12, 9)]
    rows[2][0, 4] = 7
    return rows


@pytest.fixture(scope="module")
def shards(model, sequences) -> list[rw.Audit]:
    """An audit of each sequence."""
    return [rw.audit(model, [batch]) for batch in sequences]


def tree(parts: Sequence[rw.Audit], cuts: Sequence[int]) -> rw.Audit:
    """Merge the first few, then what came of that with the next few, and so on."""
    merged: list[rw.Audit] = []
    for start, stop in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        merged = [rw.Audit.merge([*merged, *parts[start:stop]])]
    return merged[0]


class Refusing(torch.Tensor):
    """Holds numbers that no operation gives away, as torchao's classes do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("reshape", "to", "numpy"):
            raise AssertionError(function.__name__)
        return super().__torch_function__(function, types, args, kwargs)


def test_shards_merged_are_one_audit_over_all_sequences(model, sequences, shards) -> None:
    whole = rw.audit(model, sequences)
    kept = [finding for finding in whole.findings if finding.code != "OVERSIZED_HEADS"]  # rests on `OF_ALL`
    whole = whole.model_copy(update={"findings": kept})
    merged = rw.Audit.merge(shards)
    assert compared(whole, merged) == []
    assert merged.provenance.audits == merged.provenance.sequences == len(sequences)
    assert whole.heads[0].nonfinite == 1
    for first in OF_THE_FIRST:
        assert getattr(merged.heads[0], first) == getattr(whole.heads[0], first)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(6)), cuts=st.lists(st.integers(1, 5), max_size=3, unique=True))
def test_neither_order_nor_grouping_matters(shards, order, cuts) -> None:
    ordered = [shards[at] for at in order]
    assert compared(tree(ordered, sorted(cuts)), rw.Audit.merge(shards)) == []


def test_the_comparison_above_can_fail(shards) -> None:
    other = rw.Audit.merge(shards[:-1])
    found = " ".join(compared(rw.Audit.merge(shards), other))
    assert ".effective_rank:" in found
    assert ".std.effective_rank:" in found
    assert ".distances[1]:" in found
    assert ".sequences:" in found


def test_what_was_saved_merges_as_what_was_not(shards, tmp_path) -> None:
    loaded = [rw.Audit.load(audit.save(tmp_path / f"{n}.json")) for n, audit in enumerate(shards)]
    assert compared(rw.Audit.merge(loaded), rw.Audit.merge(shards)) == []
    assert rw.Audit.merge(loaded[:1]) is loaded[0]


def test_many_heads_are_nearest_on_average_over_all_sequences() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 6, 16, batch_first=True).eval()
    batches = [2 * torch.randn(1, 9, 24) for _ in range(5)]
    apart = [rw.audit(layer, [batch]) for batch in batches]
    nearest = [[head.nearest_head for head in ranked.heads] for ranked in apart]
    assert any(ranked != nearest[0] for ranked in nearest), "the shards are to disagree"
    assert compared(rw.audit(layer, batches), rw.Audit.merge(apart)) == []


def test_estimates_keep_their_errors_and_unknown_ranks_stay_unknown() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    batches = [4 * torch.randn(1, length, 16) for length in (12, 9)]
    apart = [rw.audit(layer, [batch], method="estimate") for batch in batches]
    whole = rw.audit(layer, batches, method="estimate")
    assert compared(whole, rw.Audit.merge(apart)) == []
    assert math.isfinite(whole.heads[0].stderr["effective_rank"])
    assert whole.provenance.method.startswith("estimated")


def merged_head(*parts: HeadRecord) -> HeadRecord:
    """One head of which parts have other sequences."""
    whole, *others = (HeadStatistics.from_records([part], 0.01) for part in parts)
    for other in others:
        whole.merge(other)
    return whole.to_records(0.01)[0]


def test_the_mask_is_that_of_the_longest_sequences() -> None:
    """A short sequence may fit into a window, or be all that a causal mask shows."""
    head = rw.audit(
        nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval(), [torch.randn(2, 9, 16)]
    ).heads[0]
    short = head.model_copy(update={"mask": "causal", "tokens": 4.0, "merging": None})
    long = head.model_copy(update={"mask": "window", "tokens": 9.0, "merging": None})
    for parts in ([short, long], [long, short]):
        assert merged_head(*parts).mask == "window"


def test_a_whole_of_which_a_shard_is_incomplete_is_incomplete(shards) -> None:
    stopped = shards[1].model_copy(update={"complete": False})
    assert rw.Audit.merge(shards[:2]).complete
    assert not rw.Audit.merge([shards[0], stopped]).complete


def test_a_rank_that_is_unknown_in_one_shard_is_unknown_in_all() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    audit, other = (rw.audit(layer, [torch.randn(2, 9, 16)]) for _ in range(2))
    unknown = {"numerical_rank": math.nan, "first_token_mass": math.nan}
    heads = [head.model_copy(update=unknown) for head in audit.heads]
    merged = rw.Audit.merge([audit.model_copy(update={"heads": heads}), other]).heads[0]
    assert math.isnan(merged.numerical_rank)
    assert merged.first_token_mass == other.heads[0].first_token_mass
    assert merged.counts["first_token_mass"] == 2


def test_importance_is_a_mean_over_tokens_and_no_set_of_heads_is_named() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=32)).eval()
    batches = [{"input_ids": torch.randint(0, 32, (1, length))} for length in (9, 14)]
    apart = [rw.audit(model, [batch], importance="exact") for batch in batches]
    whole, merged = rw.audit(model, batches, importance="exact"), rw.Audit.merge(apart)
    random = {"curvature", "estimate", "spearman"}  # the projections of the second batch are others
    left_out = random | {"removable", "findings", "forward", "backward"}
    assert compared(whole, merged, left_out) == []
    assert whole.importance.removable is not None
    assert merged.importance.removable is None
    assert "takes runs on all of the data" in " ".join(merged.importance.notes)
    assert rw.Audit.merge([apart[0], rw.audit(model, batches[1:])]).importance is None


def test_the_width_needed_is_left_out_and_a_note_says_so_once(shards) -> None:
    merged = rw.Audit.merge([rw.Audit.merge(shards[:2]), shards[3]])
    assert all(math.isnan(head.required_head_dim) and head.width == 4 for head in merged.heads)
    assert sum("width needed left out" in note for note in merged.provenance.notes) == 1
    assert not math.isnan(shards[0].heads[0].required_head_dim)


def test_a_baseline_is_left_out_and_a_note_says_so(model, sequences) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    apart = [rw.audit(layer, [torch.randn(2, 9, 8)], baseline=2) for _ in range(2)]
    merged = rw.Audit.merge(apart)
    assert merged.baseline is None
    assert merged.heads[0].baseline is None
    assert math.isnan(merged.heads[0].init_numerical_rank)
    assert any("baseline left out" in note for note in merged.provenance.notes)


def test_files_of_before_have_no_nearest_head(shards) -> None:
    heads = [head.model_copy(update={"merging": None}) for head in shards[0].heads]
    merged = rw.Audit.merge([shards[0].model_copy(update={"heads": heads}), *shards[1:]])
    assert merged.heads[0].nearest_head is None
    assert math.isnan(merged.heads[0].nearest_distance)
    assert merged.heads[0].effective_rank == pytest.approx(rw.Audit.merge(shards).heads[0].effective_rank)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", "another"),
        ("model_class", "x.Y"),
        ("revision", "abc"),
        ("parameters", 5),
        ("delta", 0.5),
        ("method_asked", "estimate"),
        ("model_dtype", "float16"),
        ("measure_dtype", "float32"),
    ],
)
def test_audits_of_other_things_are_refused_with_both_values(shards, field, other) -> None:
    before = getattr(shards[0].provenance, field)
    about = shards[1].provenance.model_copy(update={field: other})
    with pytest.raises(RecordError, match=f"the same {field} in all") as told:
        rw.Audit.merge([shards[0], shards[1].model_copy(update={"provenance": about})])
    assert repr(before) in str(told.value)
    assert repr(other) in str(told.value)


def test_records_that_do_not_fit_are_refused(shards) -> None:
    with pytest.raises(RecordError, match="the same schema_version in all of them, got 3 and 4"):
        rw.Audit.merge([shards[0], shards[1].model_copy(update={"schema_version": 4})])
    for field, records in (("kind", "heads"), ("width", "layers"), ("site", "layers")):
        wrong = [audit.model_copy(update={field: "x"}) for audit in getattr(shards[1], records)]
        with pytest.raises(RecordError, match=f"the same {field} in all of them"):
            rw.Audit.merge([shards[0], shards[1].model_copy(update={records: wrong})])
    with pytest.raises(InputError, match="at least one audit, got none"):
        rw.Audit.merge([])
    with (
        unchecked(),
        pytest.raises(InputError, match=r"audit 2 of `Audit.merge`: expected an audit, got str"),
    ):
        rw.Audit.merge([shards[0], "audit.json"])


def test_what_would_be_counted_twice_is_refused_and_named(model, sequences, shards, tmp_path) -> None:
    both = rw.Audit.merge(shards[:2])
    again = rw.audit(model, sequences[:1])
    doubled = [
        ([shards[0], shards[0]], "audit 1 and audit 2"),
        ([*shards[:2], both], "audit [12] and audit 3"),
        ([both, rw.Audit.merge([shards[3], shards[1]])], "audit 1 and audit 2"),
        ([shards[0], shards[1], again], "audit 1 and audit 3"),
    ]
    for audits, named in doubled:
        with pytest.raises(RecordError, match=f"each sequence in one of them, got the same in {named}"):
            rw.Audit.merge(audits)
    files = [
        str(audit.save(tmp_path / f"{name}.json"))
        for name, audit in zip("ab", [shards[0], both], strict=True)
    ]
    with pytest.raises(RecordError, match=r"got the same in .*a\.json and .*b\.json"):
        merge_files(files, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("linked", [False, True])
def test_a_merge_that_would_replace_an_audit_it_reads_is_refused(linked, shards, tmp_path) -> None:
    files = [audit.save(tmp_path / name / "audit.json") for name, audit in zip("ab", shards, strict=False)]
    out, before = tmp_path / "a", files[0].read_bytes()
    if linked:
        out = tmp_path / "linked"
        out.symlink_to(tmp_path / "a", target_is_directory=True)
    for path in (tmp_path / "a", files[0]):
        with pytest.raises(InputError, match="none of those to merge, got that of") as told:
            merge_files([str(tmp_path / "b"), str(path)], out)
        assert str(path) in str(told.value)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "audit.json").symlink_to(files[0])
    with pytest.raises(InputError, match="none of those to merge"):
        merge_files([str(file) for file in files], tmp_path / "c")
    assert files[0].read_bytes() == before
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["audit.json"] * 3


def test_files_of_before_there_were_digests_merge_as_they_did(shards) -> None:
    def before(audit: rw.Audit) -> rw.Audit:
        about = audit.provenance.model_dump(exclude={"parts", "weights", "sources"})
        return audit.model_copy(update={"provenance": Provenance(**about)})

    old = before(shards[0])
    assert (old.provenance.parts, old.provenance.weights) == ([], "")
    assert rw.Audit.merge([old, old, shards[1]]).provenance.sequences == 3
    assert rw.Audit.merge([shards[1], old]).provenance.weights == shards[1].provenance.weights != ""


def test_other_weights_of_the_same_model_are_refused_and_wrappers_are_no_others(model, shards) -> None:
    torch.manual_seed(5)
    other = Model().eval()
    audited = rw.audit(other, [torch.randint(0, 7, (1, 8))])
    with pytest.raises(RecordError, match="the same weights in all of them"):
        rw.Audit.merge([shards[0], audited])
    assert weights_digest(nn.Sequential(model)) == weights_digest(model) == shards[0].provenance.weights
    names = [name for name, _ in model.named_parameters()]
    assert weights_digest(model, names) == weights_digest(other, names)
    assert weights_digest(other.to("meta")) == ""


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
def test_weights_whose_numbers_cannot_be_read_have_no_digest(held):
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(held(model.weight.detach()), requires_grad=False)
    assert weights_digest(model) == ""


def test_a_digest_of_data_knows_values_types_and_order() -> None:
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


def test_a_module_that_one_shard_called_is_not_told_as_never_called(shards) -> None:
    from rankwise.auditing import Unseen

    def with_unseen(audit: rw.Audit, *reasons: str) -> rw.Audit:
        uncaptured = [Unseen(name=f"m{n}", type="X", reason=reason) for n, reason in enumerate(reasons)]
        return audit.model_copy(update={"uncaptured": uncaptured})

    never = "never called in this capture"
    merged = rw.Audit.merge([with_unseen(shards[0], never, never, "fused"), with_unseen(shards[1], "fused")])
    assert [(module.name, module.reason) for module in merged.uncaptured] == [
        ("m0", "fused"),
        ("m2", "fused"),
    ]
    both = rw.Audit.merge([with_unseen(audit, never) for audit in shards])
    assert [module.reason for module in both.uncaptured] == [never]
    assert [finding.code for finding in both.findings].count("NOT_CAPTURED") == 1


def test_types_that_hold_the_rank_of_a_head_are_in_few_files() -> None:
    """From the captured mixer to the record: who changes the number must read these files alone."""
    from rankwise._internals.statistics import Moments
    from rankwise.auditing.measure import HeadBatch
    from rankwise.auditing.statistics import MEANS, RANKS
    from rankwise.measures import RankSummary
    from rankwise.measures.rank import Estimate, RankEstimates
    from rankwise.tracing import MixerSite

    holders = (MixerSite, RankSummary, RankEstimates, Estimate, HeadBatch, HeadStatistics, Moments)
    files = {kind.__module__ for kind in (*holders, HeadRecord)}
    assert len(files) <= 8, files
    assert set(MEANS) | set(RANKS) <= set(HeadRecord.model_fields)
