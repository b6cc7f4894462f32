"""Which part brings causal ToST near the transformer: short runs on bytes, and on associative recall."""

from typing import Any

from recipes.experiment import Experiment, below

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
)
