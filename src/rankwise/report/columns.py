"""The numbers of heads as the page has them: each once, for map, head, table and CSV.

What adds numbers of its own (its worth, its baseline) adds columns to `head_columns`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwise.audit.measures import HEAD_MEASURES, NULL_NOTES, NULLS, HeadMeasure, share
from rankwise.audit.records import HeadRecord
from rankwise.report.text import count

_DIGITS = 6
"""Significant digits that the page holds of a number; audit.json has all of them."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What heads are held against on the scale of a measure."""

    name: str
    note: str
    values: Sequence[float]
    """One for each head; NaN where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of each head."""

    name: str
    """Of the measure, which findings name."""
    share: bool = False
    """Whether it is a share of min(T, S): its name in a CSV file says so."""
    title: str
    head: str
    """A title for a narrow column."""
    digits: int | None
    """Decimals that are shown."""
    values: Sequence[float]
    """One for each head; NaN where it is not known."""
    spread: Sequence[float] = ()
    """Standard deviations over sequences, if known."""
    words: dict[int, str] = field(default_factory=dict)
    """What is shown of a head in place of its number, such as a range."""
    meaning: str = ""
    """Said beside its heat map; a column without has none."""
    low: str = ""
    high: str = ""
    """What the ends of its scale mean."""
    limits: tuple[float, float] = (0.0, 1.0)
    """The ends of its scale."""
    silent: frozenset[int] = frozenset()
    """Heads of which it says nothing."""
    references: Sequence[Reference] = ()

    def data(self) -> dict[str, Any]:
        """As the page's scripts read it."""
        low, high = self.limits
        beyond = [value for value in self.values if math.isfinite(value) and value > high]
        said: dict[str, Any] = {
            "name": self.name,
            "file_name": f"{self.name}_share" if self.share else self.name,
            "title": self.title,
            "head": self.head,
            "digits": self.digits,
            "values": [_short(value) for value in self.values],
        }
        if any(math.isfinite(number) for number in self.spread):
            said["spread"] = [_short(number) for number in self.spread]
        if self.words:
            said["words"] = self.words
        if self.meaning:
            said |= {
                "meaning": self.meaning,
                "ends": [[_short(low), self.low], [_short(high), self.high]],
                "beyond": [len(beyond), _short(max(beyond, default=math.nan))],
                "silent": sorted(self.silent),
                "references": [_marked(reference) for reference in self.references],
            }
        return said


def _short(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _marked(reference: Reference) -> dict[str, Any]:
    """Where it stands on the scale: its mean, and from where to where."""
    known = [value for value in reference.values if math.isfinite(value)]
    ends = (min(known), max(known))
    words = [f"{end:.2g}" for end in ends]
    return {
        "name": reference.name,
        "note": reference.note,
        "at": _short(sum(known) / len(known)),
        "said": words[0] if words[0] == words[1] else "–".join(words),
    }


def head_columns(heads: Sequence[HeadRecord]) -> list[Column]:
    """The columns of an audit's heads, in the order in which they are shown.

    Args:
        heads: its heads.
    """
    columns: list[Column] = []
    for measure in HEAD_MEASURES:
        if not measure.known_in(heads):
            continue
        column = measure_column(measure, heads)
        if measure.kinds and not any(map(math.isfinite, column.values)):
            continue
        columns.append(column)
        nulls = [
            Column(
                name=name,
                share=True,
                title=f"{words.capitalize()}, share",
                head=words.capitalize(),
                digits=measure.digits,
                values=[share(getattr(head, name), head) for head in heads],
            )
            for name, words in NULLS.items()
            if name in measure.nulls
        ]
        columns += [null for null in nulls if any(map(math.isfinite, null.values))]
    return columns


def measure_column(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """A measure of the table of measures as a column.

    Args:
        measure: its row.
        heads: all heads.
    """
    values = [measure.value(head) for head in heads]
    said = [(at, measure.said(head)) for at, head in enumerate(heads) if measure.name in head.stderr]
    spoken = [head for head in heads if head.kind not in measure.silent]
    references = [
        Reference(
            name=words,
            note=NULL_NOTES[name],
            values=[share(getattr(head, name), head) for head in spoken],
        )
        for name, words in NULLS.items()
        if name in measure.nulls
    ]
    return Column(
        name=measure.name,
        share=measure.share,
        title=measure.title,
        head=measure.head,
        digits=measure.digits,
        values=values,
        spread=[_spread(measure, head) for head in heads],
        words=dict(said),
        meaning=measure.meaning,
        low=measure.low,
        high=measure.high,
        limits=measure.limits(spoken),
        silent=frozenset(at for at, head in enumerate(heads) if head.kind in measure.silent),
        references=[
            reference
            for reference in (_fresh(measure, spoken), *references)
            if any(map(math.isfinite, reference.values))
        ],
    )


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


def _spread(measure: HeadMeasure, head: HeadRecord) -> float:
    """Of a share it is not known: the deviation of a rank holds that of the lengths of sequences."""
    return math.nan if measure.share else head.spread.get(measure.name, math.nan)
