"""Exact costs equal runs with weights set to zero; sets of heads; models without gradients."""

import copy
import dataclasses
import math
import re

import numpy as np
import pytest
import torch
import transformers
from importance_cases import Heads, encoder, ids, language_model, measure
from tests.support.modules import kind
from tests.support.records import diagnose
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.auditing import AuditError
from rankwise.importance import ImportanceSettings, ablation_cost, measure_importance
from rankwise.tracing import Address


def nats(model, given):
    """Return nats per token in the dtype of the model: the loss of transformers is in float32."""
    with torch.no_grad():
        logits = model(**copy.deepcopy(given)).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), given["input_ids"][:, 1:].flatten()).item()


@pytest.mark.parametrize("cached", [0, 6])
def test_ablation_is_an_output_projection_without_the_head(cached):
    model, given = language_model(), {"input_ids": ids()}
    if cached:
        given["past_key_values"] = cache = transformers.DynamicCache()
        with torch.no_grad():
            model(ids(tokens=cached, seed=2), past_key_values=cache)
    importance = measure(model, [given], ImportanceSettings(exact=True, probes=0, tolerance=None))
    whole = nats(model, given)
    assert not cached or cache.get_seq_length() == cached
    assert importance.value == pytest.approx(whole, rel=1e-12)
    for layer, site in enumerate(importance.sites):
        projection = model.transformer.h[layer].attn.c_proj
        for head in range(4):
            weight = projection.weight.data.clone()
            projection.weight.data[4 * head : 4 * head + 4] = 0
            without = nats(model, given)
            projection.weight.data = weight
            assert site.exact[head] == pytest.approx(without - whole, abs=1e-12)


def test_merged_importance_of_a_split_equals_importance_of_all_sequences():
    model, batches = language_model(), [{"input_ids": ids(1, 6 + 2 * n, seed=n)} for n in range(4)]
    settings = ImportanceSettings(exact=True, probes=0, tolerance=0.3)
    whole, merged, two, rest = (
        measure_importance(model, part, settings)
        for part in (batches, batches[:1], batches[1:3], batches[3:])
    )
    merged.merge(two)
    merged.merge(rest)
    assert merged.heads.keys() == whole.heads.keys()
    fields = ("curvature", "estimate", "exact")
    records = [*zip(merged.record.blocks, whole.record.blocks, strict=True)]
    for one, other in [*records, *((merged.heads[at], head) for at, head in whole.heads.items())]:
        for name in fields:
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12, abs=1e-12)
    for name in ("value", "reference"):
        assert getattr(merged.record, name) == pytest.approx(getattr(whole.record, name), rel=1e-12)
    assert (merged.record.counted, merged.record.sequences) == (whole.record.counted, 4)
    assert merged.record.removable is None  # no pass without the heads saw all sequences
    other = measure_importance(model, batches[:1], ImportanceSettings(exact=False, probes=1))
    with pytest.raises(rw.errors.RecordError, match="the same probes"):
        merged.merge(other)


def test_ctrl_c_keeps_finished_removals():
    said = []

    def interrupt(what, done):
        said.append(what)
        if what.endswith("without head 2 of transformer.h.0.attn"):
            raise KeyboardInterrupt

    settings = ImportanceSettings(exact=True, probes=0)
    importance = measure(language_model(), [{"input_ids": ids()}], settings, on_progress=interrupt)
    assert np.isfinite(importance.sites[0].exact).tolist() == [True, True, False, False]
    assert np.isfinite(importance.sites[0].estimate).all()
    assert importance.removable is None
    assert "interrupted" in importance.notes[-1]
    numbers = [re.match(r"pass (\d+) of about (\d+): (.*)", what).groups() for what in said[1:]]
    assert [what for *_, what in numbers] == WHAT
    assert [int(done) for done, *_ in numbers] == [2, 3, 4, 5]
    ((planned,),) = {(planned,) for _, planned, _ in numbers}
    assert 2 + 8 + 2 + 4 <= int(planned) <= 2 + 8 + 2 + 4 + 16  # the batch twice, heads, blocks, the search


WHAT = ["gradients of batch 1 of 1", *(f"without head {head} of transformer.h.0.attn" for head in range(3))]


