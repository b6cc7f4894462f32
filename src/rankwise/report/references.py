"""What heads are held against on the scale of a measure: the same heads before training, and chance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankwise.auditing.measure_table import NULLS, HeadMeasure, share
from rankwise.auditing.records import HeadRecord
from rankwise.report.pages import short
from rankwise.report.text import count

_NOTES = {
    "hardmax_rank": "Every row picks one token at random, under the head's mask. This is not an untrained "
    "model: its rows weigh many tokens. It does not bound the rank of a head.",
    "random_rank": "Softmax of independent, standard normal queries and keys of the head's width and scale. "
    "This is not an untrained model: its queries and keys are smaller and come from the same tokens.",
    "uniform_rank": "Every row weighs all tokens under its mask equally: the limit without scores, not the "
    "least possible rank.",
}
"""What each reference rank is, and what it is not."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What heads are held against on the scale of a measure."""

    name: str
    note: str
    values: Sequence[float]
    """One for each head; NaN where it is not known."""

    def data(self) -> dict[str, Any]:
        """As the page's scripts read it: its mean, and from where to where on the scale."""
        known = [value for value in self.values if math.isfinite(value)]
        ends = (min(known), max(known))
        words = [f"{end:.2g}" for end in ends]
        return {
            "name": self.name,
            "note": self.note,
            "at": short(sum(known) / len(known)),
            "said": words[0] if words[0] == words[1] else "–".join(words),
        }


def references_of(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> list[Reference]:
    """The references of a measure that are known.

    Args:
        measure: its row.
        heads: those it says something of.
    """
    nulls = [
        Reference(
            name=words,
            note=_NOTES[name],
            values=[share(getattr(head, name), head) for head in heads],
        )
        for name, words in NULLS.items()
        if name in measure.nulls
    ]
    found = (_fresh(measure, heads), *nulls)
    return [reference for reference in found if any(map(math.isfinite, reference.values))]


def _fresh(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Reference:
    """The same heads before training, where they were audited."""
    known = [None if head.baseline is None else head.baseline.mean.get(measure.name) for head in heads]
    values = [math.nan if value is None else value for value in known]
    shares = [share(value, head) for value, head in zip(values, heads, strict=True)]
    seeds = max((head.baseline.seeds for head in heads if head.baseline is not None), default=0)
    return Reference(
        name="fresh weights",
        note="The same heads of the same architecture before training, on the same data, mean over "
        f"{count(seeds, 'seed')}: what the model starts from, not what it should be.",
        values=shares if measure.share else values,
    )
