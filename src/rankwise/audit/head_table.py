"""Every head of a model, from captured mixers to records."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from rankwise.audit.baseline_records import Baseline
from rankwise.audit.heads import HeadPlace, SiteHeads, SiteKey, head_records, with_baseline
from rankwise.audit.matrix_picture import MatrixPicture
from rankwise.audit.nulls import BAND
from rankwise.audit.numbers import AVERAGING, COLUMNS, Floats, Measured, Method, measured
from rankwise.audit.pictures import PictureTaker
from rankwise.audit.records import HeadRecord
from rankwise.audit.running_moments import RunningMoments
from rankwise.audit.token_names import TokenNames
from rankwise.audit.worth_records import HeadWorth
from rankwise.capture import MixerSite
from rankwise.operators import sampled_channels
from rankwise.running import Batch

MANY_HEADS = 128
"""State-space mixers with more matrices than this have one for every channel …"""
MAX_CHANNELS = 16
"""… of which so many are measured, spread evenly, by a fixed seed."""


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
        kept: dict[int, MatrixPicture] = {}
        if self.pictures is not None and key not in self._sites:
            kept = self.pictures.take(site, channels, batch)
        self._pending.append(lambda: self._take(key, kind, channels, numbers, windows, peaks, kept))

    def _take(
        self,
        key: SiteKey,
        kind: str,
        channels: list[int],
        numbers: list[Measured],
        windows: int,
        peaks: list[list[list[str]]],
        pictures: dict[int, MatrixPicture],
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
        known.pictures = known.pictures or pictures
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
            for at, record in enumerate(head_records(site, self.delta)):
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
                for head in head_records(site, self.delta)
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
