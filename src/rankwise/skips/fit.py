"""Learn λ: fit λ by the loss of a model, try several λ by training, or group λ for an optimizer."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch, drop_unused_labels, each_batch, to_device
from rankwise._internals.forward import device_of, eval_mode
from rankwise._internals.parameters import parameter_groups
from rankwise._internals.threads import exclusive
from rankwise.auditing.error_hints import batch_errors
from rankwise.errors import InputError, SkipError, in_range, whole_number
from rankwise.importance.loss_choice import model_loss
from rankwise.importance.losses import Loss
from rankwise.importance.settings import ImportanceSettings
from rankwise.skips.add import add_lambda_skip, check_finite, check_values, skips_of
from rankwise.skips.hook_places import check_module
from rankwise.skips.observe import TRIED, raise_lambdas

LossOfModel = Callable[[nn.Module, Any], Tensor]
RATE = "0.02 is the default; try less."
LOWER = "Use a lower learning rate; the λ are as they were before."


@dataclass
class SkipFit:
    """Result of a fit: the losses, and λ before and after it."""

    losses: list[float]
    """Loss before each finished step. There are fewer steps than requested if Ctrl-C stopped the fit."""
    scales: dict[str, list[float]]
    """λ of each site before the first and after the last step. For λ per channel, this is the mean λ."""


@exclusive
def fit_skips(
    model: nn.Module,
    batches: Iterable[Batch],
    steps: int,
    lr: float = 0.02,
    mask_token: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> SkipFit:
    """Fit the λ-skips of a model by its loss, and return losses and λ. All other parameters stay frozen.

    The loss predicts next tokens, masked tokens, or labels in the batches, as in
    `rankwise.importance.measure_importance`.
    Cost: a forward and a backward pass per step, and a forward pass at the start and at the end.

    Args:
        model: a model with λ-skips.
        batches: batches, used in turn; at most ``steps`` of them are read.
        steps: number of steps.
        lr: learning rate of Adam; there is no weight decay.
        mask_token: id of the mask token, for masked language models.
        on_step: function called after each step with the number of finished steps and the loss.

    Raises:
        InputError: if ``lr`` is not a finite number above 0, or the batches have nothing to predict.
        SkipError: if the model has no learnable λ, or a loss or λ is not finite.

    Any error restores the original λ. After Ctrl-C, λ of the last finished step are kept and returned.

    Examples:
        >>> import torch, rankwise as rw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)).eval()
        >>> ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
        >>> batch, _ = {"input_ids": ids, "attention_mask": ids > 0}, rw.add_lambda_skip(model)
        >>> losses = rw.skips.fit_skips(model, [batch], steps=2).losses
        >>> losses[0] > losses[1]
        True
    """
    in_range("`lr`", lr, "(0, inf)", fix=RATE)
    whole_number("`steps`", steps, 0)
    skips = skips_of(model)
    before = _means(skips)
    group = skip_parameter_groups(model)[0]
    inputs = list(islice(each_batch(batches), max(steps, 1)))
    loss_of = fitting_loss(model, inputs, mask_token)
    last = start = [parameter.detach().clone() for parameter in group["params"]]
    fitted = {id(parameter) for parameter in group["params"]}
    others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in fitted]
    losses: list[float] = []

    def finite_loss(step: int) -> Tensor:
        number = step % len(inputs)
        with batch_errors(model, inputs[number]):
            loss = loss_of(model, inputs[number], number)
        subject = f"loss after step {step}" if step else "loss before the first step"
        check_finite(subject, loss.detach(), LOWER)
        return loss

    try:
        for parameter in others:
            parameter.requires_grad_(False)
        optimizer = torch.optim.Adam([group], lr=lr)
        with eval_mode(model), torch.enable_grad():
            for step in range(steps):
                optimizer.zero_grad()
                loss = finite_loss(step)
                loss.backward()
                optimizer.step()
                check_values(skips, f" after step {step + 1}", LOWER)
                last = [parameter.detach().clone() for parameter in group["params"]]
                losses.append(loss.item())
                if on_step is not None:
                    on_step(step + 1, loss.item())
            if steps:  # the loss after the last update is checked here, because no step follows
                with torch.no_grad():
                    finite_loss(steps)
    except BaseException as error:
        restored = last if isinstance(error, KeyboardInterrupt) else start
        with torch.no_grad():
            for parameter, values in zip(group["params"], restored, strict=True):
                parameter.copy_(values)
        if restored is start:
            raise
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
        for parameter in group["params"]:
            parameter.grad = None
    after = _means(skips)
    return SkipFit(losses, {site: [before[site], after[site]] for site in skips})


def _means(skips: Mapping[str, Tensor]) -> dict[str, float]:
    return {site: float(value.detach().mean()) for site, value in skips.items()}


def skip_parameter_groups(
    model: nn.Module, weight_decay: float = 0.01, lr: float | None = None
) -> list[dict[str, Any]]:
    """Return groups for `torch.optim`: λ without weight decay, then `rankwise.models.parameter_groups`.

    Args:
        model: a model with λ-skips.
        weight_decay: weight decay of the matrices, at least 0; norms and biases do not decay.
        lr: learning rate of λ. If it is None, λ has the learning rate of the optimizer.

    Raises:
        SkipError: if no λ of the model can learn.
        InputError: if ``weight_decay`` is negative or not a number.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> _ = rw.add_lambda_skip(layer, example=torch.randn(1, 5, 8))
        >>> groups = rw.skips.skip_parameter_groups(layer, weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.0), (4, 0.1), (8, 0.0)]
    """
    skips = skips_of(model)
    scales = [parameter for parameter in skips.parameters() if parameter.requires_grad]
    if not scales:
        got, fix = "none", "Add them by `rw.add_lambda_skip(model, learnable=True)`."
        if skips:
            got = f"{len(skips)} frozen ones"
            fix = "Run `for scale in rw.skips.skips_of(model).parameters(): scale.requires_grad_(True)`."
        raise SkipError(f"model {type(model).__name__}", expected="λ-skips that can learn", got=got, fix=fix)
    rate = {} if lr is None else {"lr": lr}
    ids = {id(scale) for scale in scales}
    others = parameter_groups(model, weight_decay)
    for group in others:
        group["params"] = [weight for weight in group["params"] if id(weight) not in ids]
    return [{"params": scales, "weight_decay": 0.0, **rate}, *others]


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


# --- trial -----------------------------------------------------------------------------------------------


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
    on_run: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Train a model as it is, with each λ, and alternatives. Return the loss before each step of each run.

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
        on_run: function called with the name of each run before it.

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
            on_run(name)
            model, inputs, loss_of = _prepared(make, read, value, seed, loss, mask_token)
            runs[name] = _train(model, inputs, steps, lr, loss_of)
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
    model: nn.Module, batches: Sequence[Batch], steps: int, lr: float, loss: LossOfModel
) -> list[float]:
    """Train a model, and return the loss before each step. Stop after a loss that is not finite."""
    optimizer, losses = torch.optim.AdamW(parameter_groups(model, 0.01), lr=lr), list[float]()
    model.train()
    for batch in islice(cycle(batches), steps):
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