def test_a_head_with_zero_weights_costs_nothing_and_is_removed_first():
    model, given = encoder(), {"input_ids": ids()}
    model.encoder.layer[0].attention.output.dense.weight.data[:, 4:8] = 0
    importance = measure(model, [given], ImportanceSettings(exact=True))
    assert importance.sites[0].estimate[1] == importance.sites[0].exact[1] == 0
    dead = importance.sites[0].ids[1]
    assert importance.removable.heads[0] == dead
    assert importance.removable.chosen_relative <= 0.01
    again = ablation_cost(model, [{"input_ids": ids()[1:2]}], importance.removable.heads)
    assert again.cost == pytest.approx(importance.removable.cost, abs=1e-12)


class Pair(nn.Module):
    """Encoder of two sequences: in one run, as neighbors in the batch, or in two runs of a pass."""

    def __init__(self, runs):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.runs = runs

    def forward(self, x, y):
        if self.runs == 2:
            return torch.cat([self.encoder(x), self.encoder(y)], 1)
        return self.encoder(torch.stack([x, y], 1).flatten(0, 1)).reshape(len(x), -1, x.shape[-1])


@pytest.mark.parametrize("loss", ["auto", lambda output, batch: output.pow(3).sum((1, 2))])
def test_a_head_that_runs_twice_in_a_pass_is_removed_from_both_runs(loss):
    batches = [torch.randn(2, 3, 5, 8, dtype=torch.float64).unbind(0)]
    settings = ImportanceSettings(exact=True, loss=loss, tolerance=0.2)
    one, two = (measure_importance(Pair(runs).eval().double(), batches, settings) for runs in (1, 2))
    assert two.heads.keys() == one.heads.keys()
    for at, head in one.heads.items():
        numbers, others = (found.model_dump(exclude={"why_not"}) for found in (head, two.heads[at]))
        assert others == pytest.approx(numbers, nan_ok=True, rel=1e-9)
    for block, other in zip(one.record.blocks, two.record.blocks, strict=True):
        gradients = (other.curvature - other.estimate, block.curvature - block.estimate)
        assert gradients[0] == pytest.approx(gradients[1], rel=1e-9)
        assert other.exact == pytest.approx(block.exact, rel=1e-9)
    assert two.record.removable.heads == one.record.removable.heads
    texts = {"heads", "sorted_by"}
    numbers, others = (found.record.removable.model_dump(exclude=texts) for found in (one, two))
    assert others == pytest.approx(numbers, nan_ok=True, rel=1e-9)


def test_the_cost_of_a_removable_set_is_within_the_tolerance_and_reproduced_by_a_run():
    model, given = language_model(), {"input_ids": ids()}
    for tolerance in (0.0, 0.05, 0.3, 1e9):
        importance = measure(model, [given], ImportanceSettings(exact=True, probes=0, tolerance=tolerance))
        gone = importance.removable
        assert gone.chosen_relative <= tolerance
        assert len(set(gone.heads)) == len(gone.heads)
        chosen, priced = (ablation_cost(model, [{"input_ids": ids()[at::2]}], gone.heads) for at in (0, 1))
        assert chosen.relative == pytest.approx(gone.chosen_relative, abs=1e-12)
        wanted = (priced.loss, priced.cost, priced.relative)
        assert (gone.loss, gone.cost, gone.relative) == pytest.approx(wanted, abs=1e-12)
        assert len(gone.heads) == 8 or tolerance < 1e9


HALVED = ImportanceSettings(exact=True, probes=0, tolerance=0.3)


