"""λ by mixer on LRA Image and on associative recall."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

from experiments.audits import collapse, learned
from experiments.experiment import Experiment, at_paper_size
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import below, close_to

COMPARED = ("softmax", "linear", "s4d", "mamba", "mamba2")
SKIPS = (-2, -1, 0, 1, 2, "shared", "learned", "channel")
SECOND_HAND = {1: "0.423 (a fixed λ; second-hand)", "learned": "0.389 (second-hand)"}
FROM = -1.0
"""Initial value of the paper's learned λ."""
WIDTH = 64
PAPER = {-2: "0.386", -1: "0.359", 0: "0.100", 1: "0.402", 2: "0.389"}
COMMON: dict[str, Any] = {
    "width": 128,
    "heads": 8,
    "learning_rate": 1e-3,
    "warmup": 1000,
    "steps": 50_000,
    "batch": 64,
    "evaluate_every": 2000,
    "evaluate_on": None,
    "monitor_every": 5000,
}
PAPER_SIZES: dict[str, dict[str, Any]] = {
    "image": {**COMMON, "tokens": 1024, "task_options": {}},
    "recall": {**COMMON, "layers": 4, "tokens": 128, "task_options": {"vocab_size": 8192, "pairs": 8}},
}
FLOOR = {"recall": 0.6}
"""Accuracy of a model that has learned nothing of the task, if it is above the most common answer."""


def config(task: str, mixer: str, skip: Any = 1, *, gate: bool = False) -> TrainingConfig:
    """Return a stack of one mixer: 8 layers on pictures, 2 layers on recall; `skip`: of `SKIPS`."""
    learned = isinstance(skip, str)
    row = TrainingConfig(
        model=mixer,
        width=WIDTH,
        layers=8,
        model_options={
            "skip": skip if learned else "fixed",
            "skip_init": FROM if learned else float(skip),
            "gate": gate,
            "initializer_range": unit_variance_std(WIDTH),
        },
        task="cifar10-sequence",
        tokens=256,
        task_options={"side": 16},
        warmup=20,
        steps=1000,
        batch=16,
        evaluate_every=500,
        evaluate_on=2000,  # a standard error of an accuracy of at most 0.011
        metric="accuracy",
        monitor_every=500,
    )
    if task == "image":
        return row
    # four pairs need more steps than minutes on a core allow, with softmax attention and λ = 1 as well
    sizes = {"train": 20_000, "test": 2000, "vocab_size": 64, "pairs": 2}
    recall = {"task": "mqar", "tokens": 16, "task_options": sizes}
    return replace(row, **recall, layers=2, learning_rate=3e-3, steps=3000, batch=32, monitor_every=1500)


def label(mixer: str, skip: Any) -> str:
    return f"{mixer} λ={skip}"


def gated(mixer: str, skip: Any) -> str:
    return f"{label(mixer, skip)} gate"


def experiment(task: str, title: str, published: dict[str, str]) -> Experiment:
    floor = FLOOR.get(task, -math.inf)
    rows = {label(mixer, skip): config(task, mixer, skip) for mixer, skip in product(COMPARED, SKIPS)} | {
        gated(mixer, skip): config(task, mixer, skip, gate=True)
        for mixer, skip in product(("softmax", "mamba2"), (0, 1))
    }
    return Experiment(
        name=f"skips-{task}",
        title=title,
        source="“Lambda-Skip Connections”, ICLR 2025: table of λ, a transformer of 8 layers on LRA Image; "
        "reviewers asked for learned λ by depth, μ during training, and gates",
        rows=rows,
        large=at_paper_size(rows, **PAPER_SIZES[task]),
        published=published,
        expectations=[below(label(mixer, 0), label(mixer, 1), "accuracy", 0.02, floor) for mixer in COMPARED]
        + [below(gated("softmax", 0), gated("softmax", 1), "accuracy", 0.02, floor)]
        + [close_to(label(mixer, 1), label(mixer, "learned"), 0.02, floor=floor) for mixer in COMPARED],
        tables=lambda table: {**learned(table), **collapse(table)},
    )


SKIPS_IMAGE = experiment(
    "image",
    "λ by mixer, LRA Image",
    {label("softmax", skip): told for skip, told in PAPER.items()}
    | {label("mamba2", skip): told for skip, told in SECOND_HAND.items()},
)
SKIPS_RECALL = experiment("recall", "λ by mixer, associative recall", {})
