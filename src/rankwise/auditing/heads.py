"""Running numbers of every head, from captured mixers to records."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankwise._internals.forward import Batch
from rankwise.auditing.merge_records import Merging
from rankwise.auditing.mixer_kinds import mixer_kind
from rankwise.auditing.nulls import BAND, thresholds
from rankwise.auditing.numbers import (
    AVERAGED,
    COLUMNS,
    ERRORS,
    RANKS_AT,
    WAYS,
    Floats,
    Measured,
    Method,
    column_at,
    measured,
)
from rankwise.auditing.pictures import PictureTaker
from rankwise.auditing.records import HeadRecord, RankAt
from rankwise.auditing.single_sequences import SingleSequences
from rankwise.auditing.site_keys import HeadKey, SiteKey, SiteKeys
from rankwise.auditing.token_names import TokenNames
from rankwise.auditing.widths import HeadMoments, RunningWidth, moments_of
from rankwise.errors import ShapeError
from rankwise.operators import sample_channels
from rankwise.tracing import MixerSite

MANY_HEADS = 128
"""State-space mixers with more matrices than this have one for every channel …"""
MAX_CHANNELS = 16
"""… of which so many are measured, spread evenly, by a fixed seed."""
SIGMA = COLUMNS.index("sigma_max")
WHOLE = [COLUMNS.index(column_at(name, step)) for name in RANKS_AT for step in range(len(BAND))]
"""Numbers that may not be known of a sequence: a mean over the others would be biased, and is not taken."""

ENDS = [
    [COLUMNS.index(column_at(end, step)) for end in ("rank_low", "rank_high")] for step in range(len(BAND))
]
"""Where the least and the most rank stand at each threshold."""


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


@dataclass
class SiteHeads:
    """What is known so far of the heads of one call of one mixer."""

    key: SiteKey
    kind: str
    moments: RunningMoments
    distances: RunningMoments
    nonfinite: Floats
    logits: RunningWidth = field(default_factory=RunningWidth)
    shown: SingleSequences = field(default_factory=SingleSequences)
    channels: list[int] = field(default_factory=list)
    """The numbers of the heads: not all of them where there are thousands."""
    ranks: list[Floats] | None = None
    """Of each sequence the least and the most rank at each threshold, (H, 5, 2), for a baseline."""

    def check_heads(self, heads: int) -> None:
        """Refuse another number of heads than before."""
        if heads != len(self.nonfinite):
            raise ShapeError(
                f"heads of {self.key.site!r}",
                expected=f"{len(self.nonfinite)}, as in the batches before",
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


class HeadTable:
    """Takes mixers as they are captured and keeps running numbers of every head.

    Args:
        delta: threshold of the numerical rank.
        method: how ranks are taken.
        names: what tokens are called.
        pictures: keeps pictures of matrices, where they are asked for.
        each_sequence: whether the ranks of each sequence are kept, to be held against a baseline.
    """

    def __init__(
        self,
        delta: float,
        method: Method = "auto",
        names: TokenNames | None = None,
        pictures: PictureTaker | None = None,
        each_sequence: bool = False,
    ) -> None:
        self.delta, self.method, self.pictures = delta, method, pictures
        self.each_sequence = each_sequence
        self.names = names or TokenNames()
        self.notes: dict[str, None] = {}
        """What was measured in part, once each."""
        self._sites: dict[SiteKey, SiteHeads] = {}
        self._keys = SiteKeys()
        self._pending: list[Callable[[], None]] = []

    def add(
        self, site: MixerSite, picture: tuple[int, int] | None = None, batch: Batch | None = None
    ) -> None:
        """Measure every head and sequence of a captured mixer; `commit` takes the numbers into the means.

        Args:
            site: the mixer.
            picture: height and width of what the model was given, where that is pictures.
            batch: what the model was given, to name its tokens.
        """
        key = self._keys.of(site)
        windows = max(1, site.operator.shape[0] // max(site.sequences, 1))
        channels = list(range(site.operator.shape[-3]))
        if mixer_kind(site.kind).state_space and len(channels) > MANY_HEADS:
            sampled = sample_channels(site.operator, MAX_CHANNELS)
            self.notes[f"{MAX_CHANNELS} of the {len(channels)} channels of {site.kind} mixers"] = None
            site, channels = replace(site, operator=site.operator[:, sampled]), sampled.tolist()
        kind, numbers = site.kind, list(measured(site, self.delta, self.method))
        found = SingleSequences(picture=picture)
        found.peaks = self.names.peaks(site, batch, [window.peaks for window in numbers])
        if self.pictures is not None:
            before = len(self._sites[key].shown.pictures) if key in self._sites else 0
            found.pictures = self.pictures.take(site, channels, batch, before)
        moments = moments_of(site)
        self._pending.append(lambda: self._take(key, kind, channels, numbers, windows, found))
        self._pending.append(lambda: self._sites[key].logits.add(moments))

    def _take(
        self,
        key: SiteKey,
        kind: str,
        channels: list[int],
        numbers: list[Measured],
        windows: int,
        found: SingleSequences,
    ) -> None:
        known, heads = self._sites.get(key), len(channels)
        if known is None:
            moments, distances = RunningMoments((heads, len(COLUMNS))), RunningMoments((heads, heads))
            known = SiteHeads(key, kind, moments, distances, np.zeros(heads), channels=channels)
            known.ranks = [] if self.each_sequence else None
            self._sites[key] = known
        known.check_heads(heads)
        known.shown.add(numbers, found)
        for start in range(0, len(numbers), windows):
            known.add(numbers[start : start + windows])

    def commit(self) -> None:
        """A batch is done: take its numbers into the means."""
        for take in self._pending:
            take()
        self._pending.clear()

    def discard(self) -> None:
        """A batch failed midway: forget its numbers."""
        self._pending.clear()

    def channels(self, key: SiteKey) -> list[int]:
        """The heads of a mixer that were measured: not all of them where there are thousands.

        Args:
            key: of the mixer.
        """
        known = self._sites.get(key)
        return [] if known is None else known.channels

    def known(self) -> Iterator[tuple[HeadKey, HeadRecord, Floats]]:
        """Each head with the ranks of its sequences (N, 5, 2), where those are kept."""
        for site in self._sites.values():
            ranks = np.stack(site.ranks) if site.ranks else np.empty((0, len(site.channels), len(BAND), 2))
            for at, record in enumerate(_records(site, self.delta)):
                yield (*site.key, record.head), record, ranks[:, at]

    def moments(self) -> HeadMoments:
        """Second moments of the queries and keys of each head, in the order of `records`."""
        return [head for site in self._sites.values() for head in site.logits.of_heads(len(site.channels))]

    def records(self, known: Mapping[HeadKey, Mapping[str, Any]] | None = None) -> list[HeadRecord]:
        """One record a head, in the order of the model.

        Args:
            known: fields that are known from elsewhere, by the key of their mixer and their number.
        """
        alone = Counter(site.key.pattern() for site in self._sites.values() if len(site.nonfinite) == 1)
        met: Counter[SiteKey] = Counter()
        out: list[HeadRecord] = []
        for site in self._sites.values():
            records = [
                head.model_copy(update=(known or {}).get((*site.key, head.head), {}))
                for head in _records(site, self.delta)
            ]
            together = site.key.pattern()
            if len(records) == 1 and alone[together] > 1:  # a list of modules with one head each
                records = [records[0].model_copy(update={"site": together.site, "head": met[together]})]
                met[together] += 1
            out.extend(records)
        return out


def mean_of_known(group: Floats) -> Floats:
    """Mean over the first axis, NaN left out; NaN where all are.

    Args:
        group: the numbers.
    """
    known = ~np.isnan(group)
    total = np.where(known, group, 0.0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _rank_at(threshold: float, step: int, numbers: dict[str, float]) -> RankAt:
    null = numbers["hardmax_rank"] if threshold <= 1 else math.nan
    found = {name: numbers[column_at(name, step)] for name in RANKS_AT}
    return RankAt(delta=threshold, hardmax_rank=null, **found)


def _records(site: SiteHeads, delta: float) -> Iterator[HeadRecord]:
    count, mean, spread = site.moments.count, site.moments.mean.copy(), site.moments.spread.copy()
    for moment in (mean, spread):
        moment[:, WHOLE] = np.where(count[:, WHOLE] < count[:, [SIGMA]], np.nan, moment[:, WHOLE])
    distance = site.distances.mean.copy()
    np.fill_diagonal(distance, np.nan)
    needed = site.logits.needed(len(mean))
    for head in range(mean.shape[0]):
        numbers = dict(zip(COLUMNS, map(float, mean[head]), strict=True))
        sequences = int(count[head, SIGMA])
        estimated, fallbacks = (round(numbers[way] * sequences) if sequences else 0 for way in WAYS)
        nearest = None if np.isnan(distance[head]).all() else int(np.nanargmin(distance[head]))
        averages: dict[str, Any] = {name: numbers[name] for name in AVERAGED}
        other = None if nearest is None else site.channels[nearest]
        yield HeadRecord(
            stack=site.key.stack,
            site=site.key.site,
            layer=site.key.layer,
            head=site.channels[head],
            kind=site.kind,
            cross=site.key.cross,
            sequences=sequences,
            nonfinite=int(site.nonfinite[head]),
            estimated=estimated,
            fallbacks=fallbacks,
            band=[_rank_at(threshold, step, numbers) for step, threshold in enumerate(thresholds(delta))],
            nearest_head=other,
            width=site.logits.width,
            required_head_dim=float(needed[head]),
            nearest_distance=np.nan if nearest is None else float(distance[head, nearest]),
            spread={name: float(spread[head, at]) for at, name in enumerate(AVERAGED) if at > 2},
            stderr={name: numbers[f"stderr of {name}"] for name in ERRORS} if estimated else {},
            importance=None,
            baseline=None,
            merging=Merging(
                known={
                    name: int(count[head, at])
                    for at, name in enumerate(COLUMNS)
                    if at not in WHOLE and 0 < count[head, at] < sequences
                },
                distances=distance[head].tolist(),
                pairs=site.distances.count[head].astype(int).tolist(),
                **site.shown.merging(head),
            ),
            **averages | site.shown.shown(head),
        )
