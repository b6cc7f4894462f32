"""Wrong labels, masks of decoders, modes of autograd around the call, and missing gradients."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from importance_cases import CHEAP, Classifier, Heads, bert, encoder, ids, language_model, measure, t5
from tests.support.modules import kind
from tests.support.records import importance as importance_record
from tests.support.records import removable as removable_set
from torch import nn

import rankwise as rw
from rankwise.auditing import AuditError
from rankwise.auditing.importance_findings import describe_removable
from rankwise.errors import InputError
from rankwise.importance import ImportanceSettings, NotDifferentiableError, measure_importance
from rankwise.tracing import Address


def labelled(*labels):
    x = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1))
    return [(x, torch.as_tensor(one)) for one in labels]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([1, 9, 1, 1], r"labels of batch 2: expected whole numbers from 0 to 2.*got 9"),
        ([1, -1, 1, 1], r"labels of batch 2: .*got -1.*set positions that are not predicted to -100"),
        ([0.5, 1.0, 1.0, 1.0], r"labels of batch 2: .*got torch.float32"),
    ],
)
def test_labels_that_are_not_classes_are_refused_by_their_batch(wrong, said):
    with pytest.raises(AuditError, match=said) as refused:
        rw.audit(Classifier(), labelled([0, 1, 2, -100], wrong), importance=CHEAP)
    assert "importance=ImportanceSettings(loss=…)" in str(refused.value)
    with pytest.raises(AuditError, match="labels of batch 1"):
        rw.audit(Classifier(), labelled(wrong), importance=ImportanceSettings(exact=False, loss="labels"))


Narrow = kind(
    lambda self, input_ids=None, decoder_input_ids=None: self.inner(
        self.words(decoder_input_ids if input_ids is None else input_ids)
    ),
    "Narrow", inner=lambda: Heads(2), words=lambda: nn.Embedding(24, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "name"),
    [("causal", "input_ids"), ("masked", "input_ids"), ("encoder-decoder", "decoder_input_ids")],
)
def test_token_ids_that_are_not_classes_are_refused_by_their_batch(loss, name):
    settings = replace(CHEAP, loss=loss, mask_token=0)
    batches = [{name: torch.full((3, 10), 3)}, {name: torch.full((3, 10), 9)}]
    with pytest.raises(InputError, match=r"labels of batch 2: expected whole numbers from 0 to 3.*got 9"):
        measure(Narrow().eval(), batches, settings)


X, NUMBERS = torch.randn(4, 6, 4), torch.tensor([0, 1, 0])
UNFIT = {
    "of sequences": (language_model, (ids(), NUMBERS), "(3,)", "one per token"),
    "of no head": (encoder, {"input_ids": ids(), "labels": NUMBERS}, "(3,)", "one class per position"),
    "of two axes": (Classifier, (X, torch.ones(4, 1).long()), "(4, 1)", "one class per position"),
    "of numbers": (Classifier, (X, torch.ones(4)), "(4,)", "one class per position"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_note_says_that_labels_do_not_fit(case):
    build, batch, shape, expected = UNFIT[case]
    model = build().eval()
    settings = ImportanceSettings(exact=False, tolerance=None)
    [note] = measure(model, [batch], settings).notes
    assert note.startswith(f"labels {shape} of batch 1 do not count: they are not {expected}")
    assert measure(model, [batch], replace(settings, loss="output")).notes == []


def test_sequences_without_a_label_are_counted_and_refused_if_there_are_no_others():
    found = measure(Classifier().eval(), labelled([0, -100, 2, -100], [1, 0, 1, 2]), CHEAP)
    assert found.notes == [
        "2 of 8 sequences have no label to predict and do not count: one token, or labels of -100 alone"
    ]
    assert (found.counted, found.sequences) == (6, 8)
    with pytest.raises(InputError, match=r"got nothing to predict.*labels other than -100"):
        measure(Classifier(), labelled([-100] * 4), CHEAP)
    causal = [{"input_ids": ids(), "labels": torch.full_like(ids(), -100)}]
    with pytest.raises(InputError, match=r"got nothing to predict.*labels other than -100"):
        measure(language_model(), causal, CHEAP)


def test_labels_in_some_batches_only_are_refused():
    model = bert("BertForSequenceClassification", num_labels=3)
    some, none = {"input_ids": ids(), "labels": torch.tensor([0, 1, 2])}, {"input_ids": ids()}
    with pytest.raises(AuditError, match=r"batch 2: expected labels in all batches.*some in batch 1"):
        rw.audit(model, [some, none], importance=CHEAP)
    causal = [{"input_ids": ids()}, {"input_ids": ids(), "labels": ids()}]
    with pytest.raises(InputError, match=r"batch 2.*none in batch 1"):
        measure(language_model(), causal, CHEAP)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [(generates := "T5ForConditionalGeneration", "auto"), (generates, "output"), ("T5Model", "output")],
)
def test_the_mask_of_the_encoder_does_not_apply_to_the_decoder(kind, loss):
    model, mask = t5(kind), torch.ones(3, 10, dtype=torch.long)
    mask[:, 3:] = 0
    batch = {"input_ids": ids(), "attention_mask": mask, "decoder_input_ids": ids(seed=2)}
    settings = ImportanceSettings(exact=True, probes=0, tolerance=None, loss=loss)
    full = {**batch, "decoder_attention_mask": torch.ones_like(mask)}
    short = {**batch, "decoder_attention_mask": mask}
    plain, all_real, few = (measure(model, [one], settings) for one in (batch, full, short))
    assert plain.counted == all_real.counted
    for one, two, three in zip(plain.sites, all_real.sites, few.sites, strict=True):
        # float32, with and without an additive mask of zeros
        assert one.exact == pytest.approx(two.exact, rel=1e-4, abs=1e-5)
        assert not np.allclose(one.exact, three.exact, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("loss", ["causal", "output"])
def test_no_grad_around_the_call_does_not_change_importance(loss):
    model, batch = language_model(), [{"input_ids": ids()}]
    settings = ImportanceSettings(exact=False, probes=2, loss=loss, tolerance=None)
    known = rw.audit(model, batch, importance=settings)
    with torch.no_grad():
        inside = rw.audit(model, batch, importance=settings)
        assert not torch.is_grad_enabled()
    both = ([one.importance.model_dump_json() for one in audit.heads] for audit in (inside, known))
    assert next(both) == next(both)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_in_training_is_refused_by_its_name(reentrant):
    model, batches = language_model(), [{"input_ids": ids()}]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted = measure(model, batches, CHEAP)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.raises(NotDifferentiableError, match=r"gradient checkpointing: `model.eval\(\)`"):
        measure(model.train(), batches, CHEAP)
    found = measure(model.eval(), batches, CHEAP)
    assert [site.estimate.tolist() for site in found.sites] == [
        site.estimate.tolist() for site in wanted.sites
    ]


def test_inference_mode_around_the_call_is_refused_except_for_exact_costs():
    model = Heads(3)
    with torch.inference_mode():
        x = torch.randn(2, 6, 4)
        with pytest.raises(NotDifferentiableError, match=r"torch.inference_mode around the call.*outside"):
            measure(model, [x])
        importance = measure(model, [x], ImportanceSettings(exact=True))
    assert np.isfinite(importance.sites[0].exact).all()
    assert "torch.inference_mode around the call" in " ".join(importance.notes)


@pytest.mark.parametrize(("count", "subject"), [(1, "layer 0 head 0"), (2, "these 2 heads together")])
def test_the_removable_finding_tells_if_the_loss_falls(count, subject):
    heads = [Address(stack="", layer=0, site="attention", head=head) for head in range(count)]

    def meaning(cost):
        removable = removable_set(heads, loss=2 + cost, cost=cost, relative=cost / 2)
        return describe_removable(importance_record(removable=removable), removable, 0.125)

    lower, higher = "lowers the loss by 0.28%", "costs 0.50%"
    assert meaning(-0.0056).startswith(f"Removing {subject} {lower} (nats per token 2 → 1.994; 95 % interval")
    assert meaning(0.01).startswith(f"Removing {subject} {higher} (nats per token 2 → 2.01; 95 % interval")
    said = (
        "+0.10% to +0.90%) on 4 of 8 sequences, which were held out, and +0.40% on those that chose the set"
    )
    assert said in meaning(0.01)


def quantized(model, kinds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, kinds, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")
def test_int8_products_have_exact_costs_and_no_estimates():
    model = quantized(encoder().float(), {nn.Linear})
    batch = [{"input_ids": ids()}]
    with pytest.raises(NotDifferentiableError, match=r"none that reaches 'encoder.layer.0.*exact"):
        measure(model, batch)
    importance = measure(model, batch, ImportanceSettings(exact=True))
    assert all(np.isnan(site.estimate).all() for site in importance.sites)
    assert all((site.exact > 0).all() for site in importance.sites)
    assert "none that reaches 'encoder.layer.0" in " ".join(importance.notes)
    assert importance.removable.sorted_by == "exact"


@pytest.mark.filterwarnings("ignore")
def test_sites_before_an_int8_product_have_no_estimates():
    model = quantized(encoder().float(), {"encoder.layer.1.intermediate.dense"})
    # the residual stream passes only a part of the gradient around the product
    with pytest.raises(NotDifferentiableError):
        measure(model, [{"input_ids": ids()}])
    model = quantized(encoder().float(), {"encoder.layer.0.intermediate.dense"})
    batch = [{"input_ids": ids()}]
    importance = measure(model, batch)
    first, second = importance.sites
    assert "no gradient" in first.why_not
    assert np.isnan(first.estimate).all()
    assert not second.why_not
    assert (second.estimate > 0).all()
    assert first.site in " ".join(importance.notes)
    assert {head.layer for head in importance.removable.heads} <= {1}
    exact = measure(model, batch, ImportanceSettings(exact=True))
    assert not exact.sites[0].why_not
    assert (exact.sites[0].exact > 0).all()


class Zeroed(torch.autograd.Function):
    """Identity with a gradient of zero."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class Silent(Heads):
    def forward(self, x):
        return Zeroed.apply(super().forward(x))


