"""Fits of λ: the loss decreases, only λ changes, and padding is not predicted."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, hugging_face, text_inputs
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from rankwise.errors import InputError
from rankwise.measures import spread
from rankwise.skips import SkipError, add_lambda_skip, fit_skips, skips_of, spread_by_layer
from rankwise.skips.fit import fitting_loss

gpt2 = hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT)
MASK, TEXT = 63, text_inputs()
IDS = TEXT["input_ids"]
LONG = {"input_ids": IDS.repeat(1, 2)}


class Rows(IterableDataset):
    """Data set that has no length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from ({"input_ids": row} for row in IDS)


MODELS = {
    "causal": gpt2,
    "masked": hugging_face("BertForMaskedLM", "BertConfig", **BERT),
}


def mean_loss(model: nn.Module, batches: Any, mask_token: int | None = None) -> float:
    return fitting_loss(model, batches, mask_token).mean(model, batches)


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


@pytest.mark.parametrize(("error", "finished"), [(ValueError, 1), (KeyboardInterrupt, 0)])
def test_any_other_error_restores_lambda(error: type, finished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = skipped(init=0.7)
    monkeypatch.setattr(torch.optim.Adam, "step", stopping(error, finished))
    with untouched(model), pytest.raises(error):
        fit_skips(model, [TEXT], steps=2)


def test_an_interrupted_fit_has_the_lambda_of_the_last_finished_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = skipped(init=0.7), skipped(init=0.7)
    whole = fit_skips(other, [TEXT], steps=2)
    monkeypatch.setattr(torch.optim.Adam, "step", stopping(KeyboardInterrupt, 2))
    assert fit_skips(model, [TEXT], steps=9) == whole
    assert [value.item() for value in skips_of(model).values()] == [
        value.item() for value in skips_of(other).values()
    ]
    assert not any(value.grad is not None for value in model.parameters())


def stopping(error: type, finished: int) -> Any:
    """Return a step of Adam that raises, half done, after some finished steps."""
    whole, left = torch.optim.Adam.step, [None] * finished

    def step(self: torch.optim.Adam) -> None:
        whole(self)
        if not left:
            raise error("stopped")
        left.pop()

    return step


@pytest.mark.parametrize("batches", [lambda: (one for one in [TEXT, LONG]), lambda: DataLoader(Rows())])
def test_batches_may_be_any_iterable(batches: Any) -> None:
    listed = [{name: torch.as_tensor(value) for name, value in one.items()} for one in batches()]
    assert fit_skips(skipped(), batches(), steps=3) == fit_skips(skipped(), listed, steps=3)
    assert spread_by_layer(gpt2(), batches()) == spread_by_layer(gpt2(), listed)


PADDING = {"batches": [TEXT | {"attention_mask": torch.zeros_like(IDS)}], "mask_token": MASK}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{
        f"lr = {lr}": (skipped, {"lr": lr}, r"`lr`: expected a number in \(0, ∞\)")
        for lr in (-1.0, 0.0, math.inf, math.nan)
    },
    **{f"padding, {kind}": (partial(skipped, kind), PADDING, "expected") for kind in MODELS},
    "one token": (skipped, {"batches": [{"input_ids": IDS[:, :1]}]}, "expected"),
    "no skips": (gpt2, {}, "expected λ-skips that can learn, got none"),
    "no mask token": (partial(skipped, "masked"), {}, "`batches`: expected labels, or a loss, got neither"),
    "half a step": (skipped, {"steps": 0.5}, "`steps`: expected a whole number"),
    "no batches": (
        skipped,
        {"batches": []},
        "`batches`: expected an iterable of at least one batch, got none",
    ),
    "one batch": (
        skipped,
        {"batches": TEXT},
        "`batches`: expected an iterable of at least one batch, got dict",
    ),
    "text": (skipped, {"batches": ["text"]}, "batch 1: expected a batch with tokens.*got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fit_without_a_loss_is_refused(name: str) -> None:
    build, change, message = REFUSED[name]
    model = build()
    with unchecked(), untouched(model), pytest.raises((SkipError, InputError), match=message):
        fit_skips(model, **({"batches": [TEXT], "steps": 1} | change))


@pytest.mark.parametrize("name", ["no batches", "one batch", "text"])
def test_spreads_of_these_batches_and_of_a_name_are_refused(name: str) -> None:
    _, change, message = REFUSED[name]
    with unchecked(), pytest.raises(InputError, match=message):
        spread_by_layer(gpt2(), change["batches"])
    for call in (spread_by_layer, partial(fit_skips, steps=1)):
        with unchecked(), pytest.raises(SkipError, match=r"`model`: expected a torch\.nn\.Module, got str"):
            call("gpt2", [TEXT])


def test_any_model_with_labels_can_be_fitted() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3)).eval()
    x, labels = torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0])
    add_lambda_skip(model, example=x)
    losses = fit_skips(model, [(x, labels)], steps=3).losses
    assert losses[0] > losses[-1]


def test_spreads_are_returned_by_stack_and_layer() -> None:
    (values,) = spread_by_layer(gpt2(), [TEXT]).values()
    assert list(spread_by_layer(gpt2(), [TEXT])) == ["transformer.h"]
    assert len(values) == 4
    assert all(0 < value < 1 for value in values)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, states = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    (found,) = spread_by_layer(model, [states]).values()
    assert found[0] == pytest.approx(float(spread(states).mean()))
    assert spread_by_layer(model, [(states,)]) == {"layers": found}


def test_a_batch_on_which_the_model_fails_is_refused() -> None:
    model = skipped(init=0.7)
    with (
        untouched(model),
        pytest.raises(InputError, match="`batch`: expected a batch that GPT2LMHeadModel runs on"),
    ):
        fit_skips(model, [{"input_ids": IDS + 1000}], steps=1)
