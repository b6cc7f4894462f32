"""The chosen loss fits the model and has the value that its name promises."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers
from importance_cases import CHEAP, Classifier, Heads, bert, encoder, ids, language_model, measure, t5
from tests.support.torch_names import Operations, tree_leaves
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.importance import ImportanceSettings, losses


def nats(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2).double(), labels.flatten()).item()


def test_a_causal_language_model_predicts_the_next_token():
    model, tokens = language_model(), ids()
    importance = measure(model, [{"input_ids": tokens}], CHEAP)
    assert (importance.loss, importance.unit) == ("next tokens, causal", "nats per token")
    assert importance.value == pytest.approx(nats(model(tokens).logits[:, :-1], tokens[:, 1:]), rel=1e-12)


def test_the_loss_alone_takes_one_pass_and_no_gradients():
    model, batches = language_model(), [{"input_ids": ids(seed=seed)} for seed in (1, 2)]
    whole = rw.audit(model, batches, importance="exact").importance
    parts = [rw.audit(model, [batch], loss=True) for batch in batches]
    audit = rw.audit(model, batches, loss=True)
    assert (audit.importance.loss, audit.importance.value) == (whole.loss, whole.value)
    assert (audit.importance.forward, audit.importance.backward) == (1 + len(batches), 0)
    assert (audit.importance.blocks, audit.importance.removable) == ([], None)
    assert all(head.importance is None and math.isnan(head.removal_cost) for head in audit.heads)
    merged = rw.Audit.merge(parts).importance
    assert (merged.value, merged.notes) == (pytest.approx(whole.value, rel=1e-12), [])
    text = " ".join(audit.summary(1000).split())
    assert f"loss {whole.value:.4g} nats per token" in text
    assert "costs of removing heads, `importance=True`" in text


def test_a_request_for_only_the_loss_is_refused_if_the_model_has_none():
    with pytest.raises(rw.RankwiseError, match=r"expected .*labels.*got .*change of the output") as caught:
        rw.audit(encoder(), [{"input_ids": ids()}], loss=True)
    assert len(caught.value.audit.heads) == 8


def test_labels_of_a_causal_language_model_are_shifted_and_left_out():
    model, tokens = language_model(), ids()
    labels = tokens.clone()
    labels[:, :5] = -100
    importance = measure(model, [{"input_ids": tokens, "labels": labels}], CHEAP)
    assert importance.counted == 15
    assert importance.value == pytest.approx(nats(model(tokens).logits[:, 4:-1], tokens[:, 5:]), rel=1e-12)


def test_masked_tokens_are_predicted_if_the_mask_token_is_known():
    model, tokens = bert("BertForMaskedLM"), ids(4, 30)
    settings = ImportanceSettings(exact=False, probes=0, tolerance=None, mask_token=1)
    importance = measure(model, [{"input_ids": tokens}], settings)
    again = measure(model, [{"input_ids": tokens}], settings)
    assert importance.loss == "masked tokens, 15% of them, seed 0"
    assert importance.value == again.value
    # 112 tokens may be masked: four standard deviations of a binomial around 15 % of them
    assert abs(importance.counted - 16.8) <= 4 * math.sqrt(112 * 0.15 * 0.85)
    unknown = measure(model, [{"input_ids": tokens}], CHEAP)
    assert unknown.loss.startswith("KL divergence")


def test_an_audit_takes_the_mask_token_of_the_tokenizer():
    class Tokenizer:
        mask_token_id = 1

        def __call__(self, texts):
            raise AssertionError("there are no texts")

    model, batch = bert("BertForMaskedLM"), {"input_ids": ids(2, 30)}
    audit = rw.audit(model, [batch], importance=CHEAP, tokenizer=Tokenizer())
    assert audit.importance.loss.startswith("masked tokens")


def test_an_encoder_decoder_predicts_the_next_token_of_its_decoder():
    model = t5("T5ForConditionalGeneration")
    batch = {"input_ids": ids(), "decoder_input_ids": ids(seed=2)}
    importance = measure(model, [batch], ImportanceSettings(exact=True, probes=1, tolerance=None))
    assert importance.loss == "next tokens, encoder-decoder"
    wanted = nats(model(**batch).logits[:, :-1], batch["decoder_input_ids"][:, 1:])
    assert importance.value == pytest.approx(wanted, rel=1e-6)
    labelled = measure(model, [{"input_ids": ids(), "labels": ids(seed=2)}], CHEAP)
    assert labelled.value == pytest.approx(model(input_ids=ids(), labels=ids(seed=2)).loss.item(), rel=1e-6)
    assert {site.site.split(".")[-1] for site in importance.sites} == {"SelfAttention", "EncDecAttention"}
    assert all(np.isfinite(site.exact).all() for site in importance.sites)


def test_labels_of_classifiers():
    model, labels = bert("BertForSequenceClassification", num_labels=3), torch.tensor([0, 2, 1])
    batch = {"input_ids": ids(), "labels": labels}
    importance = measure(model, [batch], CHEAP)
    assert (importance.loss, importance.unit, importance.counted) == ("given labels", "nats per label", 3)
    assert importance.value == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert measure(model, [{"input_ids": ids()}], CHEAP).loss.startswith("KL divergence")


def test_labels_that_are_not_classes_leave_the_loss_to_the_model():
    model = bert("BertForSequenceClassification", num_labels=1)
    batch = {"input_ids": ids(), "labels": torch.tensor([0.5, 2.0, -1.0])}
    importance = measure(model, [batch], ImportanceSettings(exact=True, tolerance=None))
    assert importance.loss == "the model's own, one number a batch"
    assert importance.value == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert importance.probes == 0
    assert np.isfinite(importance.sites[0].estimate).all()


class NanoGPT(nn.Module):
    """Returns logits alone without targets; otherwise what ``returns`` makes of logits, loss and states."""

    def __init__(self, returns, shift=False, scale=1.0):
        super().__init__()
        self.inner, self.returns, self.shift, self.scale = language_model(), returns, shift, scale

    def forward(self, idx, targets=None):
        logits = self.inner(idx).logits
        if targets is None:
            return logits[:, -1:], None
        ours, theirs = (logits[:, :-1], targets[:, 1:]) if self.shift else (logits, targets)
        return self.returns(logits, self.scale * F.cross_entropy(ours.mT, theirs), logits.mean(-1)[:, None])


class Found:
    def __init__(self, logits, loss):
        self.pred, self.ce = logits, loss


OUTPUTS = {
    "(logits, loss)": lambda logits, loss, states: (logits, loss),
    "(loss, logits)": lambda logits, loss, states: (loss, logits),
    "[loss (1,), logits]": lambda logits, loss, states: [loss[None], logits],
    "dict with other names": lambda logits, loss, states: {"ce": loss, "pred": logits},
    "object with other names": lambda logits, loss, states: Found(logits, loss),
    "logits by name": lambda logits, loss, states: {"states": states, "loss": loss, "logits": logits},
    "states first": lambda logits, loss, states: (states, logits, loss),
    "loss": lambda logits, loss, states: loss,
}


@pytest.mark.parametrize("shift", [False, True], ids=["shifted by the user", "shifted by the model"])
@pytest.mark.parametrize(
    ("output", "named"), [*((name, False) for name in OUTPUTS), ("(logits, loss)", True), ("loss", True)]
)
def test_the_loss_of_targets_is_the_loss_that_the_model_returns(output, shift, named):
    x = ids(tokens=9)
    y = x if shift else ids(tokens=10)[:, 1:]
    model = NanoGPT(OUTPUTS[output], shift)
    importance = measure(model, [{"idx": x, "targets": y} if named else (x, y)], CHEAP)
    loss = F.cross_entropy(model.inner(x).logits[:, :-1].mT, ids(tokens=9)[:, 1:]) if shift else None
    wanted = nats(model.inner(x).logits, y) if loss is None else loss.item()
    assert importance.value == pytest.approx(wanted, rel=1e-12)
    assert importance.unit.startswith("unit of" if output in ("loss", "states first") else "nats per")


def test_a_loss_that_is_not_the_cross_entropy_of_the_only_logits_is_taken_from_the_model():
    model, pair = NanoGPT(OUTPUTS["(logits, loss)"], scale=2.0), (ids(), ids(seed=2))
    importance = measure(model, [pair], CHEAP)
    assert importance.loss == "the model's own, one number a batch"
    assert importance.value == pytest.approx(2 * nats(model.inner(pair[0]).logits, pair[1]), rel=1e-12)
    alone = measure(model, [pair], dataclasses.replace(CHEAP, loss="labels"))
    assert alone.value == pytest.approx(importance.value / 2, rel=1e-12)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_language_model_of_transformers_may_return_a_tuple(labelled):
    model, tokens = language_model(), ids()
    batch = {"input_ids": tokens} | ({"labels": tokens} if labelled else {})
    wanted = measure(model, [batch], CHEAP)
    found = measure(model, [batch | {"return_dict": False}], CHEAP)
    assert (found.loss, found.value) == (wanted.loss, wanted.value)


def test_an_input_with_the_name_of_labels_is_not_a_label():
    class Both(Heads):
        def forward(self, x, y):
            return super().forward(x + y[..., None])

    importance = measure(Both(2), [(torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.long))], CHEAP)
    assert importance.loss == "relative squared change of the output"


def test_pairs_of_inputs_and_labels_under_an_audit():
    model, x, y = Classifier(), torch.randn(5, 6, 4), torch.tensor([0, 1, 2, 0, 1])
    audit = rw.audit(model, iter([(x, y)]), importance=CHEAP)
    assert audit.importance.loss == "given labels"
    assert audit.importance.value == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


def test_a_loss_may_be_a_function():
    def distance(output, batch):
        return (output - batch).square().mean((1, 2))

    model, x = Heads(3), torch.randn(4, 6, 4)
    importance = measure(model, [x], ImportanceSettings(loss=distance, exact=True, tolerance=None))
    assert importance.loss == "distance"
    assert importance.value == pytest.approx(distance(model(x), x).mean().item(), rel=1e-6)
    whole = measure(
        model, [x], ImportanceSettings(exact=False, loss=lambda *both: distance(*both).mean(), tolerance=None)
    )
    gradients = [found.sites[0].curvature - found.sites[0].estimate for found in (whole, importance)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4)
    with pytest.raises(rw.errors.InputError, match="loss of each sequence"):
        measure(model, [x], ImportanceSettings(exact=False, loss=lambda output, batch: output))


@pytest.mark.parametrize("loss", ["causal", "masked", "labels", "own", "encoder-decoder"])
def test_a_loss_that_does_not_fit_is_refused(loss):
    with pytest.raises(rw.errors.InputError):
        measure(Heads(2), [torch.randn(1, 6, 4)], ImportanceSettings(exact=False, loss=loss))


KINDS = losses.LabelLoss, losses.DivergenceLoss


@pytest.mark.parametrize(("loss", "dtype"), [("causal", torch.bfloat16), ("output", torch.float64)])
def test_chunks_of_tokens_change_no_number_and_need_less_memory(loss, dtype, monkeypatch):
    model, largest = language_model().to(dtype), []
    batches = [{"input_ids": ids(2, 9)}, {"input_ids": ids(3, 11), "attention_mask": torch.ones(3, 11)}]
    batches[1]["attention_mask"][1, 4:] = 0
    settings = ImportanceSettings(loss=loss, exact=True, probes=2, tolerance=None)
    whole = measure(model, batches, settings)

    def measure_new(function, args, out):
        given = [one.untyped_storage().data_ptr() for one in tree_leaves(args) if torch.is_tensor(one)]
        new = torch.is_tensor(out) and out.untyped_storage().data_ptr() not in given
        if new and out.shape[-1:] == (24,):
            largest.append(out.numel())

    def read(self, output, batch, of={kind: kind.read for kind in KINDS}):  # noqa: B006
        with Operations(measure_new):
            return of[type(self)](self, output, batch)

    for kind in KINDS:
        monkeypatch.setattr(kind, "read", read)
    monkeypatch.setattr("rankwise.importance.output_head.CHUNK", 3 * 24)  # three tokens
    chunks = measure(model, batches, settings)
    assert 0 < max(largest) <= 3 * 24
    # each token has its own softmax: only sums over tokens may be rounded in another order
    rounding = 64 * torch.finfo(max(dtype, torch.float32, key=lambda of: torch.finfo(of).bits)).eps
    assert chunks.value == pytest.approx(whole.value, rel=rounding)
    for one, other in zip(chunks.sites, whole.sites, strict=True):
        for name in ("curvature", "estimate", "exact"):
            ours, wanted = getattr(one, name), getattr(other, name)
            np.testing.assert_allclose(ours, wanted, rtol=rounding, atol=rounding * abs(whole.value + 1))


STATES = encoder, {"input_ids": ids()}
LOGITS = Classifier, torch.randn(4, 6, 4)


@pytest.mark.parametrize(("build", "batch"), [STATES, LOGITS], ids=["states", "logits"])
def test_outputs_are_compared_if_no_labels_are_known(build, batch):
    importance = measure(build(), [batch], ImportanceSettings(exact=True, tolerance=None))
    assert (importance.loss, importance.value) == ("relative squared change of the output", 0)
    assert all((site.exact >= 0).all() for site in importance.sites)


def test_channels_of_mamba_have_exact_costs():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": 0, "vocab_size": 24}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    importance = measure(model, [{"input_ids": ids()}], ImportanceSettings(exact=True, probes=1))
    assert importance.sites[0].exact.shape == (32,)
    assert np.isfinite(importance.sites[0].exact).all()
    projection = model.backbone.layers[0].mixer.out_proj.weight.data
    before = nats(model(ids()).logits[:, :-1], ids()[:, 1:])
    projection[:, 3] = 0
    after = nats(model(ids()).logits[:, :-1], ids()[:, 1:])
    # differences of two float32 losses of about 3: 2^-24 of that, a dozen times over
    assert importance.sites[0].exact[3] == pytest.approx(after - before, abs=5e-6)


def without_head(model, layer, head):
    """Return a copy of a BERT whose attention output does not read a head."""
    other = copy.deepcopy(model)
    weight = other.bert.encoder.layer[layer].attention.output.dense.weight.data
    width = weight.shape[1] // 2
    weight[:, head * width : (head + 1) * width] = 0
    return other


def moved(before, after):
    """Return the mean over sequences of ‖Y' − Y‖²/‖Y‖²."""
    change = (after - before).double().square().flatten(1).sum(1)
    return (change / before.double().square().flatten(1).sum(1)).mean().item()


