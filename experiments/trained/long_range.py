"""Long Range Arena by mixer, at equal parameters and with one set of hyper-parameters."""

import math
from typing import get_args

from experiments.experiment import Experiment, Table, below, exceeds, within
from experiments.listops_baselines import told
from experiments.trained.reading import markdown
from rankwise.train.recipes.long_range import Model

RATES = (3e-4, 3e-3)
"""Learning rates beside the recipe's, 0.001, of the task that is tuned."""
TUNED = "listops"
NOTES = (
    "120,000 weights each, by the feed-forward width; shorter sequences than published (Image: 16×16), "
    "except Pathfinder. One set of hyper-parameters, but where a row says another learning rate. "
    "s4d and mamba2 read left to right."
)
KNOWN = told()
COUNTING = {"listops": float(KNOWN["counts"])}
"""Accuracy of a model that only counts tokens (`python -m experiments.listops_baselines`): below it nothing
is learned about their order."""
MORE = {
    "listops": " Expressions of 32 to 128 tokens. The most common value of the first operation is right in "
    f"{KNOWN['first_operation']:.4f} of the test split, a linear classifier of it and the counts of the "
    f"tokens in {KNOWN['counts']:.4f}, with a loss of {KNOWN['counts_loss']:.3f} "
    "(`python -m experiments.listops_baselines`).",
    "pathfinder": " Contours of 6 dashes: the distance of the two dots alone tells 60.3 % of the answers "
    "([Tasks](how-to/tasks.md)).",
}
BASELINES = ("softmax", "linear", "s4d", "mamba2")
TASKS = {"listops": "ListOps", "text": "Text", "image": "Image", "pathfinder": "Pathfinder"}


def at_rate(model: str, rate: float) -> str:
    return f"{model}, rate {rate:g}"


def best_rates(table: Table) -> str:
    """The best learning rate of each model, among those that were run at every one."""
    rows = []
    for model in get_args(Model):
        tried = {"0.001": model, **{f"{rate:g}": at_rate(model, rate) for rate in RATES}}
        if all(label in table for label in tried.values()):
            rate, label = max(tried.items(), key=lambda item: table[item[1]].mean("accuracy"))
            rows.append((model, rate, f"{table[label].mean('accuracy'):.3f}"))
    if not rows:
        return ""
    said = "The best of three learning rates, chosen by the accuracy shown:"
    return "\n".join([said, "", *markdown(("", "learning rate", "accuracy"), rows)])


def experiment(task: str, name: str) -> Experiment:
    rates = RATES if task == TUNED else ()
    return Experiment(
        name=f"long-range-{task}",
        title=f"Long Range Arena, {name}",
        source="Wu et al., “Token Statistics Transformer”, ICLR 2025; reviewers asked for baselines of equal "
        "size, uniform memberships, time and memory",
        recipe="long-range",
        rows={model: {"task": task, "model": model} for model in get_args(Model)}
        | {
            at_rate(model, rate): {"task": task, "model": model, "learning_rate": rate}
            for model in get_args(Model)
            for rate in rates
        },
        metric="accuracy",
        expectations=(
            *(within("tost", one, 0.03, "accuracy", COUNTING.get(task, -math.inf)) for one in BASELINES),
            below("tost-uniform", "tost", "accuracy", by=0.01, floor=COUNTING.get(task, -math.inf)),
            *(
                exceeds(model, COUNTING[task], "that of counting tokens")
                for model in get_args(Model)
                if task in COUNTING
            ),
        ),
        notes=NOTES + MORE.get(task, ""),
        more=best_rates if rates else None,
    )


LONG_RANGE = [experiment(task, name) for task, name in TASKS.items()]
