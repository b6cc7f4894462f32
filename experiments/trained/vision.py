"""ToST against a ViT on CIFAR-10."""

from typing import get_args

from experiments.experiment import Experiment, alike, below
from rankwise.train.recipes.vision import Model

VISION = Experiment(
    name="vision",
    title="CIFAR-10 by mixer",
    source="Wu et al., “Token Statistics Transformer”, ICLR 2025: ToST beside XCiT and ViT, ImageNet and "
    "fine-tuning",
    recipe="vision",
    rows={model: {"model": model} for model in get_args(Model)},
    metric="accuracy",
    expectations=(
        alike("tost", "softmax", 0.02),
        below("transformer", "tost", "accuracy"),
        below("tost-uniform", "tost", "accuracy"),
    ),
    notes="Trained from nothing with crops and mirror images, 400,000 weights each. transformer is a plain "
    "ViT; softmax and tost stand in the released frame, so that the mixer alone differs between them.",
)
