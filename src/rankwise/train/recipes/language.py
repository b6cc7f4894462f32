"""Language models on bytes: how far linear-time mixers are behind softmax attention, at equal parameters."""

from typing import Literal

from rankwise.train.settings import (
    EvaluationSettings,
    ModelSettings,
    OptimiserSettings,
    Recipe,
    Size,
    TaskSettings,
)

Model = Literal[
    "transformer",
    "softmax",
    "softmax-rotary",
    "tost",
    "tost-decayed",
    "tost-uniform",
    "tost-hybrid",
    "tost-scan",
    "tost-scan-hybrid",
    "linear",
    "mamba2",
]


PARAMETERS = {"small": 820_224, "paper": 37_888_000}
"""Weights of the transformer, and so of all."""


def language(size: Size = "small", model: Model = "transformer", seed: int = 0) -> Recipe:
    """Loss on bytes of tiny Shakespeare by mixer.

    Args:
        size: small: 4 layers, width 128, windows of 256 bytes; paper: 12 layers, width 512, 1,024 bytes.
        model: all have as many weights as the transformer, by their feed-forward width.
        seed: of weights and of the order of windows.
    """
    small = size == "small"
    return Recipe(
        name="language",
        size=size,
        claim="Causal TSSA trails softmax attention on language, and statistics that forget close part of "
        "the gap (Wu et al., ToST, README: 3.20 against 2.84 on OpenWebText at 110M and 124M weights).",
        model=ModelSettings(
            name=model,
            width=128 if small else 512,
            layers=4 if small else 12,
            heads=4 if small else 8,
            parameters=None if model == "transformer" else PARAMETERS[size],
        ),
        task=TaskSettings(name="bytes", tokens=256 if small else 1024, options={"windows": 100_000}),
        optimiser=OptimiserSettings(learning_rate=3e-3 if small else 1e-3, warmup=50 if small else 500),
        evaluation=EvaluationSettings(every=300 if small else 1000),
        steps=600 if small else 10_000,
        batch=8 if small else 64,
        seed=seed,
    )
