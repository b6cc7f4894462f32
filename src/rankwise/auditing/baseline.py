"""Compare heads and layers of a model with copies of the model at initialization (the baseline)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwise._internals.records import Address
from rankwise._internals.statistics import Floats, t_quantile
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES
from rankwise.auditing.records import Baseline, BaselineAt, HeadRecord, StateRecord
from rankwise.auditing.statistics import ModelStatistics

OF_HEADS = [*(row.name for row in HEAD_MEASURES if not row.late), "nearest_head_distance"]
"""Measures of heads in a baseline: measures of the mixing matrix, but not importance."""
NUMERICAL_RANK = next(row for row in HEAD_MEASURES if row.name == "numerical_rank")
OF_LAYERS = [row.name for row in STATE_MEASURES]
FEWEST_PAIRS = 3
"""Minimum number of pairs (sequence, seed) for a standard deviation of differences."""


def head_baselines(
    own: ModelStatistics, copies: Sequence[ModelStatistics], delta: float
) -> dict[Address, dict[str, Any]]:
    """Return, by head address, the baseline and the ranks at initialization of heads that are also in a copy.

    Model (``own``) and copies need ranks per sequence, for the same sequences in the same order.
    """
    known = [_heads(copy, delta) for copy in copies]
    fields = {}
    for address, (record, ranks) in _heads(own, delta).items():
        found = [heads[address] for heads in known if address in heads and heads[address][0].sequences]
        if found:
            baseline = _of_head(record, ranks, [head for head, _ in found], [ranks for _, ranks in found])
            fields[address] = {
                "baseline": baseline,
                "init_numerical_rank": baseline.mean[NUMERICAL_RANK.shown_field(record)],
                "init_effective_rank": baseline.mean["effective_rank"],
            }
    return fields


def layer_baselines(
    own: ModelStatistics, copies: Sequence[ModelStatistics]
) -> dict[tuple[str, int], Baseline]:
    """Return baselines by stack and layer, for layers that at least one copy has."""
    baselines = {}
    for address in own.states:
        records = [copy.states[address].to_record() for copy in copies if address in copy.states]
        records = [record for record in records if record.sequences]
        if records:
            baselines[address] = Baseline(seeds=len(records), **_moments(records, OF_LAYERS))
    return baselines


def _heads(statistics: ModelStatistics, delta: float) -> dict[Address, tuple[HeadRecord, Floats]]:
    """Return the record and the ranks (N sequences, 5 thresholds, 2 bounds) of each captured head."""
    found = {}
    for mixer, heads in statistics.heads.items():
        assert heads.sequence_ranks is not None
        ranks = np.concatenate(heads.sequence_ranks)
        for at, record in enumerate(heads.to_records(delta)):
            found[mixer.at(record.head)] = record, ranks[:, at]
    return found


def _of_head(
    record: HeadRecord, ranks: Floats, copies: Sequence[HeadRecord], copy_ranks: Sequence[Floats]
) -> Baseline:
    spectra = [head.spectrum for head in copies if len(head.spectrum) == len(record.spectrum)]
    same = [other for other in copy_ranks if other.shape == ranks.shape]
    fields: dict[str, Any] = {"seeds": len(copies), **_moments(copies, OF_HEADS)}
    if same:
        fields["band"] = [
            baseline_at(point.delta, ranks[:, step], np.stack(same)[:, :, step])
            for step, point in enumerate(record.band)
        ]
    if spectra:
        fields["spectrum"] = np.mean(spectra, axis=0).tolist()
    return Baseline.model_validate(fields)


def _moments(copies: Sequence[HeadRecord] | Sequence[StateRecord], names: Sequence[str]) -> dict[str, Any]:
    means = {name: np.array([getattr(record, name) for record in copies]) for name in names}
    stds = {name: np.array([record.std.get(name, math.nan) for record in copies]) for name in names}
    return {
        "mean": {name: _mean(values) for name, values in means.items()},
        "seed_std": {name: _std(values) for name, values in means.items()},
        "std": {name: _mean(values) for name, values in stds.items()},
    }


def baseline_at(delta: float, own: Floats, seeds: Floats) -> BaselineAt:
    """Compare the model's rank intervals (N, 2) at one threshold with intervals of copies (seeds, N, 2)."""
    middle = seeds.mean(-1)
    differences = own.mean(-1) - middle  # shape (seeds, N)
    pairs = int(np.isfinite(differences).sum())
    enough = pairs >= FEWEST_PAIRS and len(seeds) > 1
    return BaselineAt(
        delta=delta,
        rank_low=_mean(seeds[..., 0]),
        rank_high=_mean(seeds[..., 1]),
        seed_std=_std(np.array([_mean(numbers) for numbers in middle])),
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
