"""Accuracy on ListOps from token counts alone, and on Pathfinder from the distance of the dots alone.

The tasks belong to the experiments `long-range-listops` and `long-range-pathfinder`; a model that has learned
them is more accurate. Neither classifier of ListOps sees the order of the tokens after the first: the most
common value of each first operation, and a linear classifier of the logarithms of token counts, separate for
each first operation. The classifier of Pathfinder is a threshold.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from experiments.study import Study
from experiments.tasks import load_task
from experiments.tasks.listops import TOKENS
from experiments.tasks.pathfinder import Pictures, draw_pictures
from experiments.tasks.task import Examples
from experiments.tost.long_range import config

CLASSES = 10
DECAY = 1e-4
"""Factor of the squared weights in the loss."""


def first_and_counts(examples: Examples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return first token, log(1 + count) of every token, and value, of each expression."""
    ids, lengths = examples.arrays["input_ids"], examples.arrays["lengths"]
    there = np.arange(ids.shape[1]) < lengths[:, None]
    counts = np.stack([((ids == token) & there).sum(1) for token in range(len(TOKENS))], 1)
    return ids[:, 0], np.log1p(counts), examples.arrays["labels"]


def first_accuracy(train: Examples, test: Examples) -> float:
    """Return the accuracy of the most common value of each first operation."""
    first, _, values = first_and_counts(train)
    asked, _, right = first_and_counts(test)
    common = {token: np.bincount(values[first == token]).argmax() for token in np.unique(first)}
    return float(np.mean([common[token] == value for token, value in zip(asked, right, strict=True)]))


def counting_accuracy(train: Examples, test: Examples) -> tuple[float, float]:
    """Return accuracy and loss of the linear classifier."""

    def inputs(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        first, counts, values = first_and_counts(examples)
        known = np.concatenate([counts, np.ones((len(counts), 1))], 1)
        separate = np.eye(len(TOKENS))[first][:, :, None] * known[:, None]
        return torch.from_numpy(separate.reshape(len(known), -1)), torch.from_numpy(values).long()

    (known, values), (asked, right) = inputs(train), inputs(test)
    weights = torch.zeros(known.shape[1], CLASSES, dtype=known.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(known @ weights, values) + DECAY * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    logits = (asked @ weights).detach()
    return float((logits.argmax(1) == right).double().mean()), float(F.cross_entropy(logits, right))


def distance_accuracy(train: Pictures, test: Pictures) -> float:
    """Return the accuracy if dots count as joined below the best distance of the training pictures."""
    known, asked = (np.hypot(*(one.dots[:, 0] - one.dots[:, 1]).T) for one in (train, test))
    threshold = max(np.sort(known), key=lambda bar: np.mean((known < bar) == train.labels))
    return float(np.mean((asked < threshold) == test.labels))


def measure(data: Path) -> dict[str, Any]:
    task = load_task(config("listops", "tost"), data)
    options = config("pathfinder", "tost").task_options
    pictures = [
        draw_pictures(options[part], options["contour_length"], [0, at])
        for at, part in enumerate(("train", "test"))
    ]
    accuracy, loss = counting_accuracy(task.train, task.test)
    return {
        "first_operation": first_accuracy(task.train, task.test),
        "counts": accuracy,
        "counts_loss": round(loss, 5),
        "distance": distance_accuracy(*pictures),
        "sha256": task.record["sha256"],
    }


STUDY = Study("shortcuts", measure)
