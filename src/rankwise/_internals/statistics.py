"""Statistics without torch: moments that can be merged, Student's t, and constants."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankwise.errors import in_range

Floats = NDArray[np.float64]

DELTA = 1e-2
"""Default threshold δ: singular values ≥ δ count in the numerical rank, and ≥ δ·σ_max in the relative rank.
With the smaller threshold eps·σ_max, rounding errors in the dtype of the matrix would be counted."""
WIDTH_TOLERANCE = 0.01
"""Default KL divergence in nats that `required_head_dim` allows between attention rows of old and new width.
By Pinsker's inequality, at most √(0.01/2) = 7 % of the attention weight in a row then moves."""


def check_delta(delta: float) -> None:
    """Raise InputError if a threshold is not finite and positive."""
    in_range("`delta`", delta, "(0, inf)", fix="δ is the smallest singular value that counts, such as 0.01.")


@dataclass
class Moments:
    """Count, mean and M2 = Σ (x − mean)² of a stream of arrays, for each array entry. NaN is skipped.

    An entry without values has mean 0. Results do not depend on the order of the arrays, up to rounding.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.

    Examples:
        >>> moments = Moments.empty(2)
        >>> moments.add(np.array([[1.0, np.nan], [3.0, np.nan]]))
        >>> count, mean, std = moments.to_record()
        >>> count.tolist(), mean.tolist()
        ([2.0, 0.0], [2.0, nan])
    """

    count: Floats
    mean: Floats
    m2: Floats

    @classmethod
    def empty(cls, *shape: int) -> "Moments":
        """Return moments with count 0, for arrays of the given shape."""
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape))

    def add(self, values: Floats) -> None:
        """Add N arrays, stacked along a new first axis: (N, *shape).

        A first pass computes the mean from differences to the first known value; a second pass computes M2.
        """
        if not len(values):
            return
        present = ~np.isnan(values)
        count = present.sum(0).astype(np.float64)
        first = np.take_along_axis(values, present.argmax(0)[None], axis=0)[0]
        first = np.where(count > 0, first, 0.0)
        # Differences of equal values are 0, so the mean of equal values is exact, even if they are infinite.
        offsets = np.subtract(values, first, where=present & (values != first), out=np.zeros_like(values))
        mean = first + offsets.sum(0) / np.maximum(count, 1)
        deviations = np.subtract(values, mean, where=present, out=np.zeros_like(values))
        self.merge(Moments(count, mean, np.square(deviations).sum(0)))

    def merge(self, other: "Moments") -> None:
        """Add other moments; the result is the same as if all arrays had been added to these moments."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        step = other.mean - self.mean
        self.mean = np.where(self.count > 0, self.mean + step * share, other.mean)
        self.m2 = np.where(self.count > 0, self.m2 + other.m2 + step**2 * self.count * share, other.m2)
        self.count = count

    def complete(self, number: int | Floats) -> "Moments":
        """Return moments in which mean and M2 are NaN for entries with fewer than ``number`` values."""
        missing = self.count < number
        return Moments(self.count, np.where(missing, np.nan, self.mean), np.where(missing, np.nan, self.m2))

    def to_record(self) -> tuple[Floats, Floats, Floats]:
        """Return count, mean and sample standard deviation (divisor n − 1). Undefined entries are NaN."""
        mean = np.where(self.count > 0, self.mean, np.nan)
        std = np.sqrt(self.m2 / np.maximum(self.count - 1, 1))
        return self.count, mean, np.where(self.count > 1, std, np.nan)

    @classmethod
    def from_record(cls, count: Floats, mean: Floats, std: Floats) -> "Moments":
        """Return moments from the three results of `to_record`; an entry with mean NaN gets count 0."""
        counted = np.where(np.isnan(mean), 0.0, count)
        m2 = np.where(counted > 1, (counted - 1) * np.square(std), 0.0)
        return cls(counted, np.where(counted > 0, mean, 0.0), m2)


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, by an expansion around the normal quantile.

    It is exact for 1 degree of freedom, 1 % too small for 2, and more accurate for more.
    Source: M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.7.5.

    Examples:
        >>> round(t_quantile(14), 3)
        2.145
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)  # a Cauchy distribution
    x, n = 1.959964, 4 * freedom
    terms = (
        (x**3 + x) / n,
        (5 * x**5 + 16 * x**3 + 3 * x) / (6 * n**2),
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (6 * n**3),
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / (360 * n**4),
    )
    return x + math.fsum(terms)


def mean(values: Iterable[int | float]) -> float:
    """Return the mean of the finite values. Return NaN if no value is finite.

    Examples:
        >>> mean([1.0, float("nan"), 3.0])
        2.0
    """
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
