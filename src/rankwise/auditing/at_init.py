"""Compare heads and token states of a model with copies of the model at initialization."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwise._internals.records import Address
from rankwise._internals.statistics import Floats
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES
from rankwise.auditing.records import AtInit, HeadRecord, StateRecord
from rankwise.auditing.statistics import ModelStatistics

OF_HEADS = [*(row.name for row in HEAD_MEASURES if not row.late), "nearest_head_distance"]
"""Measures of heads at initialization: measures of the mixing matrix, but not importance."""
NUMERICAL_RANK = next(row for row in HEAD_MEASURES if row.name == "numerical_rank")
OF_STATES = [row.name for row in STATE_MEASURES]


def heads_at_init(model: ModelStatistics, copies: Sequence[ModelStatistics]) -> dict[Address, dict[str, Any]]:
    """Return the fields of heads that copies at initialization determine, by the address of the head.

    Heads without a finite measure in any copy are left out.
    """
    records_of_copies = [_heads(copy) for copy in copies]
    fields = {}
    for address, record in _heads(model).items():
        records = [heads[address] for heads in records_of_copies if address in heads]
        records = [head for head in records if head.sequences]
        if not records:
            continue
        spectra = [head.spectrum for head in records if len(head.spectrum) == len(record.spectrum)]
        spectrum = np.mean(spectra, axis=0).tolist() if spectra else []
        initial = AtInit(seeds=len(records), **_moments(records, OF_HEADS), spectrum=spectrum)
        fields[address] = {
            "at_init": initial,
            "init_numerical_rank": initial.mean[NUMERICAL_RANK.shown_field(record)],
            "init_effective_rank": initial.mean["effective_rank"],
        }
    return fields


def states_at_init(copies: Sequence[ModelStatistics]) -> dict[tuple[str, int], AtInit]:
    """Return measures of token states in copies at initialization, by stack and number of blocks passed."""
    initial = {}
    for address in dict.fromkeys(address for copy in copies for address in copy.states):
        records = [copy.states[address].to_record() for copy in copies if address in copy.states]
        records = [record for record in records if record.sequences]
        if records:
            initial[address] = AtInit(seeds=len(records), **_moments(records, OF_STATES))
    return initial


def _heads(statistics: ModelStatistics) -> dict[Address, HeadRecord]:
    return {
        mixer.at(record.head): record
        for mixer, heads in statistics.heads.items()
        for record in heads.to_records()
    }


def _moments(copies: Sequence[HeadRecord] | Sequence[StateRecord], names: Sequence[str]) -> dict[str, Any]:
    means = {name: np.array([getattr(record, name) for record in copies]) for name in names}
    stds = {name: np.array([record.std.get(name, math.nan) for record in copies]) for name in names}
    return {
        "mean": {name: _mean(values) for name, values in means.items()},
        "seed_std": {name: _std(values) for name, values in means.items()},
        "std": {name: _mean(values) for name, values in stds.items()},
    }


def _mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _std(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.std(ddof=1)) if finite.size > 1 else math.nan
