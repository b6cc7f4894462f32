"""Long Range Arena: ToST against other mixers of equal size, one set of hyper-parameters."""

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

Model = Literal["softmax", "linear", "s4d", "mamba2", "tost", "tost-uniform"]
TaskName = Literal["listops", "text", "image", "pathfinder"]
PARAMETERS = {"small": 120_000, "paper": 1_300_000}
"""Weights of every model, by its feed-forward width; learned positions of Text are 524,288 of them."""

STEPS: dict[TaskName, int] = {"listops": 2000, "text": 400, "image": 2000, "pathfinder": 300}
"""Of the small size: what a few minutes on a core allow."""


def long_range(
    size: Size = "small", task: TaskName = "listops", model: Model = "tost", seed: int = 0
) -> Recipe:
    """Accuracy of mixers of equal size on ListOps, Text, Image and Pathfinder.

    Args:
        size: small: 2 layers, width 64, short sequences; paper: 6 layers, width 128, the published lengths.
        task: of Long Range Arena.
        model: what mixes tokens; s4d and mamba2 read from left to right, the others both ways.
        seed: of weights and of the order of examples.
    """
    small = size == "small"
    width = 64 if small else 128
    return Recipe(
        name="long-range",
        size=size,
        claim="ToST reaches what other mixers of equal size reach on Long Range Arena (ToST paper).",
        model=ModelSettings(
            name=model,
            width=width,
            layers=2 if small else 6,
            heads=4 if small else 8,
            parameters=PARAMETERS[size],
            options={"initializer_range": unit_scale(width)},
        ),
        task=_task(task, small),
        optimiser=OptimiserSettings(learning_rate=1e-3, warmup=50 if small else 1000),
        evaluation=EvaluationSettings(
            every=STEPS[task] // 2 if small else 2000,
            metric="accuracy",
        ),
        steps=STEPS[task] if small else 30_000,
        batch=16 if small else 64,
        seed=seed,
    )


def _task(task: TaskName, small: bool) -> TaskSettings:
    if not small:
        paper: dict[TaskName, tuple[str, int]] = {
            "listops": ("listops", 2000),
            "text": ("imdb-bytes", 4096),
            "image": ("cifar10-sequence", 1024),
            "pathfinder": ("pathfinder", 1024),
        }
        name, tokens = paper[task]
        return TaskSettings(name=name, tokens=tokens)
    options: dict[TaskName, tuple[str, int, dict[str, Any]]] = {
        "listops": (
            "listops",
            128,
            {"train": 10_000, "test": 2000, "min_length": 32, "max_depth": 5, "max_arguments": 5},
        ),
        "text": ("imdb-bytes", 512, {"test_examples": 2000}),
        "image": ("cifar10-sequence", 256, {"side": 16, "test_examples": 2000}),
        "pathfinder": ("pathfinder", 1024, {"train": 2_000, "test": 500, "contour_length": 6}),
    }
    name, tokens, more = options[task]
    return TaskSettings(name=name, tokens=tokens, options=more)
