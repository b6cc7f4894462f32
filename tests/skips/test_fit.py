"""Fits of λ: the loss decreases, only λ changes, and padding is not predicted."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, T5, hugging_face, text_inputs
from tests.support.untouched import untouched
from torch import nn

from rankwise.errors import InputError
from rankwise.measures import token_spread
from rankwise.skips import SkipError, add_lambda_skip, fit_skips, mean_loss, skips_of, spread_by_layer
from rankwise.skips.fit import loss_of

gpt2 = hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT)
MASK, TEXT = 63, text_inputs()
MODELS = {
    "causal": gpt2,
    "masked": hugging_face("BertForMaskedLM", "BertConfig", **BERT),
    "encoder-decoder": hugging_face("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0),
}


def skipped(kind: str = "causal", init: float = 1.0) -> nn.Module:
    model = MODELS[kind]()
    add_lambda_skip(model, init=init)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_decreases_and_only_lambda_changes(kind: str) -> None:
    model = skipped(kind, 0.3).train()
    next(model.parameters()).requires_grad_(False)
    start = mean_loss(model, [TEXT], MASK)
    with untouched(model, but="lambda_skip"):
        fit = fit_skips(model, [TEXT], steps=12, lr=0.02, mask_token=MASK)
    assert fit.losses[0] == pytest.approx(start, rel=1e-5)
    assert mean_loss(model, [TEXT], MASK) < start
    skips = skips_of(model)
    assert fit.scales == {name: [pytest.approx(0.3), value.item()] for name, value in skips.items()}
    assert all(value.requires_grad and value.grad is None and value.item() != 0.3 for value in skips.values())


@pytest.mark.parametrize(
    ("lr", "steps", "subject"),
    [
        (1e30, 4, "loss after step 1"),
        (1e30, 1, "loss after step 1"),  # the last step
        (math.nextafter(math.inf, 0), 1, "λ of 'transformer.h.0.attn' after step 1"),
    ],
)
def test_a_fit_that_diverges_restores_lambda(lr: float, steps: int, subject: str) -> None:
    model = skipped(init=0.7)
    with untouched(model), pytest.raises(SkipError, match=f"{subject}: expected finite.*lower learning rate"):
        fit_skips(model, [TEXT], steps=steps, lr=lr)


def test_any_other_error_restores_lambda() -> None:
    def fail(*_: object) -> None:
        raise ValueError("no room")

    model = skipped(init=0.7)
    with untouched(model), pytest.raises(ValueError, match="no room"):
        fit_skips(model, [TEXT], steps=2, on_step=fail)


IDS = TEXT["input_ids"]
PADDING = {"batches": [TEXT | {"attention_mask": torch.zeros_like(IDS)}], "mask_token": MASK}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{
        f"lr = {lr}": (skipped, {"lr": lr}, r"`lr`: expected a number in \(0, ∞\)")
        for lr in (-1.0, 0.0, math.inf, math.nan)
    },
    **{f"padding, {kind}": (partial(skipped, kind), PADDING, "got no real token") for kind in MODELS},
    "one token": (skipped, {"batches": [{"input_ids": IDS[:, :1]}]}, "one real token a sequence"),
    "no skips": (gpt2, {}, "expected λ-skips that can learn, got none"),
    "no mask token": (partial(skipped, "masked"), {}, "expected the id of the mask token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fit_without_a_loss_is_refused(name: str) -> None:
    build, change, message = REFUSED[name]
    model = build()
    with untouched(model), pytest.raises((SkipError, InputError), match=message):
        fit_skips(model, **({"batches": [TEXT], "steps": 1} | change))


def test_a_model_without_a_head_is_refused() -> None:
    bare = hugging_face("GPT2Model", **GPT)()
    add_lambda_skip(bare)
    with pytest.raises(SkipError, match="expected a language model of transformers with its head"):
        fit_skips(bare, [TEXT], steps=1)


def test_padding_does_not_change_the_loss() -> None:
    longer = {
        "input_ids": torch.cat([TEXT["input_ids"], torch.full((2, 3), 9)], 1),
        "attention_mask": torch.tensor([[1] * 12 + [0] * 3] * 2),
    }
    model = gpt2()
    assert loss_of(model, longer).item() == pytest.approx(loss_of(model, TEXT).item(), rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_sequence_of_a_masked_model_predicts_a_real_token(side: str) -> None:
    model, ids = MODELS["masked"](), TEXT["input_ids"][:1]
    for place in range(ids.shape[1]):  # for some lengths, no random mask falls on a real token
        mask = torch.zeros_like(ids)
        mask[:, slice(place, None) if side == "left" else slice(place + 1)] = 1
        assert math.isfinite(loss_of(model, {"input_ids": ids, "attention_mask": mask}, MASK).item())


def test_spreads_are_returned_by_stack_and_layer() -> None:
    (values,) = spread_by_layer(gpt2(), [TEXT]).values()
    assert list(spread_by_layer(gpt2(), [TEXT])) == ["transformer.h"]
    assert len(values) == 4
    assert all(0 < value < 1 for value in values)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, states = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    (found,) = spread_by_layer(model, [states]).values()
    assert found[0] == pytest.approx(float(token_spread(states).mean()))
    assert spread_by_layer(model, [(states,)]) == {"layers": found}
