"""Importance of heads and blocks, which adds up over shards of the data: means over all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rankwise._internals.statistics import Moments, spearman
from rankwise.auditing.importance_records import HeadImportance, ImportanceRecord
from rankwise.errors import RecordError
from rankwise.tracing.head_id import HeadId

NUMBERS = ("gradient", "first_order", "fisher", "curvature", "estimate", "exact", "cosine")
SETTINGS = ("loss", "unit", "reference_name", "removal", "probes", "seed")
SUMS = ("sequences", "nonfinite", "counted", "forward", "backward")
NOT_SEARCHED = "which heads can go together is not known of merged audits: that takes runs on all of the data"

I = TypeVar("I", bound=HeadImportance)


@dataclass
class ImportanceStatistics:
    """Importance of a model on some sequences."""

    record: ImportanceRecord
    heads: dict[HeadId, HeadImportance]

    def merge(self, other: "ImportanceStatistics") -> None:
        """Add other sequences; no set of removable heads is left, since no pass saw all of the data.

        Raises:
            RecordError: if importance was measured with other settings.
        """
        first, second = self.record, other.record
        for field in SETTINGS:
            values = [getattr(record, field) for record in (first, second)]
            if values[0] != values[1]:
                raise RecordError(
                    "importance of audits to merge",
                    expected=f"the same {field} in all of them",
                    got=" and ".join(map(repr, values)),
                    fix="Audit all shards with the same settings of importance.",
                )
        weights = dict.fromkeys(NUMBERS, (first.counted, second.counted))
        weights["cosine"] = (first.sequences, second.sequences)

        def joined(one: I, two: I) -> I:
            numbers = {
                name: _mean(weights[name], (getattr(one, name), getattr(two, name))) for name in NUMBERS
            }
            why_not = min((part.why_not for part in (one, two) if part.why_not), default="")
            return one.model_copy(update=numbers | {"why_not": why_not})

        self.heads = {
            at: joined(self.heads[at], head) for at, head in other.heads.items() if at in self.heads
        }
        blocks = {(block.stack, block.layer, block.site): block for block in second.blocks}
        value, reference = (
            _mean((first.counted, second.counted), (getattr(first, name), getattr(second, name)))
            for name in ("value", "reference")
        )
        notes = [note for note in (*first.notes, *second.notes) if note != NOT_SEARCHED]
        self.record = first.model_copy(
            update={name: getattr(first, name) + getattr(second, name) for name in SUMS}
            | {
                "value": value,
                "reference": abs(value) if first.reference_name == "the loss" else reference,
                "blocks": [
                    joined(block, blocks[block.stack, block.layer, block.site])
                    for block in first.blocks
                    if (block.stack, block.layer, block.site) in blocks
                ],
                "removable": None,
                "notes": [*dict.fromkeys(notes), NOT_SEARCHED],
                "spearman": rank_correlation(list(self.heads.values())),
            }
        )


def _mean(weights: Sequence[float | int], numbers: Sequence[float]) -> float:
    """Return a weighted mean; NaN if a number with a weight is NaN."""
    known = np.array(weights, dtype=np.float64)
    parts = Moments.from_record(known, np.array(numbers, dtype=np.float64), np.full(2, np.nan))
    whole = Moments(parts.count[:1], parts.mean[:1], parts.m2[:1])
    whole.merge(Moments(parts.count[1:], parts.mean[1:], parts.m2[1:]))
    return float(whole.complete(known.sum(keepdims=True)).to_record()[1][0])


def rank_correlation(heads: Sequence[HeadImportance]) -> float:
    """Return the rank correlation of estimates and exact costs."""
    known = [head for head in heads if not head.why_not]
    return spearman((head.estimate for head in known), (head.exact for head in known))
