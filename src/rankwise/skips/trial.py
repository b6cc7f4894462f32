"""Try several λ: train a model a few steps with each, and compare the losses."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch, drop_unused_labels, each_batch, to_device
from rankwise._internals.forward import Progress, device_of
from rankwise._internals.parameters import parameter_groups
from rankwise.auditing.error_hints import batch_errors
from rankwise.errors import InputError, in_range, whole_number
from rankwise.importance.loss_choice import model_loss
from rankwise.importance.losses import Loss
from rankwise.importance.settings import ImportanceSettings
from rankwise.skips.add import add_lambda_skip, skips_of
from rankwise.skips.hook_places import check_module
from rankwise.skips.observe import TRIED, raise_lambdas

LossOfModel = Callable[[nn.Module, Any], Tensor]


def fitting_loss(model: nn.Module, batches: Sequence[Batch], mask_token: int | None = None) -> Loss:
    """Return the loss that fits a model and its batches. Raise `InputError` if nothing can be predicted."""
    check_module(model)
    with batch_errors(model, batches[0]):
        loss = model_loss(model, batches, ImportanceSettings(mask_token=mask_token))
    if loss.compares_outputs:
        fix = (
            "Put `labels` into the batches, or define `loss(model, batch)` (in the file of a factory). Its "
            "batch is one of the factory, or the model's input, such as the token ids (B, T) of a text."
        )
        raise InputError("`batches`", expected="labels, or a loss", got="neither", fix=fix)
    return loss


def try_lambdas(
    build: Callable[[], nn.Module],
    batches: Iterable[Batch],
    values: Sequence[float] = TRIED[1:],
    *,
    steps: int = 100,
    lr: float = 3e-4,
    seed: int = 0,
    loss: LossOfModel | None = None,
    mask_token: int | None = None,
    alternatives: Mapping[str, Callable[[], nn.Module]] | None = None,
    on_progress: Progress = lambda step, done: None,
) -> dict[str, list[float]]:
    """Train a model unchanged, with each λ, and alternatives. Return the loss before each step of each run.

    Each run builds its model from the same seed and trains a copy by AdamW, with gradients clipped to norm 1
    and without warm-up. λ-skips are added, or every smaller |λ| is raised to the value. A run ends with its
    first loss that is not finite. Ctrl-C ends the trial: the finished runs are returned. Each alternative
    runs on a batch first, so that its error is raised before any training.

    Cost: ``steps`` forward and backward passes per run.

    Args:
        build: function that returns the model.
        batches: batches, used in turn; at most ``steps`` of them are read.
        steps: number of steps of each run.
        lr: learning rate, for the groups of `rankwise.models.parameter_groups`.
        seed: random seed of weights and dropout.
        loss: function of (model, batch) that returns the loss; by default the loss that
            `rankwise.importance.measure_importance` reads from labels in the batches or from next tokens.
        mask_token: id of the mask token, for the loss of masked language models.
        alternatives: functions that return other models for the same batches, by name.
        on_progress: function called with the text of run and step, and the finished share of all steps.

    Raises:
        InputError: if no loss is known, a model does not run on a batch, or an argument is out of its range.
        SkipError: if λ-skips cannot be added to a model.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = lambda **options: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
        >>> other, x = {"pre-norm": lambda: layer(norm_first=True)}, torch.randn(2, 9, 8)
        >>> loss = lambda model, x: (model(x) - x).square().mean()
        >>> runs = rw.skips.try_lambdas(layer, [x], [2.0], steps=3, loss=loss, alternatives=other)
        >>> {name: len(losses) for name, losses in runs.items()}
        {'as it is': 3, 'λ = 2': 3, 'pre-norm': 3}
    """
    whole_number("`steps`", steps, 1)
    in_range("`lr`", lr, "(0, inf)")
    read, runs = list(islice(each_batch(batches), steps)), dict[str, list[float]]()
    tried = [("as it is", build, None), *((f"λ = {value:g}", build, value) for value in values)]
    tried += [(name, other, None) for name, other in (alternatives or {}).items()]
    devices = range(torch.cuda.device_count())  # all devices that `manual_seed` changes
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), suppress(KeyboardInterrupt):
        for other in (alternatives or {}).values():  # first, so that an error loses no training
            model, inputs, loss_of = _prepared(other, read, None, seed, loss, mask_token)
            with batch_errors(model, inputs[0]), torch.no_grad():
                loss_of(model, inputs[0])
        for name, make, value in tried:
            model, inputs, loss_of = _prepared(make, read, value, seed, loss, mask_token)

            def report(step: int, name: str = name, finished: int = len(runs)) -> None:
                on_progress(
                    f"training {name}, step {step + 1} of {steps}", (finished + step / steps) / len(tried)
                )

            runs[name] = _train(model, inputs, steps, lr, loss_of, report)
    return runs


def _prepared(
    make: Callable[[], nn.Module], batches: Sequence[Batch], value: float | None, seed: int,
    loss: LossOfModel | None, mask_token: int | None,
) -> tuple[nn.Module, list[Batch], LossOfModel]:  # fmt: skip
    """Return a new model with |λ| of at least a value, the batches on its device, and its loss."""
    torch.manual_seed(seed)
    model = deepcopy(make())
    inputs: list[Batch] = to_device(list(batches), device_of(model))
    if value is not None:
        example = drop_unused_labels(model, inputs[0])[0]
        skips = skips_of(model) or add_lambda_skip(model, value, example=example)
        for site, raised in raise_lambdas(skips, value).items():
            skips[site].data.copy_(raised)
    loss_of = loss
    if loss_of is None:
        loss_of = fitting_loss(model, inputs, mask_token)
    torch.manual_seed(seed)  # same dropout, however many numbers the weights have drawn
    return model, inputs, loss_of


def _train(
    model: nn.Module, batches: Sequence[Batch], steps: int, lr: float, loss: LossOfModel,
    report: Callable[[int], None],
) -> list[float]:  # fmt: skip
    """Train a model, and return the loss before each step. Stop after a loss that is not finite."""
    optimizer, losses = torch.optim.AdamW(parameter_groups(model, 0.01), lr=lr), list[float]()
    model.train()
    for step, batch in enumerate(islice(cycle(batches), steps)):
        report(step)
        optimizer.zero_grad()
        with batch_errors(model, batch):
            mean = loss(model, batch)
        losses.append(float(mean.detach()))
        if not math.isfinite(losses[-1]):
            break
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses
