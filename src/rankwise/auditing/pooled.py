"""Means and standard deviations of parts, joined into those of the whole."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

R = TypeVar("R")
Key = tuple[Hashable, ...]


class Moments(NamedTuple):
    """Of some numbers: how many, their mean and their standard deviation."""

    number: int
    mean: int | float
    """NaN where it is not known."""
    spread: int | float = math.nan
    """Standard deviation over n − 1; NaN below two numbers."""


def pooled(parts: Iterable[Moments]) -> Moments:
    """Join the moments of parts into those of the whole, as one pass over all numbers gives them.

    Formula: N = Σ n_i, mean = Σ n_i m_i / N, spread² = (Σ (n_i − 1) s_i² + Σ n_i (m_i − mean)²) / (N − 1).
    NaN where the mean or the spread of a part is not known; parts without numbers say nothing.
    Cost: linear in the parts.
    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    1979.

    Args:
        parts: of numbers that are in one part only.

    Examples:
        >>> pooled([Moments(2, 1.0, 0.0), Moments(2, 3.0, 0.0)])
        Moments(number=4, mean=2.0, spread=1.1547005383792515)
    """
    there = [part for part in parts if part.number]
    count = sum(part.number for part in there)
    if not there:
        return Moments(0, math.nan)
    mean = weighted_mean([(part.number, part.mean) for part in there])
    if count < 2:
        return Moments(count, mean)
    within = sum((part.number - 1) * part.spread**2 for part in there if part.number > 1)
    between = sum(part.number * (part.mean - mean) ** 2 for part in there)
    return Moments(count, mean, math.sqrt((within + between) / (count - 1)))


def weighted_mean(parts: Sequence[tuple[int | float, int | float]]) -> float:
    """The mean of numbers that stand for several; NaN where one of them is, or they stand for none.

    Args:
        parts: pairs of a weight and a number; those of weight 0 are left out.

    Examples:
        >>> weighted_mean([(1, 2.0), (3, 4.0), (0, float("nan"))])
        3.5
    """
    there = [(weight, number) for weight, number in parts if weight]
    total = sum(weight for weight, _ in there)
    return sum(weight * number for weight, number in there) / total if there else math.nan


def by_key(parts: Sequence[Sequence[R]], key: Callable[[R], Key]) -> list[list[R]]:
    """The records of the same thing together, in the order of the first part that has it.

    Records of one part with the same key are told apart by their turn: a mixer may run twice in a block.

    Args:
        parts: the records of each part.
        key: what a record is of.

    Examples:
        >>> by_key([["a", "b", "a"], ["b", "a", "a"]], lambda name: (name,))
        [['a', 'a'], ['b', 'b'], ['a', 'a']]
    """
    groups: dict[Key, list[R]] = {}
    for records in parts:
        turns: Counter[Key] = Counter()
        for record in records:
            of = key(record)
            groups.setdefault((*of, turns[of]), []).append(record)
            turns[of] += 1
    return list(groups.values())
