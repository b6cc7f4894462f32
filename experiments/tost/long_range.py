"""Long Range Arena by mixer, at equal parameters and with one set of hyper-parameters."""

import math
from dataclasses import replace
from typing import Any

from experiments.experiment import Experiment, at_paper_size
from experiments.render import markdown_table
from experiments.results import RESULTS, read_runs
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import Table, below, exceeds, within

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
MORE = {
    "listops": " Expressions of 32 to 128 tokens. The most common value of the first operation is right in "
    f"{KNOWN['first_operation']:.4f} of the test split, a linear classifier of it and the counts of the "
    f"tokens in {KNOWN['counts']:.4f}, with a loss of {KNOWN['counts_loss']:.3f} "
    "(`python -m experiments run shortcuts`).",
    "pathfinder": " Contours of 6 dashes: a threshold on the distance of the two dots is right in "
    f"{KNOWN['distance']:.3f} of the test split (`python -m experiments run shortcuts`).",
}
BASELINES = ("softmax", "linear", "s4d", "mamba2")
TASKS = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}


def at_rate(model: str, rate: float) -> str:
    return f"{model}, rate {rate:g}"


def best_rates(table: Table) -> str:
    """Return the best learning rate of each model that was run at every rate."""
    rows = []
    for model in MODELS:
        tried = {"0.001": model, **{f"{rate:g}": at_rate(model, rate) for rate in RATES}}
        if all(label in table for label in tried.values()):
            rate, label = max(tried.items(), key=lambda item: table[item[1]].mean("accuracy"))
            rows.append((model, rate, f"{table[label].mean('accuracy'):.3f}"))
    if not rows:
        return ""
    said = "The best of three learning rates, chosen by the accuracy shown:"
    return f"{said}\n\n{markdown_table(('', 'learning rate', 'accuracy'), rows)}"


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
            *(
                exceeds(model, COUNTING[task], "counting tokens")
                for model in MODELS
                if task in COUNTING
            ),
        ),
        notes="long-range",
        marks={"task": MORE.get(task, "")},
        tables=best_rates if rates else None,
    )


LONG_RANGE = [experiment(task, name) for task, name in TASKS.items()]
