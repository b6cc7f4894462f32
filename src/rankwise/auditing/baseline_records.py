"""What an audit says of fresh weights: plain records, no torch."""

import math
from typing import Annotated

from pydantic import Field

from rankwise._internals.records import Count, Number, Record


class BaselineAt(Record):
    """The rank of a head at fresh weights at one threshold, and how far the model's own is from it.

    Differences are the model's rank less the fresh one, of one sequence and one seed at a time: what lengths
    and contents of sequences do to both is not in them.
    """

    delta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rank_low: Number
    """Mean over seeds and sequences; with ``rank_high`` an interval where ranks are estimated."""
    rank_high: Number
    std: Number
    """Standard deviation over seeds of the mean over sequences; NaN of one seed."""
    difference_low: Number
    """Mean difference at the near ends of the intervals, the least it can be …"""
    difference_high: Number
    """… and the most."""
    margin: Number
    """t·s: s the standard deviation of the differences over all pairs of a sequence and a seed, t the 97.5 %
    quantile of Student's t for them: a pair taken at random lies within it of the mean difference. NaN below
    three pairs or two seeds."""
    pairs: Count


class Baseline(Record):
    """The same measures of the same architecture at fresh weights, on the same data."""

    seeds: Count
    """Copies that gave finite numbers."""
    mean: dict[str, Number]
    """Over seeds, of means over sequences, under the name of each measure."""
    std: dict[str, Number]
    """Standard deviation over seeds; NaN of one seed."""
    spread: dict[str, Number]
    """Standard deviation over sequences, the mean over seeds."""
    band: list[BaselineAt] = Field(default_factory=list)
    """Of heads: at the thresholds of the head's own ``band``."""
    spectrum: list[Number] = Field(default_factory=list)
    """Of heads: singular values of the first sequence, those of the head's own ``spectrum``; means over
    seeds."""

    @property
    def judged(self) -> bool:
        """Whether its spread is known, so that a head can be above or below it."""
        return bool(self.band) and all(math.isfinite(point.margin) for point in self.band)


class BaselineRecord(Record):
    """How the baseline of an audit was made."""

    seeds: list[Count]
    """Of the copies that were audited."""
    built: str
    """How the copies came to their weights."""

    def __str__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        name = "seeds" if len(self.seeds) > 1 else "seed"
        return f"the same architecture at fresh weights, built {self.built}, on the same data, {name} {seeds}"
