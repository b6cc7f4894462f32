"""What is refused before a training begins."""

import math
from collections import Counter
from importlib.util import find_spec

from transformers import Trainer

from rankwise.errors import InputError, TrainingError
from rankwise.train.settings import Recipe

UNLIKELY = 6
"""Standard deviations by which a class is not more frequent among the first than among all by chance."""


def check_installed() -> None:
    """See that there is what the Trainer runs by.

    Raises:
        InputError: if not.
    """
    if find_spec("accelerate") is None:
        raise InputError(
            "a training",
            expected="the package accelerate, by which the Trainer runs",
            got="an environment without it",
            fix="pip install 'rankwise[train]'",
        )


def check_batch(recipe: Recipe, processes: int) -> None:
    """See that processes can share a batch.

    Args:
        recipe: the configuration.
        processes: how many there are.

    Raises:
        TrainingError: if their shares would differ.
    """
    if recipe.batch % processes:
        raise TrainingError(
            "`batch`",
            expected=f"a number that {processes} processes divide",
            got=str(recipe.batch),
            fix=f"Take batch={recipe.batch // processes * processes + processes}.",
        )


def check_copies(trainer: Trainer) -> None:
    """Refuse what accelerate was told besides: checkpoints and results are written of whole models.

    Args:
        trainer: that is to train.

    Raises:
        TrainingError: if it would split the model.
    """
    split = {"FSDP": trainer.is_fsdp_enabled, "DeepSpeed": trainer.is_deepspeed_enabled}
    named = [name for name, used in split.items() if used]
    if named:
        raise TrainingError(
            "accelerate's configuration",
            expected="a copy of the model in each process (DDP)",
            got=named[0],
            fix="Start it by `torchrun --nproc-per-node N -m rankwise train …`, without an accelerate "
            "configuration and without ACCELERATE_USE_FSDP or ACCELERATE_USE_DEEPSPEED.",
        )


def check_mixed(labels: list[int], most: int) -> None:
    """Refuse to judge by the first of data that are sorted by class: they tell nothing of the others.

    Args:
        labels: of all held-out examples.
        most: how many of the first are judged.

    Raises:
        InputError: if one class is far too frequent among them.
    """
    label, count = Counter(labels[:most]).most_common(1)[0]
    share = labels.count(label) / len(labels)
    if count - most * share > UNLIKELY * math.sqrt(most * share * (1 - share)):
        raise InputError(
            "`evaluation.examples`",
            expected=f"held-out examples in an order in which the first {most} are like all {len(labels)}",
            got=f"class {label} in {count / most:.0%} of the first, {share:.0%} of all",
            fix="Shuffle the examples of the file, or leave evaluation.examples out to judge by all.",
        )