@pytest.mark.parametrize(
    ("kind", "settings", "fields"),
    [
        ("BertForQuestionAnswering", {}, ("start_logits", "end_logits")),
        ("BertForSequenceClassification", {"num_labels": 1}, ("logits",)),
        ("BertForSequenceClassification", {"problem_type": "regression", "num_labels": 3}, ("logits",)),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, ("logits",)),
    ],
)
def test_the_change_is_measured_in_every_result_and_never_in_a_softmax_of_scores(kind, settings, fields):
    """The KL divergence of one class is 0, whatever the head does."""
    model, batch = bert(kind, **settings), {"input_ids": ids()}
    importance = measure(model, [batch], ImportanceSettings(exact=True, tolerance=None))
    named = f" ({', '.join(fields)})" if fields != ("logits",) else ""
    assert importance.loss == f"relative squared change of the output{named}"
    with torch.no_grad():
        before, after = model(**batch), without_head(model, 0, 1)(**batch)
    by_hand = np.mean([moved(before[field], after[field]) for field in fields])
    # differences of float32 outputs of relative size 1e-2 or more
    assert importance.sites[0].exact[1] == pytest.approx(by_hand, rel=1e-4)
    assert by_hand > 0


def test_logits_as_many_as_the_pixels_of_a_patch_are_not_classes():
    model = bert("BertForTokenClassification", num_labels=12)
    assert measure(model, [{"input_ids": ids()}], CHEAP).loss.startswith("KL divergence")
    model.config.patch_size, model.config.num_channels = 2, 3
    assert measure(model, [{"input_ids": ids()}], CHEAP).loss == "relative squared change of the output"


