"""Configuration of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides a training run, except its seed; `dataclasses.replace` makes further rows."""

    model: str
    """A name of `experiments.training.models.MODELS`."""
    width: int = 128
    layers: int = 4
    heads: int = 4
    parameters: int | None = None
    """Number of parameters, reached by the width of the feed-forward part; None: a width of 4 × `width`."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the configuration of transformers."""
    task: str
    """A name of `experiments.tasks`."""
    text: str = "tiny_shakespeare/input.txt"
    """Text file of language tasks, in the folder of data sets."""
    tokens: int = 256
    """Length of a sequence; tokens per picture."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    """Its largest value: it rises for `warmup` steps, then follows a cosine to 0."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: int = 50
    clip: float = 1.0
    """Largest norm of the gradient."""
    steps: int = 600
    batch: int = 8
    log_every: int = 20
    evaluate_every: int = 200
    """Steps between two evaluations; each is followed by a checkpoint."""
    evaluate_on: int | None = None
    """Number of test examples; None: all."""
    metric: Literal["loss", "accuracy"] = "loss"
    """Decides which checkpoint is the best one."""
    monitor_every: int | None = None
    """Steps between two audits of `rankwise.RankMonitor`; None: no monitor."""


def unit_variance_std(width: int) -> float:
    """Return the standard deviation of initial weights at which queries and keys have variance 1.

    Formula: width^(-1/2), for tokens after a norm. At 0.02, the usual value for widths near 1,000, attention
    of narrow models begins nearly uniform, with rank 1, and they learn more slowly.
    """
    return width**-0.5