@pytest.mark.parametrize(
    ("loss", "tolerance"),
    [("causal", 0.0), ("output", 0.1), (lambda output, batch: -output.logits.logsumexp(2).mean(1), 0.0)],
)
def test_the_set_and_its_price_do_not_depend_on_the_batches(loss, tolerance):
    """Sequence n is the same in every batch, with padding or without."""
    model, lengths = language_model(), (9, 12, 5, 11, 8)
    length = lengths if loss == "causal" else [12] * 5
    real = torch.arange(12) < torch.tensor(length)[:, None]
    whole = {"input_ids": ids(5, 12).masked_fill(~real, 0), "attention_mask": real.long()}
    found = []
    for size in (1, 3, 5):
        batches = [{name: rows[at : at + size] for name, rows in whole.items()} for at in range(0, 5, size)]
        settings = dataclasses.replace(HALVED, loss=loss, tolerance=tolerance)
        importance = measure(model, batches, settings)
        gone = importance.removable
        passes = 8 + 2 + gone.runs + 1  # each head, each block, each set, and a check of restarts
        # each batch with and without gradients; each block is checked as well, after a pass without heads
        assert importance.forward == 1 + len(batches) * (2 + passes) + 3
        found.append(gone)
    assert 0 < len(found[0].heads) < 8
    for gone in found[1:]:
        assert gone.heads == found[0].heads
        numbers, others = (one.model_dump(exclude={"heads", "sorted_by"}) for one in (found[0], gone))
        assert others == pytest.approx(numbers, rel=1e-5)  # the reference of KL is in float32
    assert (found[0].chosen_on, found[0].held_out) == (3, 2)


@pytest.mark.parametrize("settings", [HALVED, ImportanceSettings(exact=False, tolerance=0.3, probes=8)])
def test_sequences_that_price_a_set_do_not_choose_it(settings):
    model, given, others = language_model(), ids(6), ids(6)
    others[1::2] = ids(3, seed=5)
    one, two = (measure(model, [{"input_ids": x}], settings).removable for x in (given, others))
    assert one.heads == two.heads
    assert one.chosen_relative == pytest.approx(two.chosen_relative, rel=1e-9)
    assert abs(one.cost - two.cost) > 1e-3
    all_choose = measure(model, [{"input_ids": given}], dataclasses.replace(settings, hold_out=False))
    assert (all_choose.removable.chosen_on, all_choose.removable.held_out) == (6, 0)
    assert all_choose.removable.chosen_relative <= 0.3


def test_the_interval_is_students_over_held_out_sequences():
    model, given = language_model(), ids(11)
    gone = measure(model, [{"input_ids": given}], HALVED).removable
    alone = [ablation_cost(model, [{"input_ids": given[at : at + 1]}], gone.heads) for at in range(1, 11, 2)]
    costs = np.array([cost.cost for cost in alone])
    reference = np.mean([cost.loss - cost.cost for cost in alone])
    width = 2.776445 * costs.std(ddof=1) / math.sqrt(5) / reference  # t with 4 degrees of freedom
    assert gone.held_out == 5
    assert (gone.high - gone.low) / 2 == pytest.approx(width, rel=1e-3)  # error of the expansion of t
    assert gone.relative == pytest.approx(costs.mean() / reference, rel=1e-9)
    assert (gone.low + gone.high) / 2 == pytest.approx(gone.relative, rel=1e-9)


def test_the_interval_weighs_sequences_by_tokens():
    """If every token costs the same, different lengths do not widen it; the jackknife agrees."""
    model, lengths = language_model(), torch.randint(4, 30, (24,), generator=torch.Generator().manual_seed(0))
    whole = {"input_ids": ids(24, 30), "attention_mask": (torch.arange(30) < lengths[:, None]).long()}
    best = model(**whole).logits.argmax(-1).roll(1, 1)  # so that removal costs something in every sequence
    whole["labels"] = best.masked_fill((torch.arange(30) == 0) | (whole["attention_mask"] == 0), -100)
    gone = measure(model, [whole], dataclasses.replace(HALVED, tolerance=2.0)).removable
    rows = [{name: own[at : at + 1] for name, own in whole.items()} for at in range(1, 24, 2)]
    alone = [ablation_cost(model, [row], gone.heads).cost for row in rows]
    counts = lengths[1::2].numpy() - 1.0
    sums = np.array(alone) * counts
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    deviation = math.sqrt(11 / 12 * ((left_out - left_out.mean()) ** 2).sum())
    reference = (gone.loss - gone.cost) * 2.201  # t with 11 degrees of freedom
    assert gone.cost == pytest.approx(sums.sum() / counts.sum(), rel=1e-9)
    assert (gone.high - gone.low) / 2 * (gone.loss - gone.cost) ** 2 / reference == pytest.approx(
        deviation, rel=0.1
    )


