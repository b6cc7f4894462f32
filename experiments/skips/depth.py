"""Depth, norm placement and λ: collapse, effective rank and loss."""

from itertools import product

from experiments.audits import collapse
from experiments.experiment import Experiment, at_paper_size
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import below

LAYERS = (6, 12, 24, 48)
SKIPS = (0.5, 1.0, 2.0)
SCALE = 0.1
"""Initial LayerScale."""
WIDTH = 64


def config(layers: int, norm: str, skip: float = 1.0, layer_scale: float | None = None) -> TrainingConfig:
    """Return a softmax transformer on bytes, with λ around attention."""
    return TrainingConfig(
        model="softmax",
        width=WIDTH,
        layers=layers,
        model_options={
            "norm_position": norm,
            "skip": "fixed",
            "skip_init": skip,
            "layer_scale": layer_scale,
            "initializer_range": unit_variance_std(WIDTH),
        },
        task="bytes",
        tokens=64,
        task_options={"windows": 100_000},
        warmup=20,
        steps=200,
        batch=16,
        evaluate_every=100,
        evaluate_on=200,
        monitor_every=100,
    )


def label(layers: int, norm: str, skip: float) -> str:
    return f"{layers} {norm} λ={skip:g}"


def scaled(layers: int, norm: str) -> str:
    return f"{label(layers, norm, 1.0)} LayerScale"


ROWS = {
    label(layers, norm, skip): config(layers, norm, skip)
    for layers, norm, skip in product(LAYERS, ("pre", "post"), SKIPS)
} | {
    scaled(layers, norm): config(layers, norm, layer_scale=SCALE)
    for layers, norm in product((6, 48), ("pre", "post"))
}
DEPTH = Experiment(
    name="depth",
    title="Depth, norm and λ",
    source="“Lambda-Skip Connections”, ICLR 2025, Theorem 4.1; reviewers asked for μ during training and "
    "other norms",
    rows=ROWS,
    large=at_paper_size(
        ROWS,
        width=256,
        tokens=512,
        warmup=500,
        steps=10_000,
        batch=32,
        evaluate_every=1000,
        evaluate_on=None,
        monitor_every=1000,
    ),
    expectations=(
        below(label(48, "post", 2.0), label(48, "post", 1.0), by=0.1),
        below(label(48, "post", 1.0), label(48, "post", 0.5), by=0.1),
        below(label(48, "pre", 1.0), label(48, "post", 1.0), by=0.1),
        below(label(48, "pre", 1.0), label(6, "pre", 1.0)),
        below(scaled(48, "post"), label(48, "post", 1.0), by=0.1),
    ),
    tables=collapse,
)
