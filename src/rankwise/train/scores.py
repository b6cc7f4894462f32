"""How right a model is: predictions against labels, wherever labels say there is something to predict."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

IGNORED = -100


def right_and_asked(logits: Any, labels: Int[Tensor, "..."]) -> Int[Tensor, "B 2"]:
    """For each example how many predictions are right, and how many were asked for.

    Labels of a language model are the tokens themselves: logits of one place are for the next one's label.

    Args:
        logits: (B, classes), or (B, T, vocabulary); a tuple whose first item that is.
        labels: (B,) or (B, T), −100 where nothing is asked.
    """
    told: Float[Tensor, "*B C"] = logits[0] if isinstance(logits, tuple | list) else logits
    predicted = told.argmax(-1)
    if labels.ndim == 2:
        predicted, labels = predicted[:, :-1], labels[:, 1:]
    else:
        predicted, labels = predicted[:, None], labels[:, None]
    asked = labels != IGNORED
    return torch.stack([((predicted == labels) & asked).sum(1), asked.sum(1)], 1)


def accuracy(evaluated: Any) -> dict[str, float]:
    """Share of predictions that are right.

    Args:
        evaluated: transformers' ``EvalPrediction`` of `right_and_asked`.
    """
    right, asked = evaluated.predictions.sum(0)
    return {"accuracy": float(right) / max(float(asked), 1.0)}
