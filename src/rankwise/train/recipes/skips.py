"""λ around every mixer: does the strength of the skip decide what a stack can learn, whatever the mixer?"""

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

Mixer = Literal["softmax", "linear", "s4d", "mamba", "mamba2"]
Skip = int | Literal["learned", "channel", "shared"]
FROM = -1.0
"""Where the paper's learned λ starts."""


def skips(
    size: Size = "small",
    task: Literal["image", "recall"] = "image",
    mixer: Mixer = "softmax",
    skip: Skip = 1,
    gate: bool = False,
    seed: int = 0,
) -> Recipe:
    """Accuracy by λ and mixer on LRA Image and on associative recall.

    Args:
        size: small: 8 layers, width 64 (recall: 2 layers), pictures shrunk to 16×16 pixels; paper: 8 layers,
            width 128 (recall: 4 layers), pictures of 32×32.
        task: pixels of grey CIFAR-10 in a row, or multi-query associative recall.
        mixer: what mixes tokens.
        skip: λ, or ``learned`` from −1 for each layer, for each ``channel`` of each layer, or once for all
            layers: ``shared``.
        gate: whether the mixer's output is gated.
        seed: of weights and of the order of examples.
    """
    small = size == "small"
    width = 64 if small else 128
    learned = isinstance(skip, str)
    options: dict[str, Any] = {
        "skip": skip if learned else "fixed",
        "skip_init": FROM if learned else float(skip),
        "gate": gate,
        "initializer_range": unit_scale(width),
    }
    image = task == "image"
    layers = 8 if image else 2 if small else 4
    return Recipe(
        name="skips",
        size=size,
        claim="λ decides whether deep stacks learn: without a skip accuracy is that of chance (λ-skip paper, "
        "table of λ: 8-layer transformer, LRA Image).",
        model=ModelSettings(name=mixer, width=width, layers=layers, heads=4 if small else 8, options=options),
        task=_task(task, small),
        optimiser=OptimiserSettings(
            learning_rate=1e-3 if image or not small else 3e-3, warmup=20 if small else 1000
        ),
        evaluation=EvaluationSettings(
            every=500 if small else 2000,
            metric="accuracy",
            examples=2000 if small else None,  # a standard error of an accuracy of at most 0.011
        ),
        steps=(1000 if image else 3000) if small else 50_000,
        batch=(16 if image else 32) if small else 64,
        seed=seed,
        monitor=True,
        monitor_every=(500 if image else 1500) if small else 5000,
    )


def _task(task: str, small: bool) -> TaskSettings:
    if task == "image":
        return TaskSettings(
            name="cifar10-sequence", tokens=256 if small else 1024, options={"side": 16} if small else {}
        )
    # four pairs take more steps than minutes on a core allow, with softmax attention and λ = 1, too
    sizes = {"train": 20_000, "test": 2000, "vocab_size": 64, "pairs": 2} if small else {"pairs": 8}
    return TaskSettings(name="mqar", tokens=16 if small else 128, options=sizes)
