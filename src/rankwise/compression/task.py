"""How well a model does what it is for, on batches with labels or of text: loss and accuracy."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import run_model
from rankwise.compression.outputs import is_decoder

Metric = Literal["", "accuracy", "token accuracy"]


@dataclass
class Task:
    """Sums over batches."""

    loss_sum: float = 0.0
    targets: int = 0
    hits: int = 0
    places: int = 0
    """Labels that accuracy is taken of."""
    metric: Metric = ""
    """What `accuracy` is of."""

    @property
    def loss(self) -> float:
        """Mean loss: of labels, or of the next token; NaN where there is none."""
        return self.loss_sum / self.targets if self.targets else math.nan

    @property
    def accuracy(self) -> float:
        """Share of labels that are the likeliest class; NaN without labels of classes."""
        return self.hits / self.places if self.places else math.nan


def measure_task(model: nn.Module, batches: list[Any]) -> Task:
    """Loss, and with labels of classes accuracy, over batches.

    Args:
        model: in evaluation mode.
        batches: on its device; dicts with ``labels``, or token ids of a decoder, whose next tokens count.
    """
    task = Task()
    for batch in batches:
        if not isinstance(batch, dict):
            continue
        if isinstance(batch.get("labels"), Tensor):
            _labelled(model, batch, task)
        elif "input_ids" in batch and is_decoder(model):
            _next_tokens(model, batch["input_ids"], batch, task)
    return task


def _labelled(model: nn.Module, batch: dict[str, Any], task: Task) -> None:
    with torch.no_grad():
        out = run_model(model, batch)
    labels, loss, logits = batch["labels"], getattr(out, "loss", None), getattr(out, "logits", None)
    shifted = is_decoder(model) and labels.dim() == 2  # nothing predicts the first token
    count = int(((labels[:, 1:] if shifted else labels) != -100).sum())
    if loss is not None and count:
        task.loss_sum, task.targets = task.loss_sum + float(loss) * count, task.targets + count
    if not isinstance(logits, Tensor) or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    real = labels != -100
    task.hits += int((logits.argmax(-1) == labels)[real].sum())
    task.places += int(real.sum())
    task.metric = "accuracy" if labels.dim() == 1 else "token accuracy"


def _next_tokens(model: nn.Module, ids: Tensor, batch: dict[str, Any], task: Task) -> None:
    with torch.no_grad():
        logits = getattr(run_model(model, batch), "logits", None)
    if logits is None:
        return
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    pairs = real[:, 1:] & real[:, :-1]
    task.loss_sum += float(F.cross_entropy(logits[:, :-1][pairs].float(), ids[:, 1:][pairs], reduction="sum"))
    task.targets += int(pairs.sum())
