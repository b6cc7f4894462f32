"""Head width: do rank at initialisation and accuracy after training stop growing at the same K?"""

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


def saturation(
    size: Size = "small",
    task: Literal["images", "text"] = "images",
    head_dim: int = 8,
    tied: bool = False,
    seed: int = 0,
) -> Recipe:
    """Rank at initialisation and accuracy after training, by head width K at a fixed model width.

    Args:
        size: small: 3 layers, width 64; paper: 6 layers, width 192.
        task: CIFAR-10 as patches, or IMDB as bytes.
        head_dim: K.
        tied: D = H·K: D / K heads, whose values are K wide, too. Otherwise K is of queries and keys alone,
            and 4 heads and their values stay.
        seed: of weights and of the order of examples.
    """
    small, images = size == "small", task == "images"
    width = 64 if small else 192
    options: dict[str, Any] = {"initializer_range": unit_scale(width)}
    if not tied:
        options["mixer_options"] = {"softmax": {"query_dim": head_dim}}
    taken = {"train_examples": None, "test_examples": 1000 if small else None}
    return Recipe(
        name="saturation",
        size=size,
        claim="Rank at initialisation and accuracy after training saturate at the same K (rank paper, "
        "model-reduction effect).",
        model=ModelSettings(
            name="softmax",
            width=width,
            layers=3 if small else 6,
            heads=width // head_dim if tied else 4,
            options=options,
        ),
        task=TaskSettings(name="cifar10", tokens=64, options={**taken, "augment": not small})
        if images
        else TaskSettings(name="imdb-bytes", tokens=256 if small else 4096, options=taken),
        optimiser=OptimiserSettings(learning_rate=1e-3, warmup=50 if small else 500),
        evaluation=EvaluationSettings(every=400 if small else 2000, metric="accuracy"),
        steps=800 if small else 40_000,
        batch=32 if images else 16,
        seed=seed,
        monitor=True,
        monitor_every=800 if small else 10_000,
    )
