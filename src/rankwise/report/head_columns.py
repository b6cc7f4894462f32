"""Build one column per measure of heads, with reference values.

Heat map, head card, table and CSV file of a page show these columns. Table and CSV file also show
address, kind, mask and size of each head, which `audit_report` adds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from rankwise._internals.statistics import mean
from rankwise.auditing.measure_table import (
    HEAD_MEASURES,
    REFERENCES,
    HeadMeasure,
    Measure,
    share,
)
from rankwise.auditing.records import HeadRecord
from rankwise.report.format import count, round_for_page

_NOTES = {
    "one_hot_rank": "Every row picks one token at random, under the head's mask. This is not an untrained "
    "model: its rows weigh many tokens. It does not bound the rank of a head.",
    "random_rank": "Softmax of independent, standard normal queries and keys of the head's width and scale. "
    "This is not an untrained model: its queries and keys are smaller and come from the same tokens.",
    "uniform_rank": "Every row weighs all tokens under its mask equally: the limit without scores, not the "
    "least possible rank.",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One measure of all heads of an audit, with all that is needed to show it."""

    name: str
    """Name of the measure, as findings refer to it."""
    share: bool = False
    """True if values are divided by min(T, S). The name in a CSV file then ends in `_share`."""
    title: str
    short_title: str
    """Title for a narrow column."""
    digits: int | None
    """Number of decimals that are shown. None means three significant digits."""
    values: Sequence[float]
    """One value per head. NaN if the value is unknown."""
    spread: Sequence[float] = ()
    """Standard deviation over sequences for each head. Empty if deviations are unknown."""
    over_seeds: bool = False
    """True if values and `spread` are means and standard deviations over seeds of the initialization."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Text to show instead of the number, such as a range, by the index of the head."""
    meaning: str = ""
    """Explanation next to the heat map of the measure. If it is empty, the measure has no heat map."""
    low: str = ""
    high: str = ""
    """Words for the lower (`low`) and upper (`high`) end of the color scale."""
    limits: tuple[float, float] = (0.0, 1.0)
    """Values at the ends of the color scale."""
    undefined_for: frozenset[int] = frozenset()
    """Indices of the heads for which the measure is not informative."""
    references: Sequence["Column"] = ()
    """Columns to compare with, such as ranks of random heads. The color scale marks their means."""
    note: str = ""
    """If this column is a reference, explanation of its values and their limits."""

    @property
    def beyond(self) -> list[float]:
        """Finite values above the upper end of the color scale."""
        return [value for value in self.values if math.isfinite(value) and value > self.limits[1]]

    def data(self) -> dict[str, Any]:
        """Return the column as a dictionary that the scripts of the page read."""
        data: dict[str, Any] = {
            "name": self.name,
            "file_name": f"{self.name}_share" if self.share else self.name,
            "title": self.title,
            "short_title": self.short_title,
            "digits": self.digits,
            "values": [round_for_page(value) for value in self.values],
        }
        if any(math.isfinite(number) for number in self.spread):
            data["spread"] = [round_for_page(number) for number in self.spread]
            data["over_seeds"] = self.over_seeds
        if self.labels:
            data["labels"] = self.labels
        if self.meaning:
            low, high = self.limits
            data |= {
                "meaning": self.meaning,
                "ends": [[round_for_page(low), self.low], [round_for_page(high), self.high]],
                "beyond": [len(self.beyond), round_for_page(max(self.beyond, default=math.nan))],
                "undefined_for": sorted(self.undefined_for),
                "references": [self._mark(reference) for reference in self.references],
            }
        return data

    def _mark(self, reference: "Column") -> dict[str, Any]:
        """Return the mark of a reference column on the color scale: mean, range, name and note.

        Heads in `undefined_for` are left out.
        """
        values = [value for index, value in enumerate(reference.values) if index not in self.undefined_for]
        values = [value for value in values if math.isfinite(value)] or [math.nan]
        ends = [f"{end:.2g}" for end in (min(values), max(values))]
        return {
            "name": "at initialization" if reference.over_seeds else reference.short_title.lower(),
            "note": reference.note,
            "at": round_for_page(mean(values)),
            "label": "–".join(dict.fromkeys(ends)),
        }


def head_columns(heads: Sequence[HeadRecord]) -> list[Column]:
    """Return one column per measure that some head has, each followed by its references, in display order."""
    columns: list[Column] = []
    for measure in HEAD_MEASURES:
        if not measure.known_in(heads):
            continue
        column = measure_column(measure, heads)
        if not measure.kinds or any(map(math.isfinite, column.values)):
            columns += [column, *column.references]
    return columns


def measure_column(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """Return one measure of all heads as a column, with its reference columns."""
    references = [_at_initialization(measure, heads), *_reference_ranks(measure, heads)]
    return Column(
        name=measure.name,
        share=measure.share,
        title=measure.title,
        short_title=measure.head,
        digits=measure.digits,
        values=[measure.value(head) for head in heads],
        # no deviation for shares: the deviation of ranks includes the variation of sequence lengths
        spread=[math.nan if measure.share else head.std.get(measure.name, math.nan) for head in heads],
        labels={i: measure.formatted(head) for i, head in enumerate(heads) if measure.name in head.stderr},
        meaning=measure.meaning if measure.drawn else "",
        low=measure.low,
        high=measure.high,
        limits=color_limits(measure, [head for head in heads if measure.applies_to(head)]),
        undefined_for=frozenset(i for i, head in enumerate(heads) if not measure.applies_to(head)),
        references=[column for column in references if any(map(math.isfinite, column.values))],
    )


def _reference_ranks(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> list[Column]:
    return [
        Column(
            name=name,
            share=True,
            title=f"{words.capitalize()}, share",
            short_title=words.capitalize(),
            digits=measure.digits,
            values=[share(getattr(head, name), head) for head in heads],
            note=_NOTES[name],
        )
        for name, words in REFERENCES.items()
        if name in measure.references
    ]


def _at_initialization(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """Return the column of a measure at initialization: mean and standard deviation over random seeds."""
    pairs: list[tuple[float, float]] = []
    for head in heads:
        middle, std = math.nan, math.nan
        if head.at_init is not None:
            name = measure.shown_field(head)
            middle, std = (of.get(name, math.nan) for of in (head.at_init.mean, head.at_init.seed_std))
        pairs.append((share(middle, head), share(std, head)) if measure.share else (middle, std))
    seeds = max((head.at_init.seeds for head in heads if head.at_init is not None), default=0)
    return Column(
        name=f"init_{measure.name}",
        share=measure.share,
        title=f"{measure.title} at initialization",
        short_title=f"{measure.head} at initialization",
        digits=measure.digits,
        values=[middle for middle, _ in pairs],
        spread=[std for _, std in pairs],
        over_seeds=True,
        note="The same heads of the same architecture before training, on the same data, mean over "
        f"{count(seeds, 'seed')}: the start of training, not a target.",
    )


def color_limits(measure: Measure, records: Sequence[Any]) -> tuple[float, float]:
    """Return the ends of a color scale: the range of the measure, or of its values if the range is wide.

    Values beyond `outer_fence` do not stretch the scale. They have the color of the upper end.
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
    """Return Tukey's outer fence Q3 + 3 (Q3 − Q1) of the quartiles, or infinity for fewer than four values.

    Examples:
        >>> outer_fence([1.0, 2.0, 3.0, 4.0, 100.0])
        10.0
    """
    if len(values) < 4:
        return math.inf
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third + 3 * (third - first)
