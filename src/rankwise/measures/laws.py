"""What a measure says of itself, so that the laws of all measures hold it without a list of them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

MeasureT = TypeVar("MeasureT", bound=Callable[..., Any])


class Law(NamedTuple):
    """What a measure is of, and how it follows the size of the numbers.

    Attributes:
        of: matrices, (..., T, S) or an operator, each by itself; or the token states (B, T, D).
        degree: k in f(c·M) = cᵏ·f(M) for c > 0; None where something else has a size, such as δ.
    """

    of: Literal["matrices", "tokens"]
    degree: int | None


LAWS: dict[str, Law] = {}
"""By the name of the function."""


def measure_of(of: Literal["matrices", "tokens"], *, degree: int | None) -> Callable[[MeasureT], MeasureT]:
    """Mark a function as a measure: one number for each matrix or sequence.

    Args:
        of: as in `Law`.
        degree: as in `Law`.

    Examples:
        >>> from rankwise import measures
        >>> LAWS["row_entropy"]
        Law(of='matrices', degree=0)
    """

    def note(function: MeasureT) -> MeasureT:
        LAWS[function.__name__] = Law(of, degree)
        return function

    return note
