"""Means and standard deviations of numbers of which some are not known."""

from dataclasses import dataclass, field

import numpy as np

from rankwise.audit.numbers import Floats


@dataclass
class RunningMoments:
    """Mean and standard deviation of a stream of arrays of one shape, entry by entry, NaN left out.

    Welford's update: one pass, no cancellation.

    Args:
        shape: shape of each array.
    """

    shape: tuple[int, ...]
    count: Floats = field(init=False)
    _mean: Floats = field(init=False)
    _squares: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.count = np.zeros(self.shape)
        self._mean = np.zeros(self.shape)
        self._squares = np.zeros(self.shape)

    def add(self, values: Floats) -> None:
        """Take one more array into account."""
        known = ~np.isnan(values)
        self.count += known
        step = np.where(known, values - self._mean, 0.0)
        self._mean += step / np.maximum(self.count, 1)
        self._squares += step * np.where(known, values - self._mean, 0.0)

    @property
    def mean(self) -> Floats:
        """Mean of what was not NaN; NaN where nothing was."""
        return np.where(self.count > 0, self._mean, np.nan)

    @property
    def spread(self) -> Floats:
        """Standard deviation (over n − 1); NaN below two values."""
        return np.where(self.count > 1, np.sqrt(self._squares / np.maximum(self.count - 1, 1)), np.nan)


def mean_of_known(group: Floats) -> Floats:
    """Mean over the first axis, NaN left out; NaN where all are.

    Args:
        group: the numbers.
    """
    known = ~np.isnan(group)
    total = np.where(known, group, 0.0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)
