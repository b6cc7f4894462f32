"""Depth: where the norm stands and how strong the skip is, from 6 to 48 layers."""

from typing import Any, Literal

from rankwise.train.settings import (
    EvaluationSettings,
    ModelSettings,
    OptimiserSettings,
    Recipe,
    Size,
    TaskSettings,
    unit_scale,
)


def depth(
    size: Size = "small",
    layers: int = 12,
    norm: Literal["pre", "post"] = "post",
    skip: float = 1.0,
    layer_scale: float | None = None,
    seed: int = 0,
) -> Recipe:
    """Collapse, effective rank and loss of softmax transformers on bytes, by depth, norm and λ.

    Args:
        size: small: width 64, windows of 64 bytes; paper: width 256, 512 bytes.
        layers: blocks.
        norm: before what a part reads (pre), or on the sum (post).
        skip: λ around attention.
        layer_scale: start of a learned scale on what each part adds; None: no scale.
        seed: of weights and of the order of windows.
    """
    small = size == "small"
    width = 64 if small else 256
    options: dict[str, Any] = {
        "norm_position": norm,
        "skip": "fixed",
        "skip_init": skip,
        "layer_scale": layer_scale,
        "initializer_range": unit_scale(width),
    }
    return Recipe(
        name="depth",
        size=size,
        claim="A larger λ keeps tokens of deep stacks apart, and what has collapsed does not learn (λ-skip "
        "paper, Theorem 4.1).",
        model=ModelSettings(name="softmax", width=width, layers=layers, heads=4, options=options),
        task=TaskSettings(name="bytes", tokens=64 if small else 512, options={"windows": 100_000}),
        optimiser=OptimiserSettings(learning_rate=1e-3, warmup=20 if small else 500),
        evaluation=EvaluationSettings(every=100 if small else 1000, examples=200 if small else None),
        steps=200 if small else 10_000,
        batch=16 if small else 32,
        seed=seed,
        monitor=True,
        monitor_every=100 if small else 1000,
    )
