"""The steps of training that names of checkpoints tell."""

import re
from collections.abc import Sequence


def steps_of(names: Sequence[str]) -> list[int] | None:
    """The one number in which names differ, such as that of ``run/checkpoint-500``.

    Args:
        names: of models, checkpoints or folders.

    Returns:
        A number for each; None where the names differ in words, in several numbers, or twice in none.

    Examples:
        >>> steps_of(["run1/checkpoint-500", "run1/checkpoint-1000"])
        [500, 1000]
        >>> steps_of(["gpt2", "bert"]), steps_of(["a-1-b-2", "a-2-b-1"])
        (None, None)
    """
    if len({re.sub(r"\d+", "0", name) for name in names}) != 1:
        return None
    numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in names]
    varied = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(names) == 1:
        return [numbers[0][-1]] if numbers[0] else None
    if len(varied) != 1 or len(set(varied[0])) < len(names):
        return None
    return list(varied[0])


def in_order(names: Sequence[str]) -> list[str]:
    """Names by their steps; as they are where they tell none.

    Args:
        names: of models, checkpoints or folders.

    Examples:
        >>> in_order(["checkpoint-1000", "checkpoint-200"])
        ['checkpoint-200', 'checkpoint-1000']
    """
    steps = steps_of(names)
    return list(names) if steps is None else [name for _, name in sorted(zip(steps, names, strict=True))]
