"""How right a model is: predictions against labels, wherever labels say there is something to predict."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rankwise.data.tasks.task import answered


def right_and_asked(logits: Any, labels: Int[Tensor, "..."]) -> Int[Tensor, "B 2"]:
    """For each example how many predictions are right, and how many were asked for.

    Labels of a language model are the tokens themselves: logits of one place are for the next one's label.

    Args:
        logits: (B, classes), or (B, T, vocabulary); a tuple whose first item that is.
        labels: (B,) or (B, T), −100 where nothing is asked.
    """
    right, asked = answered(logits[0] if isinstance(logits, tuple | list) else logits, labels)
    return torch.stack([one.reshape(len(one), -1).sum(1) for one in (right & asked, asked)], 1)


def accuracy(evaluated: Any) -> dict[str, float]:
    """Share of predictions that are right.

    Args:
        evaluated: transformers' ``EvalPrediction`` of `right_and_asked`.
    """
    right, asked = evaluated.predictions.sum(0)
    return {"accuracy": float(right) / max(float(asked), 1.0)}
