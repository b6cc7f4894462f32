"""What shards of the data say a model loses without its heads, joined: means over all tokens."""

from collections.abc import Sequence
from typing import TypeVar

from rankwise._internals.statistics import spearman
from rankwise.auditing.importance_records import HeadImportance, ImportanceRecord
from rankwise.auditing.pooled import by_key, weighted_mean
from rankwise.errors import RecordError

NUMBERS = ("gradient", "first_order", "fisher", "curvature", "estimate", "exact", "cosine")
SETTINGS = ("loss", "unit", "reference_name", "removal", "probes", "seed")
NOT_SEARCHED = "which heads can go together is not known of merged audits: that takes runs on all of the data"
LEFT_OUT = "worth left out: not all audits that were merged have it"


W = TypeVar("W", bound=HeadImportance)


def merged_importance(importances: Sequence[tuple[W | None, ImportanceRecord | None]]) -> W | None:
    """The worth of one head or block: its numbers are means over tokens or labels, the cosine over sequences.

    Args:
        worths: of each audit, and what it is a part of.

    Returns:
        The mean of all; None where one of the audits does not know it.
    """
    there = [(importance, of) for importance, of in importances if importance is not None and of is not None]
    if len(there) < len(importances):
        return None
    numbers = {
        name: weighted_mean(
            [
                (of.sequences if name == "cosine" else of.counted, getattr(importance, name))
                for importance, of in there
            ]
        )
        for name in NUMBERS
    }
    why_not = min((importance.why_not for importance, _ in there if importance.why_not), default="")
    return there[0][0].model_copy(update=numbers | {"why_not": why_not})


def merged_record(records: Sequence[ImportanceRecord]) -> ImportanceRecord:
    """What is said of all heads together; nothing of sets of heads, which were run on shards only.

    Args:
        records: of each audit.

    Raises:
        RecordError: if they were not measured alike.
    """
    for field in SETTINGS:
        values = list(dict.fromkeys(getattr(record, field) for record in records))
        if len(values) > 1:
            raise RecordError(
                "worth of audits to merge",
                expected=f"the same {field} in all of them",
                got=" and ".join(map(repr, values)),
                fix="Audit all shards with the same settings of worth.",
            )
    blocks = by_key(
        [[(block, record) for block in record.blocks] for record in records],
        lambda pair: (pair[0].stack, pair[0].layer, pair[0].site),
    )
    merged = [merged_importance(group) for group in blocks if len(group) == len(records)]
    value, reference = (
        weighted_mean([(record.counted, getattr(record, name)) for record in records])
        for name in ("value", "reference")
    )
    sums = ("sequences", "nonfinite", "counted", "forward", "backward")
    notes = [*(note for record in records for note in record.notes), NOT_SEARCHED]
    said = {
        "value": value,
        "reference": abs(value) if records[0].reference_name == "the loss" else reference,
        "blocks": [block for block in merged if block is not None],
        "removable": None,
        "notes": list(dict.fromkeys(notes)),
    }
    return records[0].model_copy(
        update={name: sum(getattr(record, name) for record in records) for name in sums} | said
    )


def with_correlation(importance: ImportanceRecord, heads: Sequence[HeadImportance]) -> ImportanceRecord:
    """With the rank correlation of estimates and exact costs.

    Args:
        worth: of all heads.
        heads: of each.
    """
    known = [importance for importance in heads if not importance.why_not]
    rank = spearman((importance.estimate for importance in known), (importance.exact for importance in known))
    return importance.model_copy(update={"spearman": rank})
