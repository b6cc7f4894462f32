"""From a captured mixer to numbers: one head of one sequence at a time, padding left out."""

from collections.abc import Iterator
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
from rankwise.theory import rank_barrier

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

MaskName = Literal["full", "causal", "window", "other"]


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
    mask: MaskName = "full"
    longest: int = 0
    spectra: list[list[float]] = field(default_factory=list)


class HeadTable:
    """Takes mixers as they are captured and keeps running numbers of every head.

    Args:
        delta: threshold of the numerical rank.
    """

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self._sites: dict[SiteKey, SiteHeads] = {}
        self._calls: dict[tuple[int, str, int, str, bool], int] = {}

    def add(self, site: MixerSite) -> None:
        """Measure every head and sequence of one captured mixer."""
        heads = site.operator.shape[-3]
        key = SiteKey(site.stack, site.layer, site.name, site.cross, self._occurrence(site))
        known = self._sites.get(key)
        if known is None:
            known = SiteHeads(
                key,
                site.kind,
                RunningMoments((heads, len(HEAD_MEASURES))),
                RunningMoments((heads, heads)),
                np.zeros(heads),
            )
            self._sites[key] = known
        windows = max(1, site.operator.shape[0] // max(site.sequences, 1))
        rows: list[Floats] = []
        distances: list[Floats] = []
        for values, distance, mask, spectrum in measured(site, self.delta):
            rows.append(values)
            distances.append(distance)
            if values[0, 0] > known.longest:
                known.longest, known.mask = int(values[0, 0]), mask
            if not known.spectra:
                known.spectra = spectrum
        for start in range(0, len(rows), windows):
            group = np.stack(rows[start : start + windows])
            broken = np.isnan(group[:, :, HEAD_MEASURES.index("sigma_max")]).any(0)
            known.nonfinite += broken
            mean = _mean(group)
            mean[broken] = np.nan
            known.moments.add(mean)
            known.distances.add(_mean(np.stack(distances[start : start + windows])))

    def records(self) -> list[HeadRecord]:
        """One record a head, in the order of the model."""
        out: list[HeadRecord] = []
        for site in self._sites.values():
            out.extend(_records(site))
        return out

    def _occurrence(self, site: MixerSite) -> int:
        """Which call of the same mixer in the same layer of one forward pass this is."""
        key = (site.run, site.stack, site.layer, site.name, site.cross)
        self._calls = {call: count for call, count in self._calls.items() if call[0] == site.run}
        self._calls[key] = self._calls.get(key, -1) + 1
        return self._calls[key]


Measured = tuple[Floats, Floats, MaskName, list[list[float]]]


def measured(site: MixerSite, delta: float) -> Iterator[Measured]:
    """For each sequence (or window) of a mixer: numbers, distances, mask and spectra of its heads."""
    operator = site.operator
    batch, heads, tokens, sources = operator.shape
    at_once = max(1, MATRIX_BYTES // (8 * heads * tokens * sources))
    for start in range(0, batch, at_once):
        index = slice(start, min(start + at_once, batch))
        rows, columns = site.valid_tokens[index], site.valid_sources[index]
        part = operator[index]
        dense, support = part.dense(torch.float64), part.support().any(1)
        if bool(rows.all()) and bool(columns.all()):
            yield from _measure(dense, support, delta)
            continue
        for at in range(dense.shape[0]):  # sequences of their own lengths
            keep_rows, keep_columns = rows[at], columns[at]
            matrix = dense[at : at + 1][:, :, keep_rows][..., keep_columns]
            if 0 in matrix.shape:
                nothing = np.full((heads, len(HEAD_MEASURES)), np.nan)
                yield nothing, np.full((heads, heads), np.nan), "full", []
            else:
                seen = support[at : at + 1][:, keep_rows][..., keep_columns]
                yield from _measure(matrix, seen, delta)


def _measure(
    dense: Float64[Tensor, "B H T S"], support: Bool[Tensor, "B T S"], delta: float
) -> Iterator[Measured]:
    batch, heads, tokens, sources = dense.shape
    ranks = measures.rank_summary(dense, delta)
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
        null[:, None].to(full) * full,
    )
    values = torch.stack(columns, dim=-1).cpu().numpy()
    distances = measures.head_distance(dense).cpu().numpy()
    names = [mask_name(one) for one in support]
    sigma = ranks.singular_values
    kept = torch.linspace(0, sigma.shape[-1] - 1, min(SPECTRUM_POINTS, sigma.shape[-1])).round().long()
    spectra = sigma[..., kept.to(sigma.device)].cpu()
    for at in range(batch):
        yield values[at], distances[at], names[at], _rounded(spectra[at])


def mask_name(support: Bool[Tensor, "T S"]) -> MaskName:
    """Name the pattern of what rows may see: everything, all up to themselves, a band, or something else."""
    if bool(support.all()):
        return "full"
    rows, columns = support.nonzero(as_tuple=True)
    if rows.numel() == 0:
        return "other"
    offset = columns - rows
    grid = torch.arange(support.shape[1], device=support.device) - torch.arange(
        support.shape[0], device=support.device
    ).unsqueeze(1)
    if torch.equal(support, grid <= support.shape[1] - support.shape[0]):
        return "causal"
    band = (grid >= offset.min()) & (grid <= offset.max())
    return "window" if torch.equal(support, band) else "other"


def _mean(group: Floats) -> Floats:
    """Mean over windows, NaN left out; NaN where all are."""
    known = ~np.isnan(group)
    total = np.where(known, group, 0.0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _rounded(spectra: Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in head] for head in spectra.tolist()]


def _records(site: SiteHeads) -> Iterator[HeadRecord]:
    mean, spread = site.moments.mean, site.moments.spread
    distance = site.distances.mean.copy()
    np.fill_diagonal(distance, np.nan)
    for head in range(mean.shape[0]):
        nearest = None if np.isnan(distance[head]).all() else int(np.nanargmin(distance[head]))
        yield HeadRecord(
            stack=site.key.stack,
            site=site.key.site,
            layer=site.key.layer,
            head=head,
            kind=site.kind,
            mask=site.mask,
            cross=site.key.cross,
            sequences=int(site.moments.count[head, HEAD_MEASURES.index("sigma_max")]),
            nonfinite=int(site.nonfinite[head]),
            nearest_head=nearest,
            nearest_distance=np.nan if nearest is None else float(distance[head, nearest]),
            spread={name: float(spread[head, at]) for at, name in enumerate(HEAD_MEASURES) if at > 1},
            spectrum=site.spectra[head] if site.spectra else [],
            **{name: float(mean[head, at]) for at, name in enumerate(HEAD_MEASURES)},
        )
