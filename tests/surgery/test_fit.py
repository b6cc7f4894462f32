"""Fitting λ: the loss falls, nothing else moves, and padding is not learnt from."""

import copy

import pytest
import torch
from recipes.families import GPT, T5
from recipes.tiny_models import BERT, hugging_face, text_inputs

from rankwise.surgery import SkipError, add_lambda_skip, fit_skips, mean_loss, skips_of, state_collapse
from rankwise.surgery.fit import loss_of

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
    states = state_collapse(model, [text_inputs()])
    assert list(states) == ["transformer.h"]
    assert len(states["transformer.h"]) == 4
    assert all(0 < value < 1 for value in states["transformer.h"])


def test_models_without_a_loss_and_masks_without_a_token() -> None:
    bare = hugging_face("GPT2Model", **GPT)()
    add_lambda_skip(bare)
    with pytest.raises(SkipError, match="wanted a language model of transformers with its head"):
        fit_skips(bare, [text_inputs()], steps=1)
    masked = MODELS["masked"]()
    add_lambda_skip(masked)
    with pytest.raises(SkipError, match="wanted the id of the mask token"):
        fit_skips(masked, [text_inputs()], steps=1)


def test_without_skips_there_is_nothing_to_fit() -> None:
    with pytest.raises(SkipError, match="wanted λ-skips that can learn, got none"):
        fit_skips(gpt2(), [text_inputs()], steps=1)


def test_a_loss_that_is_lost_leaves_the_skips_as_they_were() -> None:
    model = gpt2()
    add_lambda_skip(model, init=0.7)
    before = copy.deepcopy({name: value.detach() for name, value in skips_of(model).items()})
    with pytest.raises(SkipError, match=r"loss of step \d: wanted a finite number"):
        fit_skips(model, [text_inputs()], steps=4, lr=1e30)
    assert all(torch.equal(value, before[name]) for name, value in skips_of(model).items())
