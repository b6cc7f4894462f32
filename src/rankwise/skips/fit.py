"""Fit the λ of a language model on text, with all other parameters frozen."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import eval_mode, run_model
from rankwise.errors import InputError, SkipError
from rankwise.skips.add import Skips, skips_of

TextBatch = Mapping[str, Tensor]
"""``input_ids`` and, optionally, ``attention_mask``."""
MASKED = 0.15
"""Fraction of tokens that are masked."""
IGNORED = -100
"""Label that transformers leaves out of losses."""


@dataclass
class Fit:
    """Losses and λ of a fit."""

    losses: list[float] = field(default_factory=list)
    """Loss before each step."""
    scales: dict[str, list[float]] = field(default_factory=dict)
    """λ of each site before the first and after the last step; the mean of one λ per channel."""


def fit_skips(
    model: nn.Module,
    batches: Sequence[TextBatch],
    steps: int,
    lr: float = 0.02,
    mask_token: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Fit:
    """Fit the λ-skips of a language model by its own loss; all other parameters stay frozen.

    Cost: a forward and a backward pass for each step, and a forward pass at the end.

    Args:
        model: a model of transformers with λ-skips and a language-model head.
        batches: ``input_ids`` and ``attention_mask``; taken in turn.
        steps: number of steps.
        lr: learning rate of Adam; there is no weight decay.
        mask_token: id of the mask token, for masked language models.
        on_step: called with the number of finished steps and the loss.

    Raises:
        InputError: if ``lr`` is not a finite number above 0.
        SkipError: if the model has no loss or no learnable λ, a batch has no token to predict, or a loss or λ
            is not finite, also after the last step; then λ is restored.
    """
    check_rate("`lr`", lr)
    skips = skips_of(model)
    start = {name: value.detach().clone() for name, value in skips.items()}
    groups = skip_parameter_groups(model, only_skips=True)
    result = Fit(scales={name: [float(value.mean())] for name, value in start.items()})
    with _only_learning(model, [scale for group in groups for scale in group["params"]]):
        optimiser = torch.optim.Adam(groups, lr=lr)
        try:
            for step in range(steps):
                optimiser.zero_grad()
                loss = _finite_loss(model, batches[step % len(batches)], mask_token, step)
                result.losses.append(loss.item())
                loss.backward()
                optimiser.step()
                _check_finite(skips, step + 1)
                if on_step is not None:
                    on_step(step + 1, loss.item())
            if steps:  # no later step checks the last one
                with torch.no_grad():
                    _finite_loss(model, batches[(steps - 1) % len(batches)], mask_token, steps)
        except SkipError:
            with torch.no_grad():
                for name, value in skips.items():
                    value.copy_(start[name])
            raise
    for name, value in skips.items():
        result.scales[name].append(float(value.detach().mean()))
    return result


def skip_parameter_groups(
    model: nn.Module, weight_decay: float = 0.01, lr: float | None = None, only_skips: bool = False
) -> list[dict[str, Any]]:
    """Split a model's parameters for an optimiser: its λ without weight decay, all others with it.

    Args:
        model: a model with λ-skips.
        weight_decay: weight decay of all other parameters.
        lr: learning rate of λ; None for the rate of the optimizer.
        only_skips: True to leave all other parameters out.

    Returns:
        Groups as `torch.optim` takes them, λ first.

    Raises:
        SkipError: if no λ of the model can learn.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> _ = rw.add_lambda_skip(layer, example=torch.randn(1, 5, 8))
        >>> groups = rw.skips.skip_parameter_groups(layer, weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.0), (12, 0.1)]
    """
    scales = [scale for scale in skips_of(model).values() if scale.requires_grad]
    if not scales:
        raise SkipError(
            f"model {type(model).__name__}",
            expected="λ-skips that can learn",
            got="none",
            fix="Put them in with `rw.add_lambda_skip(model, learnable=True)`.",
        )
    first: dict[str, Any] = {"params": scales, "weight_decay": 0.0}
    if lr is not None:
        first["lr"] = lr
    taken = {id(scale) for scale in scales}
    others = [
        parameter
        for parameter in model.parameters()
        if id(parameter) not in taken and parameter.requires_grad
    ]
    return [first] if only_skips else [first, {"params": others, "weight_decay": weight_decay}]


def check_rate(subject: str, lr: float) -> None:
    """Raise if a learning rate is not a finite number above 0."""
    if not 0 < lr < math.inf:
        raise InputError(
            subject, expected="a finite number above 0", got=f"{lr:g}", fix="0.02 is the default; try less."
        )


def _finite_loss(model: nn.Module, batch: TextBatch, mask_token: int | None, done: int) -> Tensor:
    loss = loss_of(model, batch, mask_token)
    if not math.isfinite(loss.item()):
        raise _lost(f"loss after step {done}" if done else "loss before the first step", loss.item())
    return loss


def _check_finite(skips: Skips, done: int) -> None:
    for name, value in skips.items():
        broken = value.detach()[~value.detach().isfinite()]
        if len(broken):
            raise _lost(f"λ of {name!r} after step {done}", broken[0].item())


def _lost(subject: str, got: float) -> SkipError:
    return SkipError(
        subject,
        expected="a finite number",
        got=f"{got:g}",
        fix="Use a lower learning rate; the λ are as they were before.",
    )


def mean_loss(model: nn.Module, batches: Sequence[TextBatch], mask_token: int | None = None) -> float:
    """Return the mean loss of a language model over batches, in evaluation mode.

    Args:
        model: a model of transformers with a language-model head.
        batches: ``input_ids`` and ``attention_mask``.
        mask_token: as in `fit_skips`.

    Raises:
        SkipError: as `loss_of`.
    """
    with eval_mode(model), torch.no_grad():
        losses = [loss_of(model, batch, mask_token).item() for batch in batches]
    return sum(losses) / len(losses)


def loss_of(model: nn.Module, batch: TextBatch, mask_token: int | None = None) -> Tensor:
    """Return the loss on a batch: of next tokens, masked tokens, or (encoder-decoders) the same text."""
    check_learnable(model, mask_token)
    inputs = dict(batch)
    labels = inputs["input_ids"].clone()
    real = inputs["attention_mask"] != 0 if "attention_mask" in inputs else torch.ones_like(labels).bool()
    labels[~real] = IGNORED
    if _masked(model):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.rand(labels.shape, generator=generator).to(labels.device) < MASKED
        hidden &= real
        first = real.int().argmax(1, keepdim=True)
        hidden |= real & ~hidden.any(1, keepdim=True) & (torch.arange(real.shape[1]).to(first) == first)
        inputs["input_ids"] = inputs["input_ids"].masked_fill(hidden, mask_token or 0)
        labels[~hidden] = IGNORED
    _check_labels(model, labels, real)
    loss = run_model(model, inputs | {"labels": labels}).loss
    assert isinstance(loss, Tensor)  # a model that takes labels returns a loss
    return loss


def _check_labels(model: nn.Module, labels: Tensor, real: Tensor) -> None:
    """Raise if no token is predicted; a causal model predicts none at the first position."""
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if not bool((labels[:, int(causal) :] != IGNORED).any()):
        raise SkipError(
            "batch",
            expected="a real token to predict",
            got="no real token, all are padding" if not bool(real.any()) else "one real token a sequence",
            fix="Leave it out; `attention_mask` is 1 at real tokens.",
        )


def check_learnable(model: nn.Module, mask_token: int | None = None) -> None:
    """Raise if a model has no language-model loss."""
    name = type(model).__name__
    heads = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    if not name.endswith(heads) or "labels" not in inspect.signature(model.forward).parameters:
        raise SkipError(
            f"model {name}",
            expected="a language model of transformers with its head, which has a loss",
            got="none",
            fix="Train λ in your own loop: `rw.skips.skip_parameter_groups(model)` are its parameters.",
        )
    if _masked(model) and mask_token is None:
        raise SkipError(
            f"model {name}",
            expected="the id of the mask token",
            got="none",
            fix="Use a tokenizer that has a mask token.",
        )


def _masked(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForMaskedLM")


@contextmanager
def _only_learning(model: nn.Module, wanted: list[Any]) -> Iterator[None]:
    kept = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(scale) for scale in wanted}
    try:
        for parameter, _ in kept:
            parameter.requires_grad_(id(parameter) in chosen)
        with eval_mode(model), torch.enable_grad():
            yield
    finally:
        for parameter, learns in kept:
            parameter.requires_grad_(learns)
            if id(parameter) in chosen:
                parameter.grad = None
