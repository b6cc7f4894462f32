"""Fitting λ: the loss falls, nothing else moves, and padding is not learnt from."""

import copy
import math

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, T5, hugging_face, text_inputs
from torch import nn

from rankwise.errors import InputError
from rankwise.measures import token_spread
from rankwise.skips import SkipError, add_lambda_skip, fit_skips, mean_loss, skips_of, spread_by_layer
from rankwise.skips.fit import loss_of

gpt2 = hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT)
MASK = 63
MODELS = {
    "causal": gpt2,
    "masked": hugging_face("BertForMaskedLM", "BertConfig", **BERT),
    "to and from": hugging_face("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_falls_and_nothing_else_moves(kind: str) -> None:
    model, batches = MODELS[kind]().train(), [text_inputs()]
    with torch.no_grad():
        for parameter in add_lambda_skip(model).values():
            parameter.fill_(0.3)
    first = next(model.parameters()).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = mean_loss(model, batches, MASK)
    fit = fit_skips(model, batches, steps=12, lr=0.02, mask_token=MASK)
    assert fit.losses[0] == pytest.approx(start, rel=1e-5)
    assert mean_loss(model, batches, MASK) < start
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.endswith("lambda_skip")}
    assert {name: scales[0] for name, scales in fit.scales.items()} == pytest.approx(
        dict.fromkeys(skips_of(model), 0.3)
    )
    assert model.training
    assert not first.requires_grad
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_is_not_learnt_from() -> None:
    model, batch = gpt2(), text_inputs()
    add_lambda_skip(model)
    longer = {
        "input_ids": torch.cat([batch["input_ids"], torch.full((2, 3), 9)], 1),
        "attention_mask": torch.tensor([[1] * 12 + [0] * 3] * 2),
    }
    assert loss_of(model, longer).item() == pytest.approx(loss_of(model, batch).item(), rel=1e-5)


def test_collapse_by_layer() -> None:
    model = gpt2()
    states = spread_by_layer(model, [text_inputs()])
    assert list(states) == ["transformer.h"]
    assert len(states["transformer.h"]) == 4
    assert all(0 < value < 1 for value in states["transformer.h"])


def test_collapse_of_batches_without_names() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, states = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    (found,) = spread_by_layer(model, [states]).values()
    assert found[0] == pytest.approx(float(token_spread(states).mean()))
    assert spread_by_layer(model, [(states,)]) == {"layers": found}


def test_models_without_a_loss_and_masks_without_a_token() -> None:
    bare = hugging_face("GPT2Model", **GPT)()
    add_lambda_skip(bare)
    with pytest.raises(SkipError, match="expected a language model of transformers with its head"):
        fit_skips(bare, [text_inputs()], steps=1)
    masked = MODELS["masked"]()
    add_lambda_skip(masked)
    with pytest.raises(SkipError, match="expected the id of the mask token"):
        fit_skips(masked, [text_inputs()], steps=1)


def test_without_skips_there_is_nothing_to_fit() -> None:
    with pytest.raises(SkipError, match="expected λ-skips that can learn, got none"):
        fit_skips(gpt2(), [text_inputs()], steps=1)


@pytest.mark.parametrize(
    ("lr", "steps", "words"),
    [
        (1e30, 4, "loss after step 1"),
        (1e30, 1, "loss after step 1"),
        (math.nextafter(math.inf, 0), 1, "λ of 'transformer.h.0.attn' after step 1"),
    ],
    ids=["loss midway", "loss after the last step", "λ after the last step"],
)
def test_a_fit_that_is_lost_leaves_the_skips_as_they_were(lr: float, steps: int, words: str) -> None:
    model = gpt2()
    add_lambda_skip(model, init=0.7)
    before = copy.deepcopy({name: value.detach() for name, value in skips_of(model).items()})
    with pytest.raises(SkipError, match=f"{words}: expected finite numbers.*lower learning rate"):
        fit_skips(model, [text_inputs()], steps=steps, lr=lr)
    assert all(torch.equal(value, before[name]) for name, value in skips_of(model).items())


def test_any_other_error_restores_the_skips_too() -> None:
    model = gpt2()
    skips = add_lambda_skip(model, init=0.7)

    def fail(*_: object) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        fit_skips(model, [text_inputs()], steps=2, on_step=fail)
    assert {round(value.item(), 6) for value in skips.values()} == {0.7}
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("lr", [-1.0, 0.0, math.inf, math.nan])
def test_what_is_no_learning_rate(lr: float) -> None:
    model = gpt2()
    add_lambda_skip(model)
    with pytest.raises(InputError, match=r"`lr`: expected a number in \(0, ∞\)"):
        fit_skips(model, [text_inputs()], steps=1, lr=lr)


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_of_padding_has_nothing_to_learn_from(kind: str) -> None:
    model = MODELS[kind]()
    add_lambda_skip(model)
    batch = text_inputs() | {"attention_mask": torch.zeros_like(text_inputs()["input_ids"])}
    with pytest.raises(SkipError, match="got no real token, all are padding"):
        fit_skips(model, [batch], steps=1, mask_token=MASK)


def test_a_causal_model_learns_nothing_from_one_token() -> None:
    batch = {name: value[:, :1] for name, value in text_inputs().items()}
    with pytest.raises(SkipError, match="got one real token a sequence"):
        loss_of(gpt2(), batch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_models_are_asked_for_real_tokens_only(side: str) -> None:
    model, ids = MODELS["masked"](), text_inputs()["input_ids"][:1]
    for place in range(ids.shape[1]):  # wherever the masks fall, one real token must be asked for
        mask = torch.zeros_like(ids)
        mask[:, slice(place, None) if side == "left" else slice(place + 1)] = 1
        assert math.isfinite(loss_of(model, {"input_ids": ids, "attention_mask": mask}, MASK).item())
