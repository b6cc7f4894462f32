"""ToST against a ViT on CIFAR-10."""

from experiments.experiment import Experiment, at_paper_size
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import below, close_to

MODELS = ("transformer", "softmax", "tost", "tost-uniform")
WIDTH = 96


def config(model: str) -> TrainingConfig:
    """Return a model on CIFAR-10, in patches of 4 × 4 pixels, with crops and mirror images."""
    return TrainingConfig(
        model=model,
        width=WIDTH,
        parameters=400_000,
        model_options={"initializer_range": unit_variance_std(WIDTH)},
        task="cifar10",
        tokens=64,
        task_options={"augment": True},
        steps=1500,
        batch=32,
        evaluate_every=500,
        evaluate_on=1000,
        metric="accuracy",
    )


ROWS = {model: config(model) for model in MODELS}
VISION = Experiment(
    name="vision",
    title="CIFAR-10 by mixer",
    source="Wu et al., “Token Statistics Transformer”, ICLR 2025: ToST next to XCiT and ViT, ImageNet and "
    "fine-tuning",
    rows=ROWS,
    large=at_paper_size(
        ROWS,
        width=192,
        layers=12,
        parameters=5_800_000,
        warmup=1000,
        steps=60_000,
        batch=128,
        evaluate_every=2000,
        evaluate_on=None,
    ),
    expectations=(
        close_to("tost", "softmax", 0.02),
        below("transformer", "tost", "accuracy"),
        below("tost-uniform", "tost", "accuracy"),
    ),
)
