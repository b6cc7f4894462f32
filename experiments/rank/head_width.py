"""Head width: where rank at initialization and accuracy after training stop growing."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.audits import by_layer
from experiments.experiment import Experiment, at_paper_size
from experiments.render import markdown_table
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import Expectation, Row, Table, Verdict, has_learned, margin

WIDTHS = (1, 2, 4, 8, 16, 32)
TIED = {False: "D ≠ HK", True: "D = HK"}
NEARLY = 0.95
"""Share of the largest value at which a curve counts as saturated."""
MODEL_WIDTH = 64
TASKS: dict[str, dict[str, Any]] = {
    "images": {
        "task": "cifar10",
        "tokens": 64,
        "task_options": {"train_examples": None, "test_examples": 1000, "augment": False},
        "batch": 32,
    },
    "text": {
        "task": "imdb-bytes",
        "tokens": 256,
        "task_options": {"train_examples": None, "test_examples": 1000},
        "batch": 16,
    },
}
PAPER: dict[str, Any] = {
    "width": 192,
    "layers": 6,
    "warmup": 500,
    "steps": 40_000,
    "evaluate_every": 2000,
    "monitor_every": 10_000,
}
PAPER_TASKS: dict[str, dict[str, Any]] = {
    "images": {"task_options": {"augment": True}},
    "text": {"tokens": 4096, "task_options": {}},
}


def config(task: str, head_dim: int, tied: bool) -> TrainingConfig:
    """Return a softmax transformer with heads of width K.

    Tied: D / K heads, whose values have width K as well. Otherwise 4 heads, whose queries and keys have it.
    """
    options: dict[str, Any] = {"initializer_range": unit_variance_std(MODEL_WIDTH)}
    if not tied:
        options["mixer_options"] = {"softmax": {"query_dim": head_dim}}
    return TrainingConfig(
        model="softmax",
        width=MODEL_WIDTH,
        layers=3,
        heads=MODEL_WIDTH // head_dim if tied else 4,
        model_options=options,
        steps=800,
        evaluate_every=400,
        metric="accuracy",
        monitor_every=800,
        **TASKS[task],
    )


def label(width: int, tied: bool) -> str:
    return f"{TIED[tied]}, K={width}"


def saturated(values: list[float]) -> int:
    """Return the first width whose value is nearly the largest."""
    return next(width for width, value in zip(WIDTHS, values, strict=True) if value >= NEARLY * max(values))


def curves(table: Table, tied: bool) -> tuple[list[float], list[float]]:
    """Return the mean effective rank of heads at the start, and the accuracy, by width."""
    rows = [row for width in WIDTHS if (row := table.get(label(width, tied)))]
    ranks = [statistics.fmean(by_layer(row, "heads_effective_rank", 0)) for row in rows]
    return ranks, [row.mean("accuracy") for row in rows]


def places(rows: Sequence[Row], table: Table) -> tuple[int, int]:
    """Return the widths between which accuracy becomes nearly the largest, within `margin`."""
    bar = NEARLY * max(row.mean("accuracy") for row in rows)
    above = {width: row.mean("accuracy") - bar for width, row in zip(WIDTHS, rows, strict=True)}
    sure = {width: margin([row], "accuracy", table) for width, row in zip(WIDTHS, rows, strict=True)}
    least = next(width for width in WIDTHS if above[width] >= -sure[width])
    most = next((width for width in WIDTHS if above[width] >= sure[width]), WIDTHS[-1])
    return least, most


def same_place(tied: bool) -> Expectation:
    """Expect rank and accuracy to saturate at one width."""

    def decide(table: Table) -> Verdict:
        rows = [table[label(width, tied)] for width in WIDTHS]
        rank = saturated(curves(table, tied)[0])
        least, most = places(rows, table)
        possible = [width for width in WIDTHS if least <= width <= most]
        said = f"rank at K={rank}, accuracy at K={least}{f' to {most}' if most > least else ''}"
        if not has_learned(rows, "accuracy"):
            return None, said
        if rank == WIDTHS[0] or most == WIDTHS[0]:  # at its largest everywhere: no agreement
            return False, f"{said}: a curve that is flat from the first K on has no place of saturation"
        answers = {WIDTHS[0] < width and rank / 2 <= width <= 2 * rank for width in possible}
        return answers.pop() if len(answers) == 1 else None, said

    says = (
        f"{TIED[tied]}: rank at the start and accuracy are at 95 % of their largest at the same K, to a "
        "factor of 2"
    )
    return Expectation(says, [label(width, tied) for width in WIDTHS], decide)


def rank_and_accuracy(table: Table) -> dict[str, str]:
    """Return rank at the start and accuracy, by width."""
    rows = []
    for tied in TIED:
        labels = [name for name in (label(width, tied) for width in WIDTHS) if name in table]
        for name, rank, score in zip(labels, *curves(table, tied), strict=True):
            rows.append((name, f"{rank:.2f}", f"{score:.3f}"))
    head = ("", "effective rank of heads at the start", "accuracy")
    return {"widths": markdown_table(head, rows)}


def experiment(task: str, title: str) -> Experiment:
    rows = {label(width, tied): config(task, width, tied) for tied in TIED for width in WIDTHS}
    large = at_paper_size(rows, **PAPER, **PAPER_TASKS[task])
    more_heads = PAPER["width"] // MODEL_WIDTH  # of the same width
    return Experiment(
        name=f"saturation-{task}",
        title=title,
        source="“On the Limitation and Redundancy of Transformers”: accuracy and rank saturate at one K, "
        "CIFAR-10 and IMDB, D = H·K and D ≠ H·K",
        rows=rows,
        large={
            name: replace(row, heads=more_heads * row.heads) if name.startswith(TIED[True]) else row
            for name, row in large.items()
        },
        expectations=[same_place(tied) for tied in TIED],
        tables=rank_and_accuracy,
    )


SATURATION_IMAGES = experiment("images", "Head width, CIFAR-10 patches")
SATURATION_TEXT = experiment("text", "Head width, IMDB bytes")
