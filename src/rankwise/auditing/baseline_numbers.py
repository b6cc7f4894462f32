"""From audits of copies at fresh weights to the baseline of every head and layer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankwise._internals.statistics import t_quantile
from rankwise.auditing.baseline_records import Baseline, BaselineAt
from rankwise.auditing.heads import HeadTable
from rankwise.auditing.measures import HEAD_MEASURES, LAYER_MEASURES
from rankwise.auditing.numbers import AVERAGED, Floats
from rankwise.auditing.records import HeadRecord, LayerRecord
from rankwise.auditing.site_keys import HeadKey

OF_HEADS = [*(measure.name for measure in HEAD_MEASURES if measure.name in AVERAGED), "nearest_distance"]
"""The measures that a baseline has: those that come from the matrix."""
OF_LAYERS = [measure.name for measure in LAYER_MEASURES]
NUMERICAL_RANK = next(measure for measure in HEAD_MEASURES if measure.name == "numerical_rank")
FEWEST_PAIRS = 3
"""Of a sequence and a seed: below, no spread is known."""


def head_baselines(own: HeadTable, fresh: Sequence[HeadTable]) -> dict[HeadKey, dict[str, Any]]:
    """The baseline of every head that the copies have too, and its ranks, as fields of the record.

    Args:
        own: of the model, with the ranks of each sequence.
        fresh: of each copy, over the same sequences in the same order.
    """
    copies = [{place: (record, ranks) for place, record, ranks in table.known()} for table in fresh]
    out = {}
    for place, record, ranks in own.known():
        there = [copy[place] for copy in copies if place in copy and copy[place][0].sequences]
        if there:
            fresh_ranks = [ranks for _, ranks in there]
            baseline = _of_head(record, ranks, [head for head, _ in there], fresh_ranks)
            out[place] = {
                "baseline": baseline,
                "init_numerical_rank": baseline.mean[NUMERICAL_RANK.shown_field(record)],
                "init_effective_rank": baseline.mean["effective_rank"],
            }
    return out


def layer_baselines(
    own: Sequence[LayerRecord], fresh: Sequence[Sequence[LayerRecord]]
) -> dict[tuple[str, int], Baseline]:
    """The baseline of every layer that the copies have too, by its stack and number.

    Args:
        own: of the model.
        fresh: of each copy.
    """
    copies = [
        {(record.stack, record.layer): record for record in records if record.sequences} for records in fresh
    ]
    out = {}
    for record in own:
        place = (record.stack, record.layer)
        there = [copy[place] for copy in copies if place in copy]
        if there:
            out[place] = Baseline.model_validate({"seeds": len(there), **_moments(there, OF_LAYERS)})
    return out


def _of_head(
    record: HeadRecord, ranks: Floats, fresh: Sequence[HeadRecord], fresh_ranks: Sequence[Floats]
) -> Baseline:
    spectra = [head.spectrum for head in fresh if len(head.spectrum) == len(record.spectrum)]
    same = [other for other in fresh_ranks if other.shape == ranks.shape]
    said: dict[str, Any] = {"seeds": len(fresh), **_moments(fresh, OF_HEADS)}
    if same:
        at = enumerate(point.delta for point in record.band)
        said["band"] = [_at(delta, ranks[:, step], [other[:, step] for other in same]) for step, delta in at]
    if spectra:
        said["spectrum"] = np.mean(spectra, axis=0).tolist()
    return Baseline.model_validate(said)


def _moments(
    fresh: Sequence[HeadRecord] | Sequence[LayerRecord], names: Sequence[str]
) -> Mapping[str, dict[str, float]]:
    found = {name: np.array([getattr(item, name) for item in fresh]) for name in names}
    spreads = {name: np.array([item.spread.get(name, math.nan) for item in fresh]) for name in names}
    return {
        "mean": {name: _mean(values) for name, values in found.items()},
        "std": {name: _std(values) for name, values in found.items()},
        "spread": {name: _mean(values) for name, values in spreads.items()},
    }


def _at(delta: float, own: Floats, fresh: Sequence[Floats]) -> BaselineAt:
    """At one threshold: ``own`` and each of ``fresh`` are the ends of intervals (N, 2) of the sequences."""
    seeds = np.stack(fresh)  # (seeds, N, 2)
    middle = seeds.mean(-1)
    differences = own.mean(-1) - middle  # (seeds, N)
    pairs = int(np.isfinite(differences).sum())
    enough = pairs >= FEWEST_PAIRS and len(fresh) > 1
    return BaselineAt(
        delta=delta,
        rank_low=_mean(seeds[..., 0]),
        rank_high=_mean(seeds[..., 1]),
        std=_std(np.array([_mean(numbers) for numbers in middle])),
        difference_low=_mean(own[:, 0] - seeds[..., 1]),
        difference_high=_mean(own[:, 1] - seeds[..., 0]),
        margin=t_quantile(pairs - 1) * _std(differences) if enough else math.nan,
        pairs=pairs,
    )


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def _std(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if known.size > 1 else math.nan