@pytest.mark.parametrize("sequences", [1, 2])
def test_few_sequences_have_no_price_or_no_interval_and_words_state_this(sequences):
    audit = rw.audit(language_model(), [{"input_ids": ids(sequences)}], importance=HALVED)
    gone = audit.importance.removable
    assert (gone.chosen_on, gone.held_out) == (1, sequences - 1)
    assert math.isnan(gone.cost) == math.isnan(gone.relative) == (sequences == 1)
    assert math.isnan(gone.low)
    (finding,) = (one for one in audit.findings if one.code == "REMOVABLE")
    said = {1: "No other sequence says what it costs elsewhere", 2: "one sequence has no interval"}
    assert said[sequences] in finding.meaning
    trained = audit.importance.model_copy(update={"chance": math.nan})
    (finding,) = (one for one in diagnose(audit.heads, [], [], trained) if one.code == "REMOVABLE")
    unknown = "no sequence was held out to price it"
    assert (finding.remedy.no_action == unknown) == (sequences == 1)


def test_a_sequence_without_a_finite_loss_is_in_neither_half():
    model, given = Heads(3), states(6)
    given[2, 2] = math.nan
    settings = ImportanceSettings(exact=True, probes=0, tolerance=0.5)
    with_nan, without = (
        measure(model, [x], settings).removable.model_dump(exclude={"sorted_by"})
        for x in (given, given[[0, 1, 3, 4, 5]])
    )
    assert with_nan.pop("heads") == without.pop("heads")
    assert with_nan == pytest.approx(without, rel=1e-6)
    assert (with_nan["chosen_on"], with_nan["held_out"]) == (3, 2)


def test_the_divergence_is_0_for_the_whole_model_and_positive_without_a_head():
    model, given = language_model(), {"input_ids": ids()}
    settings = ImportanceSettings(exact=True, loss="output", tolerance=0.0)
    importance = measure(model, [given], settings)
    assert (importance.removable.heads, importance.removable.cost) == ([], 0)  # every head is needed
    shares = model(**given).logits.softmax(-1)
    assert importance.value == 0
    assert importance.reference == pytest.approx(-(shares * shares.log()).sum(-1).mean().item(), rel=1e-6)
    assert importance.reference_name == "the entropy of the predictions"
    projection = model.transformer.h[0].attn.c_proj.weight.data
    projection[:4] = 0
    moved = model(**given).logits.softmax(-1)
    wanted = (shares * (shares / moved).log()).sum(-1).mean().item()
    assert importance.sites[0].exact[0] == pytest.approx(wanted, rel=1e-4)  # of sums of float32
    assert importance.unit == "nats per prediction"
    for site in importance.sites:
        assert (site.exact > 0).all()
        assert (site.estimate == site.curvature).all()


def test_the_model_is_untouched():
    model = language_model()
    with untouched(model):
        measure(model, [{"input_ids": ids()}], ImportanceSettings(exact=True, probes=1))


# Returns whole numbers.
WholeNumbers = kind(lambda self, x: self.inner(x).argmax(-1), inner=lambda: Heads(3))
# Stops gradients to the inner model.
Detached = kind(torch.no_grad()(lambda self, x: self.inner(x)), inner=lambda: Heads(3))


def states(sequences=2):
    return torch.randn(sequences, 6, 4, generator=torch.Generator().manual_seed(2))


def test_a_model_without_gradients_is_refused_unless_heads_are_removed_one_by_one(monkeypatch):
    monkeypatch.setattr("rankwise.importance.ablation.FEW_PASSES", 0)
    model = Detached().eval()
    with pytest.raises(rw.errors.RankwiseError, match='importance="exact"'):
        measure(model, [states()])
    for exact in (True, None):
        importance = measure(model, [states()], ImportanceSettings(exact=exact, probes=1, tolerance=0.01))
        assert np.isfinite(importance.sites[0].exact).all()
        assert np.isnan(importance.sites[0].estimate).all()
        assert "no gradients flow" in importance.notes[0]
        assert importance.backward == 0
        assert importance.removable.sorted_by == "exact"


