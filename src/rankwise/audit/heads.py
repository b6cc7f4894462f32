"""Running numbers of every head, from captured mixers to records."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rankwise.audit.baseline_records import Baseline
from rankwise.audit.masks import Pattern
from rankwise.audit.matrix_picture import MatrixPicture
from rankwise.audit.measures import HEAD_MEASURES
from rankwise.audit.merge_records import Merging, most_common
from rankwise.audit.nulls import BAND, thresholds
from rankwise.audit.numbers import (
    AVERAGED,
    AVERAGING,
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
from rankwise.audit.pictures import PictureTaker, patch_grid
from rankwise.audit.records import HeadRecord, RankAt
from rankwise.audit.running_moments import RunningMoments, mean_of_known
from rankwise.audit.token_names import TokenNames, commonest, name_counts
from rankwise.audit.widths import RunningWidth, moments_of
from rankwise.audit.worth_records import HeadWorth
from rankwise.capture import MixerSite
from rankwise.errors import ShapeError
from rankwise.operators import sampled_channels
from rankwise.running import Batch

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
    logits: RunningWidth = field(default_factory=RunningWidth)
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
    pictures: list[dict[int, MatrixPicture]] = field(default_factory=list)
    """Of the first sequences, each by the place of the head."""
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
        self._picture: tuple[int, int] | None = None
        self.notes: dict[str, None] = {}
        """What was measured in part, once each."""
        self._sites: dict[SiteKey, SiteHeads] = {}
        self._calls: dict[tuple[int, str, int, str, bool], int] = {}
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
        key = SiteKey(site.stack, site.layer, site.name, site.cross, self._occurrence(site))
        windows = max(1, site.operator.shape[0] // max(site.sequences, 1))
        channels = list(range(site.operator.shape[-3]))
        if site.kind not in (*AVERAGING, "diagonal") and len(channels) > MANY_HEADS:
            sampled = sampled_channels(site.operator, MAX_CHANNELS)
            self.notes[f"{MAX_CHANNELS} of the {len(channels)} channels of {site.kind} mixers"] = None
            site, channels = replace(site, operator=site.operator[:, sampled]), sampled.tolist()
        self._picture = picture
        kind, numbers = site.kind, list(measured(site, self.delta, self.method))
        peaks = self.names.peaks(site, batch, [window.peaks for window in numbers])
        kept: list[dict[int, MatrixPicture]] = []
        if self.pictures is not None:
            before = len(self._sites[key].pictures) if key in self._sites else 0
            kept = self.pictures.take(site, channels, batch, before)
        moments = moments_of(site)
        self._pending.append(lambda: self._take(key, kind, channels, numbers, windows, peaks, kept))
        self._pending.append(lambda: self._sites[key].logits.add(moments))

    def _take(
        self,
        key: SiteKey,
        kind: str,
        channels: list[int],
        numbers: list[Measured],
        windows: int,
        peaks: list[list[list[str]]],
        pictures: list[dict[int, MatrixPicture]],
    ) -> None:
        known, heads = self._sites.get(key), len(channels)
        if known is None:
            moments, distances = RunningMoments((heads, len(COLUMNS))), RunningMoments((heads, heads))
            known = SiteHeads(key, kind, moments, distances, np.zeros(heads), channels=channels)
            known.ranks = [] if self.each_sequence else None
            self._sites[key] = known
        known.check_heads(heads)
        for window in numbers:
            if window.values[0, 0] > known.longest:
                known.longest, known.patterns = int(window.values[0, 0]), window.patterns
            known.spectra = known.spectra or window.spectra
            known.maps = known.maps or window.maps
        known.picture = self._picture
        known.peaks += peaks
        known.pictures += pictures
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

    def known(self) -> Iterator[tuple[HeadPlace, HeadRecord, Floats]]:
        """Each head with the ranks of its sequences (N, 5, 2), where those are kept."""
        for site in self._sites.values():
            ranks = np.stack(site.ranks) if site.ranks else np.empty((0, len(site.channels), len(BAND), 2))
            for at, record in enumerate(_records(site, self.delta)):
                yield (*site.key, record.head), record, ranks[:, at]

    def records(
        self,
        worths: Mapping[HeadPlace, HeadWorth] | None = None,
        baselines: Mapping[HeadPlace, Baseline] | None = None,
    ) -> list[HeadRecord]:
        """One record a head, in the order of the model.

        Args:
            worths: what heads are worth, by the key of their mixer and their number.
            baselines: what they are at fresh weights, likewise.
        """
        alone = Counter(_pattern_of(site) for site in self._sites.values() if len(site.nonfinite) == 1)
        met: Counter[SiteKey] = Counter()
        out: list[HeadRecord] = []
        for site in self._sites.values():
            records = [
                with_baseline(
                    _with_worth(head, site.key, worths or {}), (baselines or {}).get((*site.key, head.head))
                )
                for head in _records(site, self.delta)
            ]
            together = _pattern_of(site)
            if len(records) == 1 and alone[together] > 1:  # a list of modules with one head each
                records = [records[0].model_copy(update={"site": together.site, "head": met[together]})]
                met[together] += 1
            out.extend(records)
        return out

    def _occurrence(self, site: MixerSite) -> int:
        """Which call of the same mixer in the same layer of one forward pass this is."""
        key = (site.run, site.stack, site.layer, site.name, site.cross)
        self._calls = {call: count for call, count in self._calls.items() if call[0] == site.run}
        self._calls[key] = self._calls.get(key, -1) + 1
        return self._calls[key]


def _with_worth(record: HeadRecord, key: SiteKey, worths: Mapping[HeadPlace, HeadWorth]) -> HeadRecord:
    worth = worths.get((*key, record.head))
    if worth is None:
        return record
    return record.model_copy(update={"worth": worth, "removal_cost": worth.cost})


def _pattern_of(site: SiteHeads) -> SiteKey:
    """The key with ``*`` for the last number of its name: what heads kept as a list have in common."""
    return site.key._replace(site=re.sub(r"\d+(?=\D*$)", "*", site.key.site))


def _map_grid(site: SiteHeads, head: int) -> tuple[int, int] | None:
    """Of a whole map: the first tokens of a longer sequence are no picture."""
    tokens = len(site.maps[head]) if site.maps else 0
    return patch_grid(tokens, site.picture) if 0 < tokens == site.longest else None


def _rank_at(threshold: float, step: int, numbers: dict[str, float]) -> RankAt:
    null = numbers["null_rank"] if threshold <= 1 else math.nan
    found = {name: numbers[column_at(name, step)] for name in RANKS_AT}
    return RankAt(delta=threshold, null_rank=null, **found)


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
        other = None if nearest is None else site.channels[nearest]
        named = [names[head] for names in site.peaks if names[head]]
        peak, agreeing = commonest(name_counts(named), len(named))
        pictures = [taken.get(head) for taken in site.pictures] + [None, None]
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
            width=site.logits.width,
            needed_width=float(needed[head]),
            nearest_distance=np.nan if nearest is None else float(distance[head, nearest]),
            spread={name: float(spread[head, at]) for at, name in enumerate(AVERAGED) if at > 2},
            stderr={name: numbers[f"stderr of {name}"] for name in ERRORS} if estimated else {},
            spectrum=site.spectra[head] if site.spectra else [],
            worth=None,
            baseline=None,
            merging=Merging(
                longest=site.longest,
                known={
                    name: int(count[head, at])
                    for at, name in enumerate(COLUMNS)
                    if at not in WHOLE and 0 < count[head, at] < sequences
                },
                distances=distance[head].tolist(),
                pairs=site.distances.count[head].astype(int).tolist(),
                named=len(named),
                names=most_common(name_counts(named)),
            ),
            peak_token=peak,
            peak_token_sequences=agreeing,
            picture=pictures[0],
            second_picture=pictures[1],
            **{name: numbers[name] for name in AVERAGED},
        )
