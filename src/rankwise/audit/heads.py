"""From a captured mixer to numbers: one head of one sequence at a time, padding left out."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise import measures
from rankwise.audit.accumulate import Floats, RunningMoments
from rankwise.audit.records import HeadRecord
from rankwise.capture import MixerSite
from rankwise.errors import ShapeError
from rankwise.operators import SoftmaxMixing
from rankwise.theory import NullRank, interpolated_null_rank, rank_barrier

HEAD_MEASURES = (
    "tokens",
    "sources",
    "numerical_rank",
    "effective_rank",
    "stable_rank",
    "sigma_max",
    "row_entropy",
    "sink_mass",
    "peak_mass",
    "row_distance",
    "identity_distance",
    "null_rank",
)
SPECTRUM_POINTS = 64
"""Singular values kept of a head, for its picture."""
MATRIX_BYTES = 2**28
"""Float64 matrices formed at once: 256 MiB hold four heads at T = 2,896; small heads go together."""

UNKNOWN = NullRank(math.nan, math.nan, 0)

MaskName = Literal["full", "causal", "window", "other"]


class Pattern(NamedTuple):
    """What rows may see."""

    name: MaskName
    base: str = ""
    """Of a window: "full" or "causal"."""
    window: int | None = None


class SiteKey(NamedTuple):
    """What tells one mixer of a forward pass from another."""

    stack: str
    layer: int
    site: str
    cross: bool
    occurrence: int
    """From 0, where the same mixer runs more than once in a block."""


@dataclass
class SiteHeads:
    """What is known so far of the heads of one call of one mixer."""

    key: SiteKey
    kind: str
    moments: RunningMoments
    distances: RunningMoments
    nonfinite: Floats
    width: int | None = None
    """K, where the operator is made from queries and keys."""
    scale: float | None = None
    patterns: list[Pattern] = field(default_factory=list)
    longest: int = 0
    spectra: list[list[float]] = field(default_factory=list)

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
        group = np.stack([one.values for one in windows])
        broken = np.isnan(group[:, :, HEAD_MEASURES.index("sigma_max")]).any(0)
        self.nonfinite += broken
        mean = _mean(group)
        mean[broken] = np.nan
        self.moments.add(mean)
        self.distances.add(_mean(np.stack([one.distances for one in windows])))


class Measured(NamedTuple):
    """The heads of one mixer on one sequence or window."""

    values: Floats
    """(H, measures)."""
    distances: Floats
    """(H, H)."""
    patterns: list[Pattern]
    """Of each head."""
    spectra: list[list[float]]


class HeadTable:
    """Takes mixers as they are captured and keeps running numbers of every head.

    Args:
        delta: threshold of the numerical rank.
    """

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self._sites: dict[SiteKey, SiteHeads] = {}
        self._calls: dict[tuple[int, str, int, str, bool], int] = {}
        self._pending: list[Callable[[], None]] = []

    def add(self, site: MixerSite) -> None:
        """Measure every head and sequence of a captured mixer; `commit` takes the numbers into the means."""
        key = SiteKey(site.stack, site.layer, site.name, site.cross, self._occurrence(site))
        windows = max(1, site.operator.shape[0] // max(site.sequences, 1))
        operator = site.operator
        width = operator.query.shape[-1] if isinstance(operator, SoftmaxMixing) else None
        scale = operator.scale if isinstance(operator, SoftmaxMixing) else None
        heads, kind, numbers = operator.shape[-3], site.kind, list(measured(site, self.delta))
        self._pending.append(lambda: self._take(key, kind, heads, width, scale, numbers, windows))

    def _take(
        self,
        key: SiteKey,
        kind: str,
        heads: int,
        width: int | None,
        scale: float | None,
        numbers: list[Measured],
        windows: int,
    ) -> None:
        known = self._sites.get(key)
        if known is None:
            moments = RunningMoments((heads, len(HEAD_MEASURES)))
            known = SiteHeads(
                key, kind, moments, RunningMoments((heads, heads)), np.zeros(heads), width, scale
            )
            self._sites[key] = known
        known.check_heads(heads)
        for one in numbers:
            if one.values[0, 0] > known.longest:
                known.longest, known.patterns = int(one.values[0, 0]), one.patterns
            known.spectra = known.spectra or one.spectra
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

    def records(self) -> list[HeadRecord]:
        """One record a head, in the order of the model."""
        alone = Counter(_pattern_of(site) for site in self._sites.values() if len(site.nonfinite) == 1)
        met: Counter[SiteKey] = Counter()
        out: list[HeadRecord] = []
        for site in self._sites.values():
            records = list(_records(site, self.delta))
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


def measured(site: MixerSite, delta: float) -> Iterator[Measured]:
    """For each sequence (or window) of a mixer: numbers, distances, mask and spectra of its heads."""
    operator = site.operator
    batch, heads, tokens, sources = operator.shape
    at_once = max(1, MATRIX_BYTES // (8 * heads * tokens * sources))
    for start in range(0, batch, at_once):
        index = slice(start, min(start + at_once, batch))
        rows, columns = site.valid_tokens[index], site.valid_sources[index]
        part = operator[index]
        dense, support = part.dense(torch.float64), part.support()
        if bool(rows.all()) and bool(columns.all()):
            yield from _measure(dense, support, delta)
            continue
        for at in range(dense.shape[0]):  # sequences of their own lengths
            keep_rows, keep_columns = rows[at], columns[at]
            matrix = dense[at : at + 1][:, :, keep_rows][..., keep_columns]
            if 0 in matrix.shape:
                nothing = np.full((heads, len(HEAD_MEASURES)), np.nan)
                yield Measured(nothing, np.full((heads, heads), np.nan), [Pattern("full")] * heads, [])
            else:
                seen = support[at : at + 1][:, :, keep_rows][..., keep_columns]
                yield from _measure(matrix, seen, delta)


def _measure(
    dense: Float64[Tensor, "B H T S"], support: Bool[Tensor, "B H T S"], delta: float
) -> Iterator[Measured]:
    batch, heads, tokens, sources = dense.shape
    ranks = measures.rank_summary(dense, delta)
    if bool((support == support[:, :1]).all()):  # the heads see alike: once is enough
        support = support[:, :1]
    null = rank_barrier(tokens, mask=support, sources=sources)
    full = dense.new_ones(batch, heads)
    columns = (
        full * tokens,
        full * sources,
        ranks.numerical_rank,
        ranks.effective_rank,
        ranks.stable_rank,
        ranks.sigma_max,
        measures.row_entropy(dense),
        measures.sink_mass(dense),
        measures.peak_mass(dense),
        measures.row_distance(dense),
        measures.identity_distance(dense),
        null.to(full) * full,
    )
    values = torch.stack(columns, dim=-1).cpu().numpy()
    distances = measures.head_distance(dense).cpu().numpy()
    patterns = [[mask_pattern(head) for head in one] * (heads // support.shape[1]) for one in support]
    sigma = ranks.singular_values
    kept = torch.linspace(0, sigma.shape[-1] - 1, min(SPECTRUM_POINTS, sigma.shape[-1])).round().long()
    spectra = sigma[..., kept.to(sigma.device)].cpu()
    for at in range(batch):
        yield Measured(values[at], distances[at], patterns[at], _rounded(spectra[at]))


def mask_pattern(support: Bool[Tensor, "T S"]) -> Pattern:
    """Name what rows may see: everything, all up to themselves, a band, or something else."""
    if bool(support.all()):
        return Pattern("full")
    rows, columns = support.nonzero(as_tuple=True)
    if rows.numel() == 0:
        return Pattern("other")
    offset = columns - rows
    grid = torch.arange(support.shape[1], device=support.device) - torch.arange(
        support.shape[0], device=support.device
    ).unsqueeze(1)
    if torch.equal(support, grid <= support.shape[1] - support.shape[0]):
        return Pattern("causal")
    first, last = int(offset.min()), int(offset.max())
    if not torch.equal(support, (grid >= first) & (grid <= last)):
        return Pattern("other")
    base = {0: "causal", -first: "full"}.get(last, "")
    return Pattern("window", base, 1 - first)


def _pattern_of(site: SiteHeads) -> SiteKey:
    """The key with ``*`` for the last number of its name: what heads kept as a list have in common."""
    return site.key._replace(site=re.sub(r"\d+(?=\D*$)", "*", site.key.site))


def _mean(group: Floats) -> Floats:
    """Mean over windows, NaN left out; NaN where all are."""
    known = ~np.isnan(group)
    total = np.where(known, group, 0.0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _rounded(spectra: Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in head] for head in spectra.tolist()]


def random_rank(site: SiteHeads, head: int, tokens: float, sources: float, delta: float) -> NullRank:
    """What random queries and keys give at the mean length, or NaN where that is not known."""
    name, base, window = site.patterns[head] if site.patterns else Pattern("other")
    mask = base if name == "window" else name
    if site.width is None or not site.scale or site.scale <= 0 or mask not in ("full", "causal"):
        return UNKNOWN
    if math.isnan(tokens):
        return UNKNOWN
    square = round(tokens) == round(sources)
    if mask == "causal" and not square:
        return UNKNOWN
    return interpolated_null_rank(
        max(1, round(tokens)),
        site.width,
        mask,
        window,
        temperature=1 / site.scale,
        delta=delta,
        sources=None if square else max(1, round(sources)),
    )


def _records(site: SiteHeads, delta: float) -> Iterator[HeadRecord]:
    mean, spread = site.moments.mean, site.moments.spread
    distance = site.distances.mean.copy()
    np.fill_diagonal(distance, np.nan)
    rank_at = HEAD_MEASURES.index("numerical_rank")
    for head in range(mean.shape[0]):
        null = random_rank(site, head, mean[head, 0], mean[head, 1], delta)
        nearest = None if np.isnan(distance[head]).all() else int(np.nanargmin(distance[head]))
        yield HeadRecord(
            stack=site.key.stack,
            site=site.key.site,
            layer=site.key.layer,
            head=head,
            kind=site.kind,
            mask=site.patterns[head].name if site.patterns else "full",
            cross=site.key.cross,
            sequences=int(site.moments.count[head, HEAD_MEASURES.index("sigma_max")]),
            nonfinite=int(site.nonfinite[head]),
            random_rank=null.mean,
            z_score=(float(mean[head, rank_at]) - null.mean) / null.std if null.std > 0 else np.nan,
            nearest_head=nearest,
            nearest_distance=np.nan if nearest is None else float(distance[head, nearest]),
            spread={name: float(spread[head, at]) for at, name in enumerate(HEAD_MEASURES) if at > 1},
            spectrum=site.spectra[head] if site.spectra else [],
            **{name: float(mean[head, at]) for at, name in enumerate(HEAD_MEASURES)},
        )
