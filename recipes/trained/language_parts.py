"""Which part brings causal ToST near the transformer: short runs on bytes, and on associative recall."""

from collections.abc import Mapping
from typing import Any

import torch

from rankwise.data.tasks.language import BYTE_VOCABULARY
from rankwise.data.tasks.task import Provenance, Task
from rankwise.models.mixers import build_mixer
from rankwise.train.models import model_config
from rankwise.train.settings import ModelSettings
from recipes.experiment import Experiment, Table, below
from recipes.trained.reading import markdown

PARAMETERS = 214_016
"""Of the transformer of width 64."""
SHORT: dict[str, Any] = {
    "model.width": 64,
    "model.parameters": PARAMETERS,
    "steps": 300,
    "task.tokens": 128,
    "evaluation.every": 300,
    "evaluation.examples": 200,
}
"""A tenth of the cost of the experiment ``language``."""


def parts(model: str = "tost-decayed", **tssa: int) -> dict[str, Any]:
    """A row: a model, and options of its TSSA."""
    return {"model": model, **SHORT, **({"model.options.mixer_options": {"tssa": tssa}} if tssa else {})}


ROWS: dict[str, dict[str, Any]] = {
    "transformer": parts("transformer"),
    "linear": parts("linear"),
    "mamba2": parts("mamba2"),
    "tost": parts("tost"),
    "tost-no-bias": {**parts("tost"), "model.options.position_bias": False},
    "decayed": parts(),
    "decayed-short-lives": {**parts(), "model.options.half_life": [1.0, 2.5, 6.3, 16.0]},
    "decayed-gate": {**parts(), "model.options.gate": True},
    "decayed-conv": parts(conv_tokens=4),
    "decayed-scan16": parts(features=16),
    "decayed-conv-scan1": parts(conv_tokens=4, features=1),
    "decayed-conv-scan4": parts(conv_tokens=4, features=4),
    "decayed-conv-scan16": parts(conv_tokens=4, features=16),
    "decayed-conv-scan32": parts(conv_tokens=4, features=32),
    "decayed-conv-scan16-gate": {
        **parts(conv_tokens=4, features=16),
        "model.options.gate": True,
    },
}


def state_numbers(run: Mapping[str, Any]) -> int:
    """Numbers that a run's model keeps for a sequence of the length it was trained on."""
    tokens = run["configuration"]["task"]["tokens"]
    settings = ModelSettings(**run["configuration"]["model"])
    if settings.name == "transformer":
        return 2 * settings.layers * settings.width * tokens
    origin = Provenance("bytes", "none", None, 0, 0, "")
    task = Task("bytes", "language", [], [], tokens, origin, vocab_size=BYTE_VOCABULARY)  # type: ignore[arg-type]
    config = model_config(settings, task, tokens)
    with torch.device("meta"):
        return sum(build_mixer(config, layer).state_size(tokens) for layer in range(settings.layers))


def frontier(table: Table) -> str:
    """Loss by the size of the decoding state, the smallest first."""
    kept = sorted((state_numbers(row.runs[0]), label) for label, row in table.items())
    rows = [
        (label, f"{4 * numbers:,}", f"{table[label].mean('loss'):.3f}", "yes" if smallest else "")
        for numbers, label, smallest in _frontier(table, kept)
    ]
    said = (
        "Loss by decoding state: bytes in float32 for one sequence, over all layers; the transformer's is of "
        "128 tokens and grows with them. On the frontier: no smaller state has a lower loss."
    )
    return "\n".join([said, "", *markdown(("", "state, bytes", "loss", "on the frontier"), rows)])


def _frontier(table: Table, kept: list[tuple[int, str]]) -> list[tuple[int, str, bool]]:
    found, least = [], float("inf")
    for numbers, label in kept:
        loss = table[label].mean("loss")
        found.append((numbers, label, loss < least))
        least = min(least, loss)
    return found


LANGUAGE_PARTS = Experiment(
    name="language-parts",
    title="Causal ToST on bytes, part by part",
    source="none: the question is why causal ToST trails, and which part closes it at linear cost",
    recipe="language",
    rows=ROWS,
    seeds=(0,),
    expectations=(
        below("decayed-conv", "decayed"),
        below("decayed-scan16", "decayed"),
        below("decayed-gate", "decayed"),
        below("tost", "tost-no-bias"),
        below("decayed-conv-scan16", "linear"),
    ),
    notes="Width 64, 300 steps on 128 bytes, a tenth of the cost of the experiment above; of one seed, "
    "differences under about 0.03 say nothing.",
    more=frontier,
)


def recall(model: str, **tssa: int) -> dict[str, Any]:
    """A row: a model, and options of its TSSA."""
    options = {"model.options.mixer_options": {"tssa": tssa}} if tssa else {}
    return {"task": "recall", "model.name": model, "monitor": False, **options}


RECALL_PARTS = Experiment(
    name="recall-parts",
    title="Causal ToST on associative recall, part by part",
    source="none: can a layer that only scales tokens find what stood beside a key? The task: Arora "
    "et al., “Zoology”, ICLR 2024",
    recipe="skips",
    rows={
        "softmax": recall("softmax"),
        "tost": recall("tost"),
        "decayed": recall("tost-decayed"),
        "decayed-conv": recall("tost-decayed", conv_tokens=4),
        "decayed-scan16": recall("tost-decayed", features=16),
        "decayed-conv-scan16": recall("tost-decayed", conv_tokens=4, features=16),
    },
    metric="accuracy",
    seeds=(0,),
    expectations=(
        below("tost", "decayed-conv-scan16", "accuracy", by=0.1),
        below("decayed", "decayed-conv-scan16", "accuracy", by=0.1),
    ),
    notes="Two layers of width 64, 4 pairs of keys and values in 32 tokens, 1,000 steps; not of equal "
    "parameters, and one seed.",
)
