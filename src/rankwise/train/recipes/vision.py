"""Vision: ToST against a ViT of equal size on CIFAR-10."""

from typing import Literal

from rankwise.train.settings import (
    EvaluationSettings,
    ModelSettings,
    OptimiserSettings,
    Recipe,
    Size,
    TaskSettings,
    unit_scale,
)

Model = Literal["transformer", "softmax", "tost", "tost-uniform"]
PARAMETERS = {"small": 400_000, "paper": 5_800_000}
"""Weights of every model, by its feed-forward width."""


def vision(size: Size = "small", model: Model = "tost", seed: int = 0) -> Recipe:
    """Accuracy on CIFAR-10 with crops and mirror images, at equal parameters.

    Args:
        size: small: 4 layers, width 96; paper: 12 layers, width 192. Patches of 4×4 pixels.
        model: transformer is a ViT; softmax and tost stand in the released frame (convolutional patches,
            Fourier positions, class attention).
        seed: of weights and of the order of pictures.
    """
    small = size == "small"
    width = 96 if small else 192
    return Recipe(
        name="vision",
        size=size,
        claim="ToST is near transformers of its size on pictures, at linear cost (ToST paper, fine-tuning on "
        "CIFAR-10).",
        model=ModelSettings(
            name=model,
            width=width,
            layers=4 if small else 12,
            heads=4,
            parameters=PARAMETERS[size],
            options={"initializer_range": unit_scale(width)},
        ),
        task=TaskSettings(name="cifar10", tokens=64, options={"augment": True}),
        optimiser=OptimiserSettings(learning_rate=1e-3, warmup=50 if small else 1000),
        evaluation=EvaluationSettings(
            every=500 if small else 2000, metric="accuracy", examples=1000 if small else None
        ),
        steps=1500 if small else 60_000,
        batch=32 if small else 128,
        seed=seed,
    )
