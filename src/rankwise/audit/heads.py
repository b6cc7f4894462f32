"""The heads of a mixer: running numbers over sequences, and the records made of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankwise.audit.baseline_records import Baseline
from rankwise.audit.masks import Pattern
from rankwise.audit.matrix_picture import MatrixPicture
from rankwise.audit.measures import HEAD_MEASURES
from rankwise.audit.nulls import BAND, thresholds
from rankwise.audit.numbers import (
    AVERAGED,
    COLUMNS,
    ERRORS,
    RANKS_AT,
    WAYS,
    Floats,
    Measured,
    column_at,
)
from rankwise.audit.records import HeadRecord, RankAt
from rankwise.audit.running_moments import RunningMoments, mean_of_known
from rankwise.audit.token_names import commonest
from rankwise.errors import ShapeError

SIGMA = COLUMNS.index("sigma_max")
WHOLE = [COLUMNS.index(column_at(name, step)) for name in RANKS_AT for step in range(len(BAND))]
"""Numbers that may not be known of a sequence: a mean over the others would be biased, and is not taken."""

ENDS = [
    [COLUMNS.index(column_at(end, step)) for end in ("rank_low", "rank_high")] for step in range(len(BAND))
]
"""Where the least and the most rank stand at each threshold."""


class SiteKey(NamedTuple):
    """What tells one mixer of a forward pass from another."""

    stack: str
    layer: int
    site: str
    cross: bool
    occurrence: int
    """From 0, where the same mixer runs more than once in a block."""


NUMERICAL_RANK = next(measure for measure in HEAD_MEASURES if measure.name == "numerical_rank")
HeadPlace = tuple[Any, ...]
"""A `SiteKey`, and the number of the head."""


def with_baseline(record: HeadRecord, baseline: Baseline | None) -> HeadRecord:
    """The record with what the same head is at fresh weights; itself where that is not known.

    Args:
        record: of the head.
        baseline: of it.
    """
    if baseline is None:
        return record
    said = {
        "fresh_numerical_rank": baseline.mean[NUMERICAL_RANK.shown_field(record)],
        "fresh_effective_rank": baseline.mean["effective_rank"],
    }
    return record.model_copy(update={"baseline": baseline, **said})


@dataclass
class SiteHeads:
    """What is known so far of the heads of one call of one mixer."""

    key: SiteKey
    kind: str
    moments: RunningMoments
    distances: RunningMoments
    nonfinite: Floats
    patterns: list[Pattern] = field(default_factory=list)
    longest: int = 0
    spectra: list[list[float]] = field(default_factory=list)
    maps: list[list[float]] = field(default_factory=list)
    picture: tuple[int, int] | None = None
    """Height and width of what the model was given, where that is pictures."""
    channels: list[int] = field(default_factory=list)
    """The numbers of the heads: not all of them where there are thousands."""
    peaks: list[list[list[str]]] = field(default_factory=list)
    """What the token at the peak of each head is called, sequence by sequence."""
    pictures: dict[int, MatrixPicture] = field(default_factory=dict)
    """By the place of the head."""
    ranks: list[Floats] | None = None
    """Of each sequence the least and the most rank at each threshold, (H, 5, 2), for a baseline."""

    def check_heads(self, heads: int) -> None:
        """Refuse another number of heads than before."""
        if heads != len(self.nonfinite):
            raise ShapeError(
                f"heads of {self.key.site!r}",
                wanted=f"{len(self.nonfinite)}, as in the batches before",
                got=str(heads),
                fix="Audit batches for which the model changes its heads one by one.",
            )

    def add(self, windows: list["Measured"]) -> None:
        """Take one sequence into the means: the mean over its windows."""
        group = np.stack([window.values for window in windows])
        broken = np.isnan(group[:, :, SIGMA]).any(0)
        self.nonfinite += broken
        mean = mean_of_known(group)
        mean[:, WHOLE] = np.where(np.isnan(group[:, :, WHOLE]).any(0), np.nan, mean[:, WHOLE])
        mean[broken] = np.nan
        self.moments.add(mean)
        if self.ranks is not None:
            self.ranks.append(mean[:, ENDS])
        self.distances.add(mean_of_known(np.stack([window.distances for window in windows])))


def patch_grid(tokens: int, picture: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of patches of the shape of their picture; None where tokens are no such grid.

    Args:
        tokens: how many patches there are.
        picture: height and width of the picture.
    """
    if picture is None:
        return None
    height, width = picture
    rows = math.isqrt(tokens * height // width)
    whole = rows > 0 and tokens % rows == 0 and rows * rows * width == tokens * height
    return (rows, tokens // rows) if whole else None


def _map_grid(site: SiteHeads, head: int) -> tuple[int, int] | None:
    """Of a whole map: the first tokens of a longer sequence are no picture."""
    tokens = len(site.maps[head]) if site.maps else 0
    return patch_grid(tokens, site.picture) if 0 < tokens == site.longest else None


def _rank_at(threshold: float, step: int, numbers: dict[str, float]) -> RankAt:
    null = numbers["null_rank"] if threshold <= 1 else math.nan
    found = {name: numbers[column_at(name, step)] for name in RANKS_AT}
    return RankAt(delta=threshold, null_rank=null, **found)


def head_records(site: SiteHeads, delta: float) -> Iterator[HeadRecord]:
    """A record of each head.

    Args:
        site: the heads.
        delta: threshold of the numerical rank.
    """
    count, mean, spread = site.moments.count, site.moments.mean.copy(), site.moments.spread
    mean[:, WHOLE] = np.where(count[:, WHOLE] < count[:, [SIGMA]], np.nan, mean[:, WHOLE])
    distance = site.distances.mean.copy()
    np.fill_diagonal(distance, np.nan)
    for head in range(mean.shape[0]):
        numbers = dict(zip(COLUMNS, map(float, mean[head]), strict=True))
        sequences = int(count[head, SIGMA])
        estimated, fallbacks = (round(numbers[way] * sequences) if sequences else 0 for way in WAYS)
        nearest = None if np.isnan(distance[head]).all() else int(np.nanargmin(distance[head]))
        other = None if nearest is None else site.channels[nearest]
        peak, agreeing = commonest([names[head] for names in site.peaks if names[head]])
        yield HeadRecord(
            stack=site.key.stack,
            site=site.key.site,
            layer=site.key.layer,
            head=site.channels[head],
            kind=site.kind,
            mask=site.patterns[head].name if site.patterns else "full",
            cross=site.key.cross,
            sequences=sequences,
            nonfinite=int(site.nonfinite[head]),
            estimated=estimated,
            fallbacks=fallbacks,
            band=[_rank_at(threshold, step, numbers) for step, threshold in enumerate(thresholds(delta))],
            membership_map=site.maps[head] if site.maps else [],
            membership_grid=_map_grid(site, head),
            nearest_head=other,
            nearest_distance=np.nan if nearest is None else float(distance[head, nearest]),
            spread={name: float(spread[head, at]) for at, name in enumerate(AVERAGED) if at > 2},
            stderr={name: numbers[f"stderr of {name}"] for name in ERRORS} if estimated else {},
            spectrum=site.spectra[head] if site.spectra else [],
            worth=None,
            baseline=None,
            peak_token=peak,
            peak_token_sequences=agreeing,
            picture=site.pictures.get(head),
            **{name: numbers[name] for name in AVERAGED},
        )
