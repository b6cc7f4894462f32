"""How much of ListOps is told by counting: what an accuracy must be above to be of more than counts.

The task of the experiment `long-range-listops`. Two classifiers that cannot tell one order of the tokens from
another, but for the first: the most common value of each first operation, and a linear classifier of the
logarithms of how often each token occurs, apart for each first operation.

    python -m experiments run listops_baselines
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from experiments.study import Study
from experiments.tasks import load_task
from experiments.tasks.listops import TOKENS
from experiments.tasks.task import Examples
from experiments.tost.long_range import config

CLASSES = 10
DECAY = 1e-4
"""Of the squared weights."""


def first_and_counts(examples: Examples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token, log(1 + count) of every token, and value, of each expression."""
    ids, lengths = examples.arrays["input_ids"], examples.arrays["lengths"]
    there = np.arange(ids.shape[1]) < lengths[:, None]
    counts = np.stack([((ids == token) & there).sum(1) for token in range(len(TOKENS))], 1)
    return ids[:, 0], np.log1p(counts), examples.arrays["labels"]


def by_first(train: Examples, test: Examples) -> float:
    """Share right of the most common value of each first operation."""
    first, _, values = first_and_counts(train)
    told, _, right = first_and_counts(test)
    common = {token: np.bincount(values[first == token]).argmax() for token in np.unique(first)}
    return float(np.mean([common[token] == value for token, value in zip(told, right, strict=True)]))


def by_counts(train: Examples, test: Examples) -> tuple[float, float]:
    """Share right and loss of the linear classifier."""

    def inputs(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        first, counts, values = first_and_counts(examples)
        known = np.concatenate([counts, np.ones((len(counts), 1))], 1)
        apart = np.eye(len(TOKENS))[first][:, :, None] * known[:, None]
        return torch.from_numpy(apart.reshape(len(known), -1)), torch.from_numpy(values).long()

    (known, values), (told, right) = inputs(train), inputs(test)
    weights = torch.zeros(known.shape[1], CLASSES, dtype=known.dtype, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(known @ weights, values) + DECAY * weights.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    logits = (told @ weights).detach()
    return float((logits.argmax(1) == right).double().mean()), float(F.cross_entropy(logits, right))


def measure(data: Path) -> dict[str, Any]:
    """Measure both classifiers."""
    task = load_task(config("listops", "tost"), data)
    share, loss = by_counts(task.train, task.test)
    return {
        "first_operation": by_first(task.train, task.test),
        "counts": share,
        "counts_loss": round(loss, 5),
        "sha256": task.record["sha256"],
    }


STUDY = Study("listops_baselines", measure)
