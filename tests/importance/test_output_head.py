"""Losses from logits that are never whole equal losses from whole logits."""

import math
from functools import partial

import pytest
import torch
import transformers
from importance_cases import bert, ids, language_model, measure, t5
from tests.support.torch_names import Operations
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.importance import ImportanceSettings
from rankwise.importance.loss_choice import model_loss
from rankwise.importance.output_head import first_pass, without_labels

WORDS = 24
CHUNK = "rankwise.importance.output_head.CHUNK"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROUNDING = 256 * torch.finfo(torch.float64).eps
"""Sums of at most 256 terms in another order."""


def made(name, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, **SIZES, **SPECIAL, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


class Plain(nn.Module):
    """A plain module that returns a dict with logits; its head has a bias."""

    def __init__(self, after=lambda logits: logits):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.after = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS), after
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)

    def forward(self, input_ids):
        return {"logits": self.after(self.head(self.layer(self.embed(input_ids))))}


class Lora(nn.Module):
    """A head wrapped by a low-rank change."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, WORDS, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Neighbors(nn.Linear):
    """A head that also reads the token before."""

    def forward(self, x):
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class LastOnly(Plain):
    """Returns logits of the last token unless it has labels, as nanoGPT does."""

    def forward(self, input_ids, labels=None):
        states = self.layer(self.embed(input_ids))
        return {"logits": self.head(states if labels is not None else states[:, -1:])}


def with_head(head):
    model = language_model()
    model.lm_head = head(model.lm_head) if head is Lora else head(16, WORDS)
    return model


FAMILIES = {
    "Llama": partial(made, "Llama"),
    "Gemma2": partial(made, "Gemma2", head_dim=4, num_key_value_heads=2, final_logit_softcapping=0.1),
    "Cohere": partial(made, "Cohere", logit_scale=0.25),
    "Granite": partial(made, "Granite", logits_scaling=8.0),
    "GPT2": language_model,
    "Bert": partial(bert, "BertForMaskedLM"),
    "T5": partial(t5, "T5ForConditionalGeneration"),
    "plain": Plain,
    "LoRA": lambda: with_head(Lora),
}


def batch_of(name):
    tokens, mask = ids(3, 10), torch.ones(3, 10, dtype=torch.long)
    mask[1, 6:] = 0
    labels = ids(3, 10, seed=2).masked_fill(mask == 0, -100)
    labels[:, 2:4] = -100
    labels[2] = -100
    batch = {"input_ids": tokens, "labels": labels}
    return batch if name == "plain" else batch | {"attention_mask": mask}


def whole_loss(model, name, batch):
    """Return the summed loss of each sequence from whole logits."""
    inputs = {key: value for key, value in batch.items() if key != "labels" or name == "T5"}
    logits, labels = model(**inputs)["logits"], batch["labels"]
    if name not in ("Bert", "T5", "plain"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.mT, labels, reduction="none").sum(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_equal_the_results_of_whole_logits_which_are_never_formed(name, monkeypatch):
    monkeypatch.setattr(CHUNK, 3 * WORDS)
    model, batch, largest = FAMILIES[name]().eval().double(), batch_of(name), list[int]()
    loss = model_loss(model, [batch], ImportanceSettings(loss="masked" if name == "Bert" else "auto"))
    assert (loss.head is not None, loss.note) == (True, "")
    wanted = whole_loss(model, name, batch)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(wanted.sum(), weights, allow_unused=True)

    def note(function, args, out):
        # not the weights (D, V)
        if torch.is_tensor(out) and out.shape[-1:] == (WORDS,) and out.shape != (16, WORDS):
            largest.append(out.numel())

    given = loss.prepare(batch, batch, 0)
    output = loss.run(model, given)
    assert output.output["logits"].shape[1] == 1
    with Operations(note):
        losses = loss.read(output, given)
    assert 0 < max(largest) <= 3 * WORDS
    ours = torch.autograd.grad(losses.total.sum(), weights, allow_unused=True)
    torch.testing.assert_close(losses.total, wanted, rtol=ROUNDING, atol=ROUNDING)
    assert losses.count.tolist()[2] == 0
    size = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    for one, other in zip(ours, gradients, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING * size)


@pytest.mark.parametrize("name", ["GPT2", "Gemma2", "LoRA"])
def test_projections_have_the_fisher_matrix_of_whole_logits(name, monkeypatch):
    """The mean squared gradient of a projection is J'FJ, with F of the logits after the soft cap."""
    model, draws = FAMILIES[name]().eval().double(), 2000
    same = {"input_ids": ids(1, 4).expand(draws, -1)}
    loss = model_loss(model, [same])
    batch = loss.prepare(same, same, 0)
    logits = loss.run(model, batch)
    states = logits.states.detach().requires_grad_()
    direction = torch.randn(states.shape[1:], generator=torch.Generator().manual_seed(1)).double()
    moved = torch.autograd.functional.jvp(logits.of_rows, states[0, :-1].detach(), direction[:-1])
    shares, jacobian = moved[0].softmax(-1), moved[1]
    exact = float((shares * (jacobian - (shares * jacobian).sum(-1, keepdim=True)).square()).sum())
    drawn = loss.probe(type(logits)(states, logits.of_rows, WORDS), batch, torch.Generator().manual_seed(0))
    (gradients,) = torch.autograd.grad(drawn.sum(), states)
    squares = (gradients * direction).sum((1, 2)).square().mean().item()
    # the square of a sum of three tokens' bounded terms spreads by less than twice its mean
    assert squares == pytest.approx(exact, rel=5 * 2 / math.sqrt(draws))