def test_a_tuple_of_results_is_read_in_a_dict_and_encoder_states_are_not():
    first, second, encoded = torch.randn(3, 2, 4, 5).unbind()
    assert losses.results_of({"params": (first, second), "encoder_last_hidden_state": encoded}) == {
        "params": [first, second]
    }
    assert [*losses.results_of({"class_queries_logits": first, "masks_queries_logits": second})] == [
        "class_queries_logits",
        "masks_queries_logits",
    ]
    assert [*losses.results_of({"pooler_output": first, "last_hidden_state": second})] == [
        "last_hidden_state"
    ]
    assert [*losses.results_of({"itm_score": first, "last_hidden_state": second})] == [
        "itm_score",
        "last_hidden_state",
    ]
    assert [*losses.results_of({"last_hidden_state": second, "router_logits": (first,)})] == [
        "last_hidden_state"
    ]
    assert [*losses.results_of({"hidden_states": (first,)})] == ["hidden_states"]
    assert losses.results_of((torch.tensor(1.0), (first, second), encoded)) == {"": [first, second]}
    assert losses.results_of({"loss": torch.tensor(1.0)}) == {}


def test_a_loss_that_the_model_returns_for_other_labels_is_used():
    model, tokens = bert("BertForQuestionAnswering"), ids()
    batch = {"input_ids": tokens, "start_positions": tokens[:, 0] % 10, "end_positions": tokens[:, 1] % 10}
    importance = measure(model, [batch], ImportanceSettings(exact=True, tolerance=None))
    assert importance.loss == "the model's own, one number a batch"
    before, after = (run(**batch).loss.item() for run in (model, without_head(model, 0, 1)))
    assert importance.value == pytest.approx(before, rel=1e-6)
    assert importance.sites[0].exact[1] == pytest.approx(after - before, abs=5e-6)


