"""The measures a reader can look at: what each says, and which end of it is the worrying one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rankwise.audit.records import HeadRecord, LayerRecord
from rankwise.report.text import rank_share

_SHORT = {
    "rank_share": "Rank share",
    "nearest_distance": "Nearest distance",
    "sigma_max": "σ max",
}

Bad = Literal["low", "high", "null", "neither"]
"""The end that is drawn as worrying; ``null``: everything below what chance would give."""


@dataclass(frozen=True)
class HeadMeasure:
    """A measure of heads, as the heat map shows it."""

    name: str
    title: str
    meaning: str
    low: str
    high: str
    bad: Bad
    digits: int
    value: Callable[[HeadRecord], float]
    bounds: Callable[[HeadRecord], tuple[float, float]] | None = None
    """The range it can take for a head; without it the scale spans the values there are."""

    @property
    def short(self) -> str:
        """A title for the head of a narrow column."""
        return _SHORT.get(self.name, self.title)

    def limits(self, heads: Sequence[HeadRecord]) -> tuple[float, float]:
        """Find the ends of a scale that holds every finite value of these heads."""
        points = [self.value(head) for head in heads]
        if self.bounds is not None:
            points += [bound for head in heads for bound in self.bounds(head)]
        finite = [point for point in points if math.isfinite(point)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        return (low, high) if high > low else (low, low + 1.0)


def _unit(_: HeadRecord) -> tuple[float, float]:
    return 0.0, 1.0


def _entropy_bounds(head: HeadRecord) -> tuple[float, float]:
    return 0.0, math.log(head.sources) if head.sources >= 1 else math.nan


def _from_one(_: HeadRecord) -> tuple[float, float]:
    return 1.0, 1.0


HEAD_MEASURES: tuple[HeadMeasure, ...] = (
    HeadMeasure(
        "rank_share",
        "Numerical rank share",
        "Singular values at or above δ, as a share of min(T, S). The null is the share that chance gives: "
        "every row picks one token at random under the same mask. Orange heads mix in fewer directions than "
        "chance, blue ones in more.",
        "no direction",
        "full rank",
        "null",
        2,
        rank_share,
        _unit,
    ),
    HeadMeasure(
        "effective_rank",
        "Effective rank",
        "The exponential of the entropy of the singular values: how many directions carry weight. Low is "
        "worrying.",
        "few directions",
        "many directions",
        "low",
        1,
        lambda head: head.effective_rank,
        _from_one,
    ),
    HeadMeasure(
        "stable_rank",
        "Stable rank",
        "‖M‖² over the largest singular value squared. 1 is worrying: every token gets the same mixture.",
        "all rows alike",
        "rows differ",
        "low",
        1,
        lambda head: head.stable_rank,
        _from_one,
    ),
    HeadMeasure(
        "row_entropy",
        "Row entropy",
        "How widely a row spreads its weight, in nats. Neither end is bad in itself: 0 picks a single token, "
        "log S averages over all.",
        "picks one token",
        "averages all",
        "neither",
        2,
        lambda head: head.row_entropy,
        _entropy_bounds,
    ),
    HeadMeasure(
        "sink_mass",
        "Sink mass",
        "The mean share of a row that is spent on the first token. High is worrying: the head is parked "
        "there.",
        "none of it",
        "all of it",
        "high",
        2,
        lambda head: head.sink_mass,
        _unit,
    ),
    HeadMeasure(
        "peak_mass",
        "Peak mass",
        "The largest mean share of a row that one token gets. High is worrying: the head passes on little "
        "else.",
        "spread out",
        "all on one token",
        "high",
        2,
        lambda head: head.peak_mass,
        _unit,
    ),
    HeadMeasure(
        "row_distance",
        "Row distance",
        "The distance to the nearest matrix with equal rows. 0 is worrying: every token gets the same "
        "mixture.",
        "constant",
        "rows differ",
        "low",
        2,
        lambda head: head.row_distance,
        _unit,
    ),
    HeadMeasure(
        "identity_distance",
        "Identity distance",
        "The distance to the identity. 0 is worrying: every token keeps to itself and nothing is mixed.",
        "no mixing",
        "far from it",
        "low",
        2,
        lambda head: head.identity_distance,
        _unit,
    ),
    HeadMeasure(
        "nearest_distance",
        "Distance to nearest head",
        "The distance to the head of the same layer that mixes most alike. 0 is worrying: the two are twins.",
        "a twin",
        "unlike any",
        "low",
        2,
        lambda head: head.nearest_distance,
        _unit,
    ),
    HeadMeasure(
        "sigma_max",
        "Largest singular value",
        "How much the head can stretch its input. 1 for a matrix that averages evenly; neither end is bad in "
        "itself.",
        "smallest here",
        "largest here",
        "neither",
        2,
        lambda head: head.sigma_max,
    ),
)
"""In the order they are offered; the first is shown at first."""


@dataclass(frozen=True)
class StateMeasure:
    """A measure of the token states, as the curves through depth show it."""

    name: str
    title: str
    meaning: str
    digits: int
    value: Callable[[LayerRecord], float]
    bounds: tuple[float, float]


STATE_MEASURES: tuple[StateMeasure, ...] = (
    StateMeasure(
        "relative_collapse",
        "Distance from collapse, μ/‖Y‖",
        "How far the tokens are from being all the same. Falling to 0 is bad.",
        3,
        lambda layer: layer.relative_collapse,
        (0.0, 1.0),
    ),
    StateMeasure(
        "mean_cosine",
        "Mean cosine of two tokens",
        "How parallel the tokens are. Rising to 1 is bad.",
        3,
        lambda layer: layer.mean_cosine,
        (-1.0, 1.0),
    ),
    StateMeasure(
        "effective_rank",
        "Effective rank of the states",
        "How many directions the tokens span. Falling to 1 is bad.",
        1,
        lambda layer: layer.effective_rank,
        (1.0, math.inf),
    ),
)