def test_gradients_of_exactly_0_are_not_estimates_if_removal_changes_the_loss():
    with pytest.raises(NotDifferentiableError, match="none that reaches"):
        measure(Silent(3).eval(), [torch.randn(2, 6, 4)])
    dead = Heads(3).eval()
    dead.out.weight.data.zero_()
    importance = measure(dead, [torch.randn(2, 6, 4)])
    assert not importance.sites[0].estimate.any()  # their cost is 0


def test_the_removable_finding_names_the_entropy_as_reference():
    settings = ImportanceSettings(exact=True, loss="output", probes=0, tolerance=5.0)
    audit = rw.audit(language_model(), [{"input_ids": ids()}], importance=settings)
    gone = audit.importance.removable
    assert gone.heads
    again = rw.importance.ablation_cost(language_model(), [{"input_ids": ids()[1:2]}], gone.heads, settings)
    assert gone.relative == pytest.approx(again.relative, rel=1e-5)  # sums of float32
    meaning = next(one.meaning for one in audit.findings if one.code == "REMOVABLE")
    assert "of the entropy of the predictions (KL divergence of" in meaning
    assert "→" not in meaning


def test_without_a_reference_no_removable_set_is_reported():
    model = language_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1e6)  # one token has probability 1
    importance = measure(model, [{"input_ids": ids()}], ImportanceSettings(exact=True, loss="output"))
    assert importance.reference == 0
    assert importance.removable is None
    assert "the entropy of the predictions" in importance.notes[-1]


def test_a_lack_of_memory_is_not_a_lack_of_gradients(monkeypatch):
    """The words of torch on a CPU, whose error is a plain RuntimeError."""

    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    monkeypatch.setattr(torch.autograd, "grad", full)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        measure_importance(language_model(), [{"input_ids": ids()}], ImportanceSettings(exact=False))