def test_choices_on_an_axis_of_their_own_have_the_loss_of_the_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**sizes)).eval()
    tokens = torch.stack([ids(), ids(seed=2)], 1)
    batch = {"input_ids": tokens, "mc_token_ids": torch.full((3, 2), 9), "labels": tokens}
    batch["mc_labels"] = torch.tensor([0, 1, 0])
    importance = measure(model, [batch], CHEAP)
    assert importance.loss == "the model's own, one number a batch"
    assert importance.value == pytest.approx(model(**batch).loss.item(), rel=1e-6)


class Noisy(nn.Module):
    """A model that adds noise to its input in every pass."""

    def __init__(self, noise=0.5):
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.noise, self.layers = noise, nn.ModuleList(layers)

    def forward(self, x):
        x = x + self.noise * torch.randn_like(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_random_numbers_are_the_same_in_every_pass():
    model, batch = Noisy().eval(), torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    importance = measure(model, [batch], ImportanceSettings(exact=True))
    assert torch.equal(torch.get_rng_state(), state)
    (note,) = importance.notes

    def output(seed, head=None):
        other = copy.deepcopy(model)
        if head is not None:
            other.layers[0].self_attn.out_proj.weight.data[:, 4 * head : 4 * head + 4] = 0
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            return other(batch)

    for head in (0, 1):
        by_hand = moved(output(0), output(0, head))
        assert importance.sites[0].exact[head] == pytest.approx(by_hand, rel=1e-4)
    noise = moved(output(0), output(1))
    assert importance.sites[0].exact.max() < noise / 10
    assert f"the loss of batch 1 changes by {noise:.2g} of its squared norm" in note
    assert measure(Noisy(0.0).eval(), [batch], ImportanceSettings(exact=True)).notes == []


@pytest.mark.parametrize("labelled", [False, True])
def test_logits_of_more_positions_than_tokens_do_not_predict_next_tokens(labelled):
    """Prompt tuning puts learned vectors before the tokens, so the logits of the first tokens come later."""

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = language_model()

        def forward(self, input_ids, labels=None):
            words = self.inner.get_input_embeddings()(input_ids)
            return {"logits": self.inner(inputs_embeds=torch.cat([words[:, :2], words], 1)).logits}

    ids = torch.arange(16).view(2, 8)
    batch = {"input_ids": ids} | ({"labels": ids} if labelled else {})
    settings = ImportanceSettings(loss="causal", estimates=False)
    with pytest.raises(rw.RankwiseError, match="logits of the 8 tokens in the batch, got logits of 10"):
        rw.importance.measure_importance(Prompted().eval(), [batch], settings)
