"""Long Range Arena by mixer, at equal parameters and with one set of hyper-parameters."""

import math
from dataclasses import replace
from typing import Any

from experiments.experiment import Experiment, at_paper_size
from experiments.results import RESULTS, read_runs
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import below, exceeds, within

MODELS = ("softmax", "linear", "s4d", "mamba2", "tost", "tost-uniform")
PARAMETERS = 120_000
"""Parameters of every model."""
WIDTH = 64
SMALL: dict[str, dict[str, Any]] = {
    "listops": {
        "task": "listops",
        "tokens": 128,
        "task_options": {"train": 10_000, "test": 2000, "min_length": 32, "max_depth": 5, "max_arguments": 5},
        "steps": 2000,
    },
    "text": {"task": "imdb-bytes", "tokens": 512, "task_options": {"test_examples": 2000}, "steps": 400},
    "image": {
        "task": "cifar10-sequence",
        "tokens": 256,
        "task_options": {"side": 16, "test_examples": 2000},
        "steps": 2000,
    },
    "pathfinder": {
        "task": "pathfinder",
        "tokens": 1024,
        "task_options": {"train": 2_000, "test": 500, "contour_length": 6},
        "steps": 300,
    },
}
"""Sequences and steps that take minutes on a CPU core."""
PAPER_TOKENS = {"listops": 2000, "text": 4096, "image": 1024, "pathfinder": 1024}
PAPER: dict[str, Any] = {
    "width": 128,
    "layers": 6,
    "heads": 8,
    "parameters": 1_300_000,  # learned positions of Text are 524,288 of them
    "task_options": {},
    "warmup": 1000,
    "steps": 30_000,
    "batch": 64,
    "evaluate_every": 2000,
}


def config(task: str, model: str) -> TrainingConfig:
    return TrainingConfig(
        model=model,
        width=WIDTH,
        layers=2,
        parameters=PARAMETERS,
        model_options={"initializer_range": unit_variance_std(WIDTH)},
        batch=16,
        evaluate_every=SMALL[task]["steps"] // 2,
        metric="accuracy",
        **SMALL[task],
    )


RATES = (3e-4, 3e-3)
"""Further learning rates, for the task that is tuned."""
TUNED = "listops"
[SHORTCUTS] = read_runs(RESULTS / "shortcuts.jsonl", dict)
KNOWN = SHORTCUTS["values"]
COUNTING = {"listops": float(KNOWN["counts"])}
"""Accuracy from token counts alone (`python -m experiments run shortcuts`)."""
MARKS = {"listops": ("first_operation", "counts", "counts_loss"), "pathfinder": ("distance",)}
"""Numbers of `python -m experiments run shortcuts` on the page of a task."""
BASELINES = ("softmax", "linear", "s4d", "mamba2")
TASKS = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}


def at_rate(model: str, rate: float) -> str:
    return f"{model}, rate {rate:g}"


def experiment(task: str, name: str) -> Experiment:
    rates, rows = RATES if task == TUNED else (), {model: config(task, model) for model in MODELS}
    return Experiment(
        name=f"long-range-{task}",
        title=f"Long Range Arena, {name}",
        source="Wu et al., “Token Statistics Transformer”, ICLR 2025; reviewers asked for baselines of equal "
        "size, uniform memberships, time and memory",
        rows=rows
        | {
            at_rate(model, rate): replace(row, learning_rate=rate)
            for model, row in rows.items()
            for rate in rates
        },
        large=at_paper_size(rows, tokens=PAPER_TOKENS[task], **PAPER),
        expectations=(
            *(within("tost", one, 0.03, "accuracy", COUNTING.get(task, -math.inf)) for one in BASELINES),
            below("tost-uniform", "tost", "accuracy", by=0.01, floor=COUNTING.get(task, -math.inf)),
            *(exceeds(model, COUNTING[task], "counting tokens") for model in MODELS if task in COUNTING),
        ),
        tables=lambda table: {name: f"{KNOWN[name]:.4g}" for name in MARKS.get(task, ())},
    )


LONG_RANGE = [experiment(task, name) for task, name in TASKS.items()]
