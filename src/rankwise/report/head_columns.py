"""The numbers of heads, each once, as the page has them.

Map, head beside it, table and CSV read the columns of `head_columns`; what adds numbers of its own (worth,
a baseline) adds columns to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from rankwise.auditing.measure_table import HEAD_MEASURES, NULLS, HeadMeasure, Measure, share
from rankwise.auditing.records import HeadRecord
from rankwise.report.pages import short
from rankwise.report.references import Reference, references_of

FRESH = "init_"
"""Before the name of a measure: of the same head at fresh weights."""


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
    over_seeds: bool = False
    """Whether ``spread`` is over seeds of fresh weights, of which the number is a mean."""
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
            "values": [short(value) for value in self.values],
        }
        if any(math.isfinite(number) for number in self.spread):
            said["spread"] = [short(number) for number in self.spread]
            said["over_seeds"] = self.over_seeds
        if self.words:
            said["words"] = self.words
        if self.meaning:
            said |= {
                "meaning": self.meaning,
                "ends": [[short(low), self.low], [short(high), self.high]],
                "beyond": [len(beyond), short(max(beyond, default=math.nan))],
                "silent": sorted(self.silent),
                "references": [reference.data() for reference in self.references],
            }
        return said


def head_columns(heads: Sequence[HeadRecord]) -> list[Column]:
    """The columns of an audit's heads, in the order in which they are shown.

    Args:
        heads: its heads.
    """
    columns: list[Column] = []
    for measure in HEAD_MEASURES:
        if measure.name.startswith(FRESH) or not measure.known_in(heads):
            continue
        column = measure_column(measure, heads)
        if measure.kinds and not any(map(math.isfinite, column.values)):
            continue
        columns.append(column)
        beside = [*_nulls(measure, heads), *_fresh(measure, heads)]
        columns += [other for other in beside if any(map(math.isfinite, other.values))]
    return columns


def _nulls(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> list[Column]:
    return [
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


def _fresh(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> list[Column]:
    """The measure at fresh weights: mean and standard deviation over seeds."""
    if not any(head.baseline is not None and measure.name in head.baseline.mean for head in heads):
        return []
    known = [
        (math.nan, math.nan)
        if (fresh := head.baseline) is None
        else (fresh.mean.get(field, math.nan), fresh.seed_std.get(field, math.nan))
        for head in heads
        for field in [measure.shown_field(head)]
    ]
    of = [tuple(share(number, head) for number in pair) for pair, head in zip(known, heads, strict=True)]
    pairs = of if measure.share else known
    return [
        Column(
            name=f"{FRESH}{measure.name}",
            share=measure.share,
            title=f"{measure.title} at fresh weights",
            head=f"Fresh {measure.head[0].lower()}{measure.head[1:]}",
            digits=measure.digits,
            values=[mean for mean, _ in pairs],
            spread=[std for _, std in pairs],
            over_seeds=True,
        )
    ]


def measure_column(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """A measure of the table of measures as a column.

    Args:
        measure: its row.
        heads: all heads.
    """
    values = [measure.value(head) for head in heads]
    said = [(at, measure.formatted(head)) for at, head in enumerate(heads) if measure.name in head.stderr]
    spoken = [head for head in heads if measure.applies_to(head)]
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
        limits=color_limits(measure, spoken),
        silent=frozenset(at for at, head in enumerate(heads) if not measure.applies_to(head)),
        references=references_of(measure, spoken),
    )


def _spread(measure: HeadMeasure, head: HeadRecord) -> float:
    """Of a share it is not known: the deviation of a rank holds that of the lengths of sequences."""
    return math.nan if measure.share else head.std.get(measure.name, math.nan)


def color_limits(measure: Measure, records: Sequence[Any]) -> tuple[float, float]:
    """Return the ends of a color scale: the range of the measure, or the values without far outliers.

    Values beyond `outer_fence` do not stretch the scale: they have its last color.
    """
    values = [value for record in records if math.isfinite(value := measure.value(record))]
    ends = [measure.ends(record) for record in records]
    lows = [low for low, _ in ends if math.isfinite(low)] or values
    highs = [high for _, high in ends if math.isfinite(high)]
    if measure.range.wide or not highs:
        fence = outer_fence(values)
        highs = [value for value in values if value <= fence]
    low, high = min(lows, default=0.0), max(highs, default=1.0)
    return (low, high) if high > low else (low, low + 1.0)


def outer_fence(values: Sequence[float]) -> float:
    """Return Tukey's outer fence, Q3 + 3 (Q3 − Q1); infinity for fewer than four values.

    Examples:
        >>> outer_fence([1.0, 2.0, 3.0, 4.0, 100.0])
        10.0
    """
    if len(values) < 4:
        return math.inf
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third + 3 * (third - first)
