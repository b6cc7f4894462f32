"""λ by mixer on LRA Image and on associative recall."""

import math
from itertools import product
from typing import Any, get_args

from experiments.experiment import Experiment, alike, below
from experiments.trained.reading import collapse, joined, learned
from rankwise.train.recipes.skips import Mixer

MIXERS = get_args(Mixer)
SKIPS = (-2, -1, 0, 1, 2, "shared", "learned", "channel")
SECOND_HAND = {1: "0.423 (a fixed λ; second-hand)", "learned": "0.389 (second-hand)"}
PAPER = {-2: "0.386", -1: "0.359", 0: "0.100", 1: "0.402", 2: "0.389"}


FLOOR = {"recall": 0.6}
"""Accuracy at which nothing of what is asked has been learned, where that is above the commonest answer's."""
NOTES = {
    "image": "Pixels shrunk to 16×16, 8 layers as in the paper, of width 64.",
    "recall": "2 layers, 2 pairs in 16 tokens. An accuracy near 0.5 is that of a model that tells the values "
    "of a sequence but not their keys; the jump to 1 comes at a step that differs from seed to seed, so that "
    "one seed says little.",
}


def label(mixer: str, skip: Any) -> str:
    return f"{mixer} λ={skip}"


def gated(mixer: str, skip: Any) -> str:
    return f"{label(mixer, skip)} gate"


def experiment(task: str, title: str, paper: dict[str, str]) -> Experiment:
    floor = FLOOR.get(task, -math.inf)
    return Experiment(
        name=f"skips-{task}",
        title=title,
        source="“Lambda-Skip Connections”, ICLR 2025: table of λ, a transformer of 8 layers on LRA Image; "
        "reviewers asked for learned λ by depth, μ during training, and gates",
        recipe="skips",
        rows={
            label(mixer, skip): {"task": task, "mixer": mixer, "skip": skip}
            for mixer, skip in product(MIXERS, SKIPS)
        }
        | {
            gated(mixer, skip): {"task": task, "mixer": mixer, "skip": skip, "gate": True}
            for mixer, skip in product(("softmax", "mamba2"), (0, 1))
        },
        metric="accuracy",
        paper=paper,
        expectations=[below(label(mixer, 0), label(mixer, 1), "accuracy", 0.02, floor) for mixer in MIXERS]
        + [below(gated("softmax", 0), gated("softmax", 1), "accuracy", 0.02, floor)]
        + [alike(label(mixer, 1), label(mixer, "learned"), 0.02, floor=floor) for mixer in MIXERS],
        notes="λ is around the mixer alone; the feed-forward part keeps its own skip. shared: one λ learned "
        "for all layers, from −1; learned: one for each layer; channel: one for each channel of each layer. "
        "gate: the mixer's output is multiplied by a gate that its input gives. Pre-norm. " + NOTES[task],
        more=joined(learned, collapse),
    )


SKIPS_IMAGE = experiment(
    "image",
    "λ by mixer, LRA Image",
    {label("softmax", skip): told for skip, told in PAPER.items()}
    | {label("mamba2", skip): told for skip, told in SECOND_HAND.items()},
)
SKIPS_RECALL = experiment("recall", "λ by mixer, associative recall", {})