def test_projections_do_not_depend_on_the_size_of_chunks(monkeypatch):
    settings = ImportanceSettings(exact=False, probes=2, tolerance=None)
    model, batches = language_model(), [{"input_ids": ids(3, 12)}]
    whole = measure(model, batches, settings)
    monkeypatch.setattr(CHUNK, 2 * WORDS)
    chunks = measure(model, batches, settings)
    for one, other in zip(whole.sites, chunks.sites, strict=True):
        assert other.curvature == pytest.approx(one.curvature, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: with_head(Neighbors), "no module makes them"),
        (lambda: Plain(lambda logits: logits + torch.arange(logits.shape[1])[:, None]), "no module"),
        (LastOnly, "without labels"),
    ],
    ids=["neighbors", "positions", "labels"],
)
def test_a_head_that_does_not_act_per_token_leaves_logits_whole_with_a_note(model, why, monkeypatch):
    monkeypatch.setattr(CHUNK, 3 * WORDS)
    monkeypatch.setattr("rankwise.importance.loss_choice.CHUNK", 3 * WORDS)
    model, batch = model().eval().double(), batch_of("plain")
    if not isinstance(model, LastOnly):
        del batch["labels"]
    kind = "labels" if isinstance(model, LastOnly) else "causal"
    loss = model_loss(model, [batch], ImportanceSettings(loss=kind))
    assert loss.head is None
    assert f"logits of all tokens at once, because {why}" in loss.note
    if kind == "causal":
        wanted = F.cross_entropy(model(**batch)["logits"][:, :-1].mT, batch["input_ids"][:, 1:])
        assert loss.mean(model, [batch]) == pytest.approx(wanted.item(), rel=1e-12)


def test_a_large_batch_is_first_run_on_one_sequence(monkeypatch):
    monkeypatch.setattr(CHUNK, 3 * WORDS)
    first = first_pass(language_model(), {"input_ids": ids(3, 12)})
    assert first.output.logits.shape == (1, 12, WORDS)


def test_labels_become_inputs_of_a_decoder():
    model, labels = t5("T5ForConditionalGeneration"), ids(2, 5)
    kept = without_labels(model, {"input_ids": ids(2, 7), "labels": labels})
    assert kept["decoder_input_ids"].tolist() == [[0, *row[:-1]] for row in labels.tolist()]


