"""Long Range Arena by mixer, at equal parameters and with one set of hyper-parameters."""

from typing import get_args

from rankwise.train.recipes.long_range import Model
from recipes.experiment import Experiment, alike, below

TASKS = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}


def experiment(task: str, name: str) -> Experiment:
    return Experiment(
        name=f"long-range-{task}",
        title=f"Long Range Arena, {name}",
        source="Wu et al., “Token Statistics Transformer”, ICLR 2025; reviewers asked for baselines of equal "
        "size, uniform memberships, time and memory",
        recipe="long-range",
        rows={model: {"task": task, "model": model} for model in get_args(Model)},
        metric="accuracy",
        expectations=(alike("tost", "softmax", 0.03), below("tost-uniform", "tost", "accuracy", by=0.01)),
        notes="120,000 weights each, by the feed-forward width; shorter sequences than published, except "
        "Image and Pathfinder (1,024 pixels; contours of "
        "6 dashes). One set of hyper-parameters, none tuned. s4d and mamba2 read left to right.",
    )


LONG_RANGE = [experiment(task, name) for task, name in TASKS.items()]
