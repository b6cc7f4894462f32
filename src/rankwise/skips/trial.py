"""Try λ by training: train a model with several λ, and other models, for some steps from one seed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals import forward
from rankwise._internals.forward import Batch, drop_unused_labels, run_model
from rankwise._internals.parameters import parameter_groups
from rankwise.errors import InputError, in_range, whole_number
from rankwise.importance.choose_loss import choose_loss
from rankwise.importance.losses import LossBatch
from rankwise.importance.settings import ImportanceSettings
from rankwise.skips.add import add_lambda_skip, skips_of
from rankwise.skips.observe import TRIED, raise_lambdas

LossOfModel = Callable[[nn.Module, Any], Tensor]


def try_lambdas(
    build: Callable[[], nn.Module],
    batches: Iterable[Batch],
    values: Sequence[float] = TRIED[1:],
    *,
    steps: int = 100,
    lr: float = 3e-4,
    seed: int = 0,
    loss: LossOfModel | None = None,
    alternatives: Mapping[str, Callable[[], nn.Module]] | None = None,
) -> dict[str, list[float]]:
    """Train a model as it is, with each λ, and alternatives; return the loss before each step of each run.

    Each run builds its model from the same seed and trains a copy by AdamW, with gradients clipped to norm 1
    and without warm-up. λ-skips are added, or every smaller |λ| is raised to the value. A run ends with its
    first loss that is not finite. Ctrl-C ends the trial: the runs that are done are returned.

    Cost: ``steps`` forward and backward passes per run.

    Args:
        build: function that returns the model.
        batches: batches, used in turn; at most ``steps`` of them are read.
        values: λ to try.
        steps: number of steps of each run.
        lr: learning rate, for the groups of `rankwise.models.parameter_groups`.
        seed: random seed of weights and dropout.
        loss: function of (model, batch) that returns the loss; by default the loss that
            `rankwise.importance.measure` reads from labels in the batches or from next tokens.
        alternatives: functions that return other models for the same batches, by name.

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
    read, runs = list(islice(forward.each_batch(batches), steps)), dict[str, list[float]]()
    tried = [("as it is", build, None), *((f"λ = {value:g}", build, value) for value in values)]
    tried += [(name, other, None) for name, other in (alternatives or {}).items()]
    devices = range(torch.cuda.device_count())  # those that `manual_seed` seeds
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), suppress(KeyboardInterrupt):
        for name, make, value in tried:
            torch.manual_seed(seed)
            model = deepcopy(make())
            own = forward.to_device(read, forward.device_of(model))
            if value is not None:
                example = drop_unused_labels(model, own[0])[0]
                skips = skips_of(model) or add_lambda_skip(model, value, example=example)
                for site, raised in raise_lambdas(skips, value).items():
                    skips[site].data.copy_(raised)
            lost = loss or _loss_on_labels(model, own)
            torch.manual_seed(seed)  # for dropout, whatever the weights have drawn
            runs[name] = _train(model, own, steps, lr, lost)
    return runs


def _train(
    model: nn.Module, batches: Sequence[Batch], steps: int, lr: float, loss: LossOfModel
) -> list[float]:
    """Train a model; return the loss before each step, up to the first that is not finite."""
    optimizer, losses = torch.optim.AdamW(parameter_groups(model, 0.01), lr=lr), list[float]()
    model.train()
    for batch in islice(cycle(batches), steps):
        optimizer.zero_grad()
        lost = loss(model, batch)
        losses.append(float(lost.detach()))
        if not math.isfinite(losses[-1]):
            break
        lost.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def _loss_on_labels(model: nn.Module, batches: Sequence[Batch]) -> LossOfModel:
    """Return the mean loss that fits a model and its batches; raise if they have nothing to predict."""
    inputs = [drop_unused_labels(model, batch)[0] for batch in batches]
    with forward.batch_errors(model, inputs[0]), forward.eval_mode(model), torch.no_grad():
        output = run_model(model, inputs[0])
    chosen = choose_loss(model, LossBatch(inputs[0], batches[0]), output, ImportanceSettings())
    if chosen.compares_outputs:
        fix = "Put `labels` into the batches, or define `loss(model, batch)` (in the file of a factory)."
        raise InputError("`batches`", expected="labels, or a loss", got="neither", fix=fix)
    chosen.check([LossBatch(*both, at) for at, both in enumerate(zip(inputs, batches, strict=True))], output)

    def mean(model: nn.Module, batch: Batch) -> Tensor:
        prepared = chosen.prepare(drop_unused_labels(model, batch)[0], batch, 0)
        found = chosen.read(run_model(model, prepared.batch), prepared)
        return found.total.sum() / found.count.sum()

    return mean
