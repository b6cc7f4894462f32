"""Which part brings causal ToST near the transformer: short runs on bytes, and on associative recall."""

from typing import Any

from recipes.experiment import Experiment, below

SHORT: dict[str, Any] = {
    "steps": 300,
    "task.tokens": 128,
    "evaluation.every": 300,
    "evaluation.examples": 200,
}
"""A quarter of the cost of the experiment ``language``."""


def parts(model: str = "tost-decayed", **tssa: int) -> dict[str, Any]:
    """A row: a model, and options of its TSSA."""
    return {"model": model, **SHORT, **({"model.options.mixer_options": {"tssa": tssa}} if tssa else {})}


ROWS: dict[str, dict[str, Any]] = {
    "transformer": parts("transformer"),
    "linear": parts("linear"),
    "mamba2": parts("mamba2"),
    "tost": parts("tost"),
    "tost, no bias": {**parts("tost"), "model.options.position_bias": False},
    "decayed": parts(),
    "decayed, half-lives 1 to 16": {**parts(), "model.options.half_life": [1.0, 2.5, 6.3, 16.0]},
    "decayed, gate": {**parts(), "model.options.gate": True},
    "decayed, convolution": parts(conv_tokens=4),
    "decayed, scan of 16": parts(features=16),
    "decayed, convolution, scan of 1": parts(conv_tokens=4, features=1),
    "decayed, convolution, scan of 4": parts(conv_tokens=4, features=4),
    "decayed, convolution, scan of 16": parts(conv_tokens=4, features=16),
    "decayed, convolution, scan of 32": parts(conv_tokens=4, features=32),
    "decayed, convolution, scan of 16, gate": {
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
        below("decayed, convolution", "decayed"),
        below("decayed, scan of 16", "decayed"),
        below("decayed, gate", "decayed"),
        below("tost", "tost, no bias"),
        below("decayed, convolution, scan of 16", "linear"),
    ),
    notes="300 steps on 128 bytes, a quarter of the cost of the experiment above, one seed: differences under "
    "about 0.03 say nothing.",
)