def sampled(tokens, seed=0, model=None, batches=None):
    settings = ImportanceSettings(exact=True, estimates=False, tolerance=None, tokens=tokens, seed=seed)
    return measure(model or language_model(), batches or [{"input_ids": ids(3, 30)}], settings)


def test_all_tokens_are_read_if_there_are_no_more():
    whole, same = sampled(None), sampled(29)
    assert (whole.tokens, same.tokens, same.counted) == (None, 29, 87)
    assert (same.value, same.standard_error) == (whole.value, 0.0)
    for one, other in zip(whole.sites, same.sites, strict=True):
        assert other.exact.tolist() == one.exact.tolist()
        assert not other.standard_error.any()


def test_sampled_costs_are_unbiased_and_apart_by_their_standard_errors():
    model = language_model(n_layer=1, n_head=1)
    whole, *draws = (
        sampled(tokens, seed, model).sites[0] for tokens, seed in [(None, 0), *((8, at) for at in range(60))]
    )
    errors = torch.tensor([(draw.exact - whole.exact).item() for draw in draws])
    stated = torch.tensor([draw.standard_error.item() for draw in draws])
    # 60 draws: the mean is within 4 standard errors, the spread within 4 / sqrt(2·60) = 37 %
    assert abs(errors.mean()) <= 4 * errors.std() / math.sqrt(60)
    assert stated.square().mean().sqrt().item() == pytest.approx(errors.std().item(), rel=0.37)


def test_one_token_of_several_has_no_standard_error():
    assert torch.tensor(sampled(1).sites[0].standard_error).isnan().all()


def test_merged_errors_equal_the_errors_of_one_audit():
    model, batches = language_model(), [{"input_ids": ids(2, 30, seed)} for seed in (1, 2)]
    settings = ImportanceSettings(exact=True, estimates=False, tolerance=None, tokens=8)
    parts = [rw.importance.measure_importance(model, [batch], settings) for batch in batches]
    shares = [part.heads.copy() for part in parts]
    parts[0].merge(parts[1])
    for address, head in parts[0].heads.items():
        both = [costs[address].standard_error for costs in shares]
        assert head.standard_error == pytest.approx(math.hypot(*both) / 2, rel=1e-12)


@pytest.mark.parametrize("tokens", [0, -1, 1.5])
def test_the_number_of_tokens_is_an_integer_above_0(tokens):
    with pytest.raises(rw.RankwiseError, match="`tokens`: expected"):
        ImportanceSettings(tokens=tokens)


def test_tokens_of_a_loss_without_tokens_are_refused():
    settings = ImportanceSettings(tokens=4, loss=lambda output, batch: output[0].mean((1, 2)))
    with pytest.raises(rw.RankwiseError, match="expected a loss of tokens or labels"):
        measure(language_model(), [{"input_ids": ids()}], settings)


@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["scale", "bias"])
def test_a_change_of_logits_below_the_rounding_of_bfloat16_is_seen(factor):
    bias = 0.02 * factor * torch.linspace(-1, 1, WORDS).bfloat16()
    model = Plain(lambda logits: (1.01 - 0.01 * factor) * logits + bias).eval().bfloat16()
    batch = {"input_ids": ids(2, 12), "labels": ids(2, 12)}
    loss = model_loss(model, [batch])
    with torch.no_grad():
        logits = model(batch["input_ids"])["logits"].float()
    assert loss.head is None
    wanted = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert loss.mean(model, [batch]) == pytest.approx(float(wanted), rel=1e-6)


def test_more_tokens_than_there_are_read_all():
    model, batches = made("Llama").eval(), [{"input_ids": ids(2, 12)}]
    costs = [
        measure(model, batches, ImportanceSettings(exact=True, tokens=tokens, tolerance=None)).sites[0].exact
        for tokens in (None, 10**9)
    ]
    assert (costs[0] == costs[1]).all()
    with pytest.raises(rw.errors.InputError, match="`tokens`"):
        ImportanceSettings(tokens=10**30)