@pytest.mark.parametrize(("probes", "few"), [(3, 5), (9, 4)])
def test_the_method_with_few_passes_is_chosen_and_the_record_says_why(probes, few, monkeypatch):
    """Eight heads and two blocks are 10 passes that restart and count as half, whatever estimates take."""
    monkeypatch.setattr("rankwise.importance.ablation.FEW_PASSES", few)
    model, batches = language_model(), [{"input_ids": ids()}, {"input_ids": ids(seed=2)}]
    settings = ImportanceSettings(probes=probes, tolerance=None)
    importance = measure(model, batches, settings)
    exact = few >= (8 + 2) / 2
    assert np.isfinite(importance.sites[0].exact).all() == exact
    assert np.isfinite(importance.sites[0].estimate).all() == (not exact)
    assert importance.forward == 1 + 2 * (1 + 11 * exact) + 3 * exact
    assert importance.backward == 2 * (probes + 1) * (not exact)
    method = "exact" if exact else "estimated"
    passes = f"10 heads and blocks takes about 5 forward passes per batch, and costs are exact up to {few}"
    words = f"{method}, because removing each of {passes}; estimates take {probes + 1} backward passes"
    assert importance.choice == words
    audit = rw.audit(model, batches, importance=settings)
    assert f"costs are {importance.choice}" in audit.summary(1000)
    for chosen in (True, False):
        assert measure(model, batches, dataclasses.replace(settings, exact=chosen)).choice == ""


def test_weights_of_inference_mode_are_refused_with_a_fix():
    with torch.inference_mode():
        model = Heads(3)
    with pytest.raises(rw.errors.RankwiseError, match='importance="exact"'):
        measure(model, [states()])
    assert np.isfinite(measure(model, [states()], ImportanceSettings(exact=True)).sites[0].exact).all()


def test_an_audit_keeps_its_numbers_if_importance_cannot_be_measured():
    with pytest.raises(AuditError, match="gradients") as failed:
        rw.audit(Detached(), [states()], importance=ImportanceSettings(exact=False))
    assert len(failed.value.audit.heads) == 3
    assert failed.value.audit.importance is None


def test_sequences_with_a_loss_of_nan_are_left_out_and_counted():
    model, given = Heads(3), states(3)
    given[1, 2] = math.nan
    importance = measure(model, [given], ImportanceSettings(exact=True, probes=2))
    assert (importance.sequences, importance.nonfinite_sequences, importance.counted) == (3, 1, 2)
    assert np.isfinite(importance.sites[0].exact).all()
    assert np.isfinite(importance.sites[0].estimate).all()


@pytest.mark.parametrize(
    ("model", "batches", "said"),
    [
        (WholeNumbers, [states()], r"floating-point tensor.*loss="),
        (language_model, [{"input_ids": ids(1, 1)}], "nothing to predict"),
        (lambda: Heads(3), [], "at least one batch"),
        (lambda: Heads(3), [states(1) * math.nan], r"finite number.*1 that are not finite"),
    ],
)
def test_batches_without_a_loss_are_refused(model, batches, said):
    with pytest.raises(rw.errors.InputError, match=said):
        measure(model(), iter(batches))


@pytest.mark.parametrize(
    "wrong",
    [{"tolerance": -1.0}, {"tolerance": math.nan}, {"probes": -1}, {"loss": "nats"}],
)
def test_settings_out_of_range_are_refused(wrong):
    with unchecked(), pytest.raises(rw.errors.InputError):
        ImportanceSettings(**wrong)


def test_an_unknown_head_is_named_in_the_error():
    place = Address("", 0, head=7)
    with pytest.raises(rw.errors.InputError, match="head 7"):
        ablation_cost(Heads(3), [states()], [place])


def test_ten_thousand_heads_take_as_many_runs_as_ten():
    few, many = (
        measure(Heads(heads), [states()], ImportanceSettings(exact=False, probes=2)) for heads in (10, 10_000)
    )
    assert many.backward == few.backward
    assert many.forward <= few.forward + math.ceil(math.log2(1000)) + 16
    assert np.isfinite(many.sites[0].estimate).all()
    assert many.removable.chosen_relative <= 0.01


def test_the_importance_of_a_mixer_named_by_hand_is_not_guessed():
    model = nn.Sequential(nn.Linear(4, 4))
    identity = rw.operators.DenseMixing(torch.eye(6).expand(2, 1, 6, 6))
    importance = measure(
        model, [states()], sites={"0": lambda *_: identity}, settings=ImportanceSettings(exact=True)
    )
    (site,) = importance.sites
    assert "returns the heads' outputs" in site.why_not
    assert np.isnan(site.exact).all()
    assert importance.removable is None
