"""Depth, norm placement and λ: collapse, effective rank and loss."""

from itertools import product

from recipes.experiment import Experiment, below
from recipes.trained.reading import collapse

LAYERS = (6, 12, 24, 48)
SKIPS = (0.5, 1.0, 2.0)


def label(layers: int, norm: str, skip: float) -> str:
    return f"{layers} {norm} λ={skip:g}"


DEPTH = Experiment(
    name="depth",
    title="Depth, norm and λ",
    source="“Lambda-Skip Connections”, ICLR 2025, Theorem 4.1; reviewers asked for μ during training and "
    "other norms",
    recipe="depth",
    rows={
        label(layers, norm, skip): {"layers": layers, "norm": norm, "skip": skip}
        for layers, norm, skip in product(LAYERS, ("pre", "post"), SKIPS)
    },
    expectations=(
        below(label(48, "post", 2.0), label(48, "post", 1.0), by=0.1),
        below(label(48, "post", 1.0), label(48, "post", 0.5), by=0.1),
        below(label(48, "pre", 1.0), label(48, "post", 1.0), by=0.1),
        below(label(48, "pre", 1.0), label(6, "pre", 1.0)),
    ),
    notes="Softmax attention, bytes, width 64, windows of 64 bytes; attention is added to λ x, the "
    "feed-forward part to x. The number is that of layers.",
    more=collapse,
)
