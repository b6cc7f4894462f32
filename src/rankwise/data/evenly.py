"""Which of many to take when only a few are wanted."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from rankwise.errors import InputError

T = TypeVar("T")


class Shard(NamedTuple):
    """The share of one process among several: neighbouring items, the first ones in the first share.

    Shares differ by one item at most; where there are fewer items than shares, some are empty.

    Examples:
        >>> [Shard(rank, 3).of("abcd") for rank in range(3)]
        ['ab', 'c', 'd']
    """

    rank: int = 0
    world: int = 1

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """The items of this share.

        Args:
            items: of all.
        """
        start, stop = (-(-len(items) * rank // self.world) for rank in (self.rank, self.rank + 1))
        return items[start:stop]


WHOLE = Shard()
"""All of them."""


def evenly(count: int, wanted: int) -> list[int]:
    """Choose ``wanted`` of ``count`` items, evenly from first to last.

    ``⌊i·count/wanted⌋`` for ``i < wanted``; all of them where there are no more than wanted. Files and rows
    are often sorted by class, so the first few would show one class only.

    Args:
        count: how many there are.
        wanted: how many to take at most.

    Returns:
        Rising indices, ``min(count, wanted)`` of them.

    Examples:
        >>> evenly(10, 4)
        [0, 2, 5, 7]
        >>> evenly(2, 4)
        [0, 1]
    """
    taken = min(count, wanted)
    return [i * count // taken for i in range(taken)]


def check_positive(**numbers: int) -> None:
    """Refuse counts below one.

    Raises:
        InputError: naming the first such count.

    Examples:
        >>> check_positive(tokens=256, sequences=8)
    """
    for name, number in numbers.items():
        if number < 1:
            flag = name.replace("_", "-")
            raise InputError(
                f"--{flag}", expected="a whole number, 1 or more", got=str(number), fix=f"Give {name} ≥ 1."
            )
