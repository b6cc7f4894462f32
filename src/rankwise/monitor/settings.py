"""What a monitor is given, refused before the training begins."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from rankwise._internals.forward import Batch, map_tensors
from rankwise.auditing.findings import check_codes
from rankwise.errors import InputError


def probe_batches(probe: Any) -> list[Batch]:
    """Copies of the batches of a probe: the caller may write into its own.

    Args:
        probe: a batch or a list of batches.

    Raises:
        InputError: if it is neither, or a batch holds no tensor, or an empty tensor.
    """
    many = (
        isinstance(probe, list) and bool(probe) and not all(isinstance(item, int | float) for item in probe)
    )
    return [_copied(batch) for batch in (probe if many else [probe])]


def _copied(batch: Any) -> Batch:
    fix = "Take a batch of the evaluation data: `next(iter(loader))`."
    if not isinstance(batch, Mapping | tuple | Tensor):
        wanted = "a batch (dict, tuple or tensor) or a list of batches"
        raise InputError("`probe`", expected=wanted, got=type(batch).__name__, fix=fix)
    shapes: list[tuple[int, ...]] = []

    def copied(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    copy: Batch = map_tensors(batch, copied)
    if not shapes:
        got = f"a {type(batch).__name__} without tensors"
        raise InputError("`probe`", expected="at least one tensor in each batch", got=got, fix=fix)
    if any(0 in shape for shape in shapes):
        got = "tensors of shape " + ", ".join(map(str, shapes))
        raise InputError("`probe`", expected="at least one sequence of one token", got=got, fix=fix)
    return copy


def stopping_codes(stop_on: Any) -> frozenset[str]:
    """Codes of findings that end a training.

    Args:
        stop_on: codes, or a single code.

    Raises:
        InputError: if no finding has such a code.
    """
    several = isinstance(stop_on, Iterable) and not isinstance(stop_on, str)
    return frozenset(check_codes([str(code) for code in (stop_on if several else [stop_on])]))


def steps_between(every: Any, usual: int) -> int:
    """Steps between two audits.

    Args:
        every: the number.
        usual: what an error advises.

    Raises:
        InputError: if it is no positive number.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(
            "`every`", expected="a number of steps, 1 or more", got=repr(every), fix=f"Take {usual}."
        )
    return every


def step_number(step: Any) -> int:
    """The number of a step; also where it is NumPy's or a tensor's.

    Args:
        step: the number.

    Raises:
        InputError: if it is no whole number from 0 on.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(
            "`step`",
            expected="a whole number, 0 or more",
            got=repr(step),
            fix="Count the steps: `for step, batch in enumerate(loader)`.",
        )
    return number
