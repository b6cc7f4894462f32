"""Parts that bring causal ToST near the transformer: short runs on bytes, recall, and a needle in a text."""

from dataclasses import replace
from typing import Any

import torch

from experiments.experiment import Experiment
from experiments.render import markdown_table
from experiments.results import Run
from experiments.skips import lambda_by_mixer
from experiments.tasks.task import Task
from experiments.tasks.text import BYTE_VOCABULARY
from experiments.training.config import TrainingConfig
from experiments.training.models import model_config
from experiments.verdicts import Table, below, within
from rankwise.models.mixers import build_mixer

PARAMETERS = 214_016
"""Parameters of the transformer of width 64."""


def short_run(model: str, options: dict[str, Any] | None = None, **tssa: int) -> TrainingConfig:
    """Return a run at a tenth of the cost of `language`, with fields and TSSA options of its model."""
    more = {"mixer_options": {"tssa": tssa}} if tssa else {}
    return TrainingConfig(
        model=model,
        width=64,
        parameters=PARAMETERS,
        model_options={**more, **(options or {})},
        task="bytes",
        tokens=128,
        task_options={"windows": 100_000},
        learning_rate=3e-3,
        steps=300,
        evaluate_every=300,
        evaluate_on=200,
    )


def decayed(options: dict[str, Any] | None = None, **tssa: int) -> TrainingConfig:
    return short_run("tost-decayed", options, **tssa)


ROWS = {
    "transformer": short_run("transformer"),
    "softmax": short_run("softmax"),
    "linear": short_run("linear"),
    "mamba2": short_run("mamba2"),
    "tost": short_run("tost"),
    "tost-no-bias": short_run("tost", {"position_bias": False}),
    "tost-conv": short_run("tost", conv_tokens=4),
    "decayed": decayed(),
    "decayed-short-lives": decayed({"half_life": [1.0, 2.5, 6.3, 16.0]}),
    "decayed-gate": decayed({"gate": True}),
    "decayed-conv": decayed(conv_tokens=4),
    "decayed-scan16": decayed(features=16),
    "decayed-conv-scan1": decayed(conv_tokens=4, features=1),
    "decayed-conv-scan4": decayed(conv_tokens=4, features=4),
    "decayed-conv-scan16": decayed(conv_tokens=4, features=16),
    "decayed-conv-scan32": decayed(conv_tokens=4, features=32),
    "hybrid": short_run("tost-hybrid"),
    "hybrid-conv": short_run("tost-hybrid", conv_tokens=4),
    "hybrid-conv-scan16": short_run("tost-hybrid", conv_tokens=4, features=16),
    "decayed-conv-scan16-gate": decayed({"gate": True}, conv_tokens=4, features=16),
}


def state_numbers(run: Run) -> int:
    """Return how many numbers the model of a run keeps for a sequence of its training length."""
    row = TrainingConfig(**run["settings"])
    if row.model == "transformer":
        return 2 * row.layers * row.width * row.tokens
    config = model_config(row, Task("language", row.tokens, vocab_size=BYTE_VOCABULARY))
    with torch.device("meta"):
        return sum(build_mixer(config, layer).state_size(row.tokens) for layer in range(row.layers))


def frontier(table: Table) -> dict[str, str]:
    """Return losses by the size of the decoding state, the smallest first."""
    kept = sorted((state_numbers(row.runs[0]), row.mean("loss"), label) for label, row in table.items())
    of = table["transformer"].mean("loss") if "transformer" in table else float("nan")
    rows, least = [], float("inf")
    for numbers, loss, label in kept:
        best = "yes" if loss < least else ""
        rows.append((label, f"{4 * numbers:,}", f"{loss:.3f}", f"{loss - of:+.3f}", best))
        least = min(least, loss)
    headings = ("", "state, bytes", "loss", "to the transformer", "on the frontier")
    return {"frontier": markdown_table(headings, rows)}


LANGUAGE_PARTS = Experiment(
    name="language-parts",
    title="Causal ToST on bytes, part by part",
    source="none: the question is why causal ToST trails, and which part closes it at linear cost",
    rows=ROWS,
    expectations=(
        below("decayed-gate", "decayed", by=0.03),
        below("decayed-short-lives", "decayed", by=0.03),
        below("tost", "tost-no-bias", by=0.03),
        within("decayed-conv", "transformer", 0.10),
        within("decayed-scan16", "transformer", 0.10),
        within("decayed-conv-scan16", "transformer", 0.10),
        within("hybrid", "transformer", 0.03),
        within("hybrid-conv-scan16", "transformer", 0.03),
        below("decayed-conv-scan16", "decayed-conv", by=0.03),
        below("decayed-conv-scan16-gate", "decayed-conv-scan16", by=0.03),
        below("decayed-conv-scan16", "linear"),
    ),
    tables=frontier,
)


def recall(model: str, **tssa: int) -> TrainingConfig:
    """Return a model on associative recall, with options of its TSSA."""
    row = lambda_by_mixer.config("recall", model)
    options = {**row.model_options, **({"mixer_options": {"tssa": tssa}} if tssa else {})}
    return replace(row, model_options=options, monitor_every=None)


def needle(model: str, **tssa: int) -> TrainingConfig:
    """Return a model that is asked for five digits, which are hidden in 128 bytes of text."""
    sizes = {"train": 10_000, "test": 500}
    row = replace(recall(model, **tssa), task="needle", tokens=128, task_options=sizes)
    return replace(row, steps=600, batch=16, evaluate_every=300)


RECALL_PARTS = Experiment(
    name="recall-parts",
    title="Causal ToST on associative recall, part by part",
    source="none: can a layer that only scales tokens find the value next to a key? The tasks: Arora "
    "et al., “Zoology”, ICLR 2024; Mohtashami and Jaggi, “Landmark Attention”, NeurIPS 2023",
    rows={
        "softmax": recall("softmax"),
        "tost": recall("tost"),
        "decayed": recall("tost-decayed"),
        "decayed-conv": recall("tost-decayed", conv_tokens=4),
        "decayed-scan16": recall("tost-decayed", features=16),
        "decayed-conv-scan16": recall("tost-decayed", conv_tokens=4, features=16),
        "softmax, needle": needle("softmax-rotary"),
        "tost, needle": needle("tost"),
        "decayed-conv-scan16, needle": needle("tost-decayed", conv_tokens=4, features=16),
    },
    expectations=(
        below("tost", "decayed-conv-scan16", "accuracy", by=0.1),
        below("decayed", "decayed-conv-scan16", "accuracy", by=0.1),
        below("tost, needle", "softmax, needle", "accuracy", by=0.1, floor=0.25),
    ),
)
