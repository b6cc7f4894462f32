"""`try_lambdas`: losses equal the losses of the described trainings, and no model of the user changes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.untouched import untouched
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.errors import InputError

DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(16, (3, 2, 9), generator=DRAW)
LABELLED = [{"x": ids[:, :-1], "labels": ids[:, 1:]} for ids in IDS]


class Bytes(nn.Module):
    """Predict a token of 16 from each token, by two layers of PyTorch."""

    def __init__(self, norm_first: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def by_hand(build: Callable[[], nn.Module], steps: int, value: float | None = None) -> list[float]:
    torch.manual_seed(7)
    model, losses = build(), []
    if value is not None:
        rw.add_lambda_skip(model, init=value, example=LABELLED[0]["x"])
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(rw.models.parameter_groups(model, 0.01), lr=0.01)
    for step in range(steps):
        lost = loss(model.train(), LABELLED[step % 3])
        losses.append(lost.item())
        optimizer.zero_grad()
        lost.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def test_runs_are_trainings_with_adamw_from_one_seed() -> None:
    other, told = {"pre-norm": lambda: Bytes(norm_first=True)}, list[tuple[str, float]]()
    runs = rw.skips.try_lambdas(
        Bytes, iter(LABELLED), [2.0, -3.0], steps=5, lr=0.01, seed=7, loss=loss, alternatives=other,
        on_progress=lambda step, done: told.append((step, done)),
    )  # fmt: skip
    assert list(runs) == ["as it is", "λ = 2", "λ = -3", "pre-norm"]
    assert [step for step, _ in told] == [
        f"training {name}, step {n} of 5" for name in runs for n in range(1, 6)
    ]
    assert [done for _, done in told] == pytest.approx([step / 20 for step in range(20)])
    assert runs["as it is"] == by_hand(Bytes, 5)
    assert runs["λ = 2"] == by_hand(Bytes, 5, 2.0)
    assert runs["λ = -3"] == by_hand(Bytes, 5, -3.0)
    assert runs["pre-norm"] == by_hand(other["pre-norm"], 5)


def test_labels_of_the_batches_are_predicted_if_no_loss_is_given() -> None:
    own, read = (rw.skips.try_lambdas(Bytes, LABELLED, [2.0], steps=4, loss=one) for one in (loss, None))
    for name, losses in own.items():
        assert read[name] == pytest.approx(losses, rel=1e-5)


def test_batches_without_labels_are_refused_without_a_loss() -> None:
    with pytest.raises(InputError, match=r"expected labels, or a loss, got neither\. Put `labels` into"):
        rw.skips.try_lambdas(Bytes, [IDS[0]], [2.0], steps=1)


def test_no_model_and_no_random_state_of_the_user_changes() -> None:
    model, other = Bytes().eval(), Bytes(norm_first=True).eval()
    state = torch.get_rng_state()
    with untouched(model), untouched(other):
        runs = rw.skips.try_lambdas(
            lambda: model, LABELLED, [2.0, 4.0], steps=2, alternatives={"other": lambda: other}
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert not rw.skips.skips_of(model)
    assert runs["as it is"][0] != runs["λ = 2"][0]


def test_smaller_lambdas_of_a_model_are_raised() -> None:
    def skipped(values: list[float]) -> nn.Module:
        model = Bytes(dropout=0.0)
        skips = rw.add_lambda_skip(model, example=LABELLED[0]["x"])
        for skip, value in zip(skips.values(), values, strict=True):
            skip.data.fill_(value)
        return model

    other = {"raised": lambda: skipped([-2.0, 3.0])}
    runs = rw.skips.try_lambdas(lambda: skipped([-0.5, 3.0]), LABELLED, [2.0], steps=3, alternatives=other)
    assert runs["λ = 2"] == runs["raised"] != runs["as it is"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_ends_with_its_first_loss_that_is_not_finite(bad: float) -> None:
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(batch)
        return loss(model, batch) * (bad if len(calls) == 2 else 1)

    runs = rw.skips.try_lambdas(Bytes, LABELLED, [2.0], steps=3, loss=failing)
    first, second = runs.values()
    assert len(first) == 2
    assert not math.isfinite(first[1])
    assert len(second) == 3
    assert all(map(math.isfinite, second))


def test_ctrl_c_keeps_the_runs_that_are_done() -> None:
    calls = []

    def interrupted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(batch)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return loss(model, batch)

    runs = rw.skips.try_lambdas(Bytes, LABELLED, [2.0, 4.0], steps=2, loss=interrupted)
    assert {name: len(losses) for name, losses in runs.items()} == {"as it is": 2, "λ = 2": 2}


def test_an_error_in_an_alternative_is_raised_before_any_training() -> None:
    with_gradient: list[bool] = []  # per loss: True in a training

    def noted(model: nn.Module, batch: Any) -> Tensor:
        with_gradient.append(torch.is_grad_enabled())
        return loss(model, batch)

    for wrong in (lambda: 1 / 0, lambda: nn.Linear(3, 3)):
        with pytest.raises((ZeroDivisionError, InputError)):
            rw.skips.try_lambdas(Bytes, LABELLED, [2.0], steps=1, loss=noted, alternatives={"bad": wrong})
    assert with_gradient == [False]  # second alternative: its output does not fit the labels


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"steps": 0}, "`steps`"),
        ({"lr": 0.0}, "`lr`"),
        ({"batches": []}, "at least one batch"),
        ({"batches": [{"z": IDS[0], "labels": IDS[0]}]}, "expected a batch that Bytes runs on"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"build": Bytes, "batches": LABELLED, "values": [2.0], "steps": 1} | change
    with pytest.raises(InputError, match=match):
        rw.skips.try_lambdas(**given)
