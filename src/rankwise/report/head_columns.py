"""Every number of a head as a column, with the marks that it is compared with; the table of token states.

Heat map, head card, table and CSV of a page read the columns of `head_columns`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from rankwise._internals.records import format_number
from rankwise._internals.statistics import mean
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES, NULLS, HeadMeasure, Measure, share
from rankwise.auditing.records import HeadRecord, LayerRecord
from rankwise.report.format import count, round_for_page

INITIAL = "init_"
"""Prefix of measures of the same head at initialization."""
_NOTES = {
    "hardmax_rank": "Every row picks one token at random, under the head's mask. This is not an untrained "
    "model: its rows weigh many tokens. It does not bound the rank of a head.",
    "random_rank": "Softmax of independent, standard normal queries and keys of the head's width and scale. "
    "This is not an untrained model: its queries and keys are smaller and come from the same tokens.",
    "uniform_rank": "Every row weighs all tokens under its mask equally: the limit without scores, not the "
    "least possible rank.",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One number of every head."""

    name: str
    """Name of the measure, to which findings refer."""
    share: bool = False
    """True for a share of min(T, S), which the name in a CSV file contains."""
    title: str
    short_title: str
    """Title of a narrow column."""
    digits: int | None
    """Decimals that are shown."""
    values: Sequence[float]
    """One value per head; NaN where unknown."""
    spread: Sequence[float] = ()
    """Standard deviations over sequences, if known."""
    over_seeds: bool = False
    """True if values and `spread` are means and deviations over seeds of the initialization."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Text instead of the number of a head, such as a range."""
    meaning: str = ""
    """Explanation next to its heat map; a column without one has no map."""
    low: str = ""
    high: str = ""
    """Meaning of the ends of the scale."""
    limits: tuple[float, float] = (0.0, 1.0)
    """Ends of the scale."""
    undefined_for: frozenset[int] = frozenset()
    """Heads for which the measure is not informative."""
    references: Sequence["Column"] = ()
    """Columns to compare with, whose means are marks on its scale."""
    note: str = ""
    """Meaning and limits of a reference."""

    @property
    def beyond(self) -> list[float]:
        """Values above the upper end of the scale."""
        return [value for value in self.values if math.isfinite(value) and value > self.limits[1]]

    def label(self, head: int) -> str:
        """Return the text of a head's number."""
        return self.labels.get(head) or format_number(self.values[head], self.digits)

    def data(self) -> dict[str, Any]:
        """Return the column as the page's scripts read it."""
        found: dict[str, Any] = {
            "name": self.name,
            "file_name": f"{self.name}_share" if self.share else self.name,
            "title": self.title,
            "short_title": self.short_title,
            "digits": self.digits,
            "values": [round_for_page(value) for value in self.values],
        }
        if any(math.isfinite(number) for number in self.spread):
            found["spread"] = [round_for_page(number) for number in self.spread]
            found["over_seeds"] = self.over_seeds
        if self.labels:
            found["labels"] = self.labels
        if self.meaning:
            low, high = self.limits
            found |= {
                "meaning": self.meaning,
                "ends": [[round_for_page(low), self.low], [round_for_page(high), self.high]],
                "beyond": [len(self.beyond), round_for_page(max(self.beyond, default=math.nan))],
                "undefined_for": sorted(self.undefined_for),
                "references": [self._mark(reference) for reference in self.references],
            }
        return found

    def _mark(self, reference: "Column") -> dict[str, Any]:
        """Return mean and range of a reference, over the heads for which this measure is informative."""
        values = [value for at, value in enumerate(reference.values) if at not in self.undefined_for]
        known = [value for value in values if math.isfinite(value)] or [math.nan]
        ends = [f"{end:.2g}" for end in (min(known), max(known))]
        return {
            "name": "at initialization" if reference.over_seeds else reference.short_title.lower(),
            "note": reference.note,
            "at": round_for_page(mean(known)),
            "label": "–".join(dict.fromkeys(ends)),
        }


def head_columns(heads: Sequence[HeadRecord]) -> list[Column]:
    """Return the columns of the heads of an audit, in the order in which they are shown."""
    columns: list[Column] = []
    for measure in HEAD_MEASURES:
        if measure.name.startswith(INITIAL) or not measure.known_in(heads):
            continue
        column = measure_column(measure, heads)
        if not measure.kinds or any(map(math.isfinite, column.values)):
            columns += [column, *column.references]
    return columns


def measure_column(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """Return a row of the table of measures as a column."""
    references = [_at_initialization(measure, heads), *_reference_ranks(measure, heads)]
    return Column(
        name=measure.name,
        share=measure.share,
        title=measure.title,
        short_title=measure.head,
        digits=measure.digits,
        values=[measure.value(head) for head in heads],
        # unknown for a share: the deviation of a rank includes the deviation of the lengths
        spread=[math.nan if measure.share else head.std.get(measure.name, math.nan) for head in heads],
        labels={at: measure.formatted(head) for at, head in enumerate(heads) if measure.name in head.stderr},
        meaning=measure.meaning,
        low=measure.low,
        high=measure.high,
        limits=color_limits(measure, [head for head in heads if measure.applies_to(head)]),
        undefined_for=frozenset(at for at, head in enumerate(heads) if not measure.applies_to(head)),
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
        for name, words in NULLS.items()
        if name in measure.nulls
    ]


def _at_initialization(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """Return the measure at initialization: mean and standard deviation over seeds."""
    pairs: list[tuple[float, float]] = []
    for head in heads:
        middle, std = math.nan, math.nan
        if head.baseline is not None:
            name = measure.shown_field(head)
            middle, std = (of.get(name, math.nan) for of in (head.baseline.mean, head.baseline.seed_std))
        pairs.append((share(middle, head), share(std, head)) if measure.share else (middle, std))
    seeds = max((head.baseline.seeds for head in heads if head.baseline is not None), default=0)
    return Column(
        name=f"{INITIAL}{measure.name}",
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


def state_table(layers: Sequence[LayerRecord]) -> list[dict[str, Any]]:
    """Return the token states as columns of the page's table, each with its numbers and decimals."""
    counts = {
        "layer": "Blocks passed",
        "tokens": "Tokens",
        "sequences": "Sequences",
        "nonfinite": "Not finite",
    }
    columns = [(name, title, 0, [getattr(y, name) for y in layers]) for name, title in counts.items()]
    columns[2:2] = [(m.name, m.head, m.digits, [m.value(y) for y in layers]) for m in LAYER_MEASURES]
    return [
        {"name": "stack", "short_title": "Stack", "texts": [layer.stack for layer in layers]},
        *(
            {"name": name, "short_title": title, "digits": digits, "values": values}
            for name, title, digits, values in columns
        ),
    ]
