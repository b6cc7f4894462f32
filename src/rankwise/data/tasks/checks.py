"""Refusals of options that no task can be made from."""

import math

from rankwise.errors import InputError


def need_whole(name: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no whole number in a range.

    Args:
        name: of the option.
        value: what was given.
        least: the smallest number taken.
        most: the largest, or none.

    Raises:
        InputError: naming the option, the range and what came.

    Examples:
        >>> need_whole("length", 64, 8)
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= least and (most is None or value <= most):
        return
    span = f"{least} or more" if most is None else f"from {least} to {most}"
    raise InputError(name, expected=f"a whole number, {span}", got=repr(value), fix=f"Give {name}={least}.")


def need_number(
    name: str, value: float | int, least: float | int, most: float | int | None = None, *, example: float
) -> None:
    """Refuse what is no finite number in a range, its ends included.

    Args:
        name: of the option.
        value: what was given.
        least: the smallest number taken.
        most: the largest, or none.
        example: a number that is right, for the error.

    Raises:
        InputError: naming the option, the range and what came.

    Examples:
        >>> need_number("depth", 0.5, 0, 1, example=0.5)
    """
    number = isinstance(value, float | int) and not isinstance(value, bool)
    if number and least <= value < math.inf and (most is None or value <= most):
        return
    span = f"{least} or more" if most is None else f"from {least} to {most}"
    raise InputError(name, expected=f"a number, {span}", got=repr(value), fix=f"Give {name}={example}.")


def need_share(name: str, value: float | int) -> None:
    """Refuse what is no share between 0 and 1.

    Args:
        name: of the option.
        value: what was given.

    Raises:
        InputError: naming the option and what came.

    Examples:
        >>> need_share("validation_share", 0.1)
    """
    if isinstance(value, float | int) and not isinstance(value, bool) and 0 < value < 1:
        return
    raise InputError(name, expected="a share between 0 and 1", got=repr(value), fix=f"Give {name}=0.1.")
