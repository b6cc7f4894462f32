"""What records are made of: numbers that may be missing, and measures with all that is known of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    from rankwise.audit.layers import StatesAtHand
    from rankwise.audit.numbers import HeadsAtHand

Bad = Literal["low", "high", "null", "neither"]
"""The end that is drawn as worrying; ``null``: everything below what chance would give."""
Bounds = Callable[[Any], tuple[float, float]]
"""The ends of the range that a measure can have in a record."""


def _nan_from_null(value: object) -> object:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_nan_from_null)]
"""A float that JSON writes as null where it is not finite."""


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("Input should be above 0, or null")
    return value


Size = Annotated[Number, AfterValidator(_positive)]
"""A mean number of rows or columns; NaN where no sequence had any."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of things, or the number of one of them from 0; JSON knows no larger whole numbers exactly."""


class Record(BaseModel):
    """Base of all records: frozen, no unknown fields, null for what is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of heads or of token states."""

    name: str = ""
    """That of the field, filled in from it."""
    title: str
    formula: str
    range: str
    low: str
    """What the low end means …"""
    high: str
    """… and the high one."""
    digits: int
    """Decimals that are shown."""
    cost: str
    bounds: Bounds | None = None
    """The ends of the range in numbers; None where it has no upper end."""
    to_the_largest: bool = False
    """Whether a scale of colours ends at the largest value there is, and not at that of the range."""
    short: str = ""
    """A title for the head of a narrow column."""
    symbol: str = ""
    """What it is called among numbers, such as ``μ/‖Y‖``; else its name."""
    meaning: str = ""
    """Said beside its picture; a measure without has no picture."""
    bad: Bad = "neither"
    console: str = ""
    """The head of its column on the console; a measure without has no column."""
    summed: bool = False
    """Whether a layer has the sum of its heads, and not their mean."""
    share: bool = False
    """Whether it is shown as a share of min(T, S)."""
    nulls: Sequence[str] = ()
    """Fields that hold what chance gives."""

    @property
    def head(self) -> str:
        """A title for the head of a narrow column."""
        return self.short or self.title

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.symbol or self.name.replace("_", " ")

    def value(self, record: Any) -> float:
        """What is shown of it: a share where it is one, NaN where there are no tokens.

        Args:
            record: of a head or of states.
        """
        number: float = getattr(record, self.name)
        return share(number, record) if self.share else number

    def ends(self, record: Any) -> tuple[float, float]:
        """The range of `value`; (NaN, NaN) where it has no upper end.

        Args:
            record: of a head or of states.
        """
        if self.bounds is None:
            return math.nan, math.nan
        return (0.0, 1.0) if self.share else self.bounds(record)

    def span(self, record: Any) -> float:
        """How far two numbers of it can lie apart; NaN where it has no upper end.

        Args:
            record: of a head or of states.
        """
        low, high = (math.nan, math.nan) if self.bounds is None else self.bounds(record)
        return high - min(low, 0.0)

    def limits(self, records: Sequence[Any]) -> tuple[float, float]:
        """Find the ends of a scale that holds every finite value of these records."""
        points = [self.value(record) for record in records]
        for record in records:
            low, high = self.ends(record)
            points += [low] if self.to_the_largest else [low, high]
        finite = [point for point in points if math.isfinite(point)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        return (low, high) if high > low else (low, low + 1.0)


@dataclass(frozen=True, kw_only=True)
class HeadMeasure(Measure):
    """A measure of heads, as it is taken from the heads of one mixer on sequences of one length."""

    take: "Callable[[HeadsAtHand], Any] | None"
    """Numbers (B, H), or one for all; None where it needs all sequences."""


@dataclass(frozen=True, kw_only=True)
class LayerMeasure(Measure):
    """A measure of token states, as it is taken from a batch of them."""

    take: "Callable[[StatesAtHand], Any]"
    """Numbers (B,)."""


def share(rank: float, head: Any) -> float:
    """A rank over min(T, S); NaN where there are no tokens.

    Args:
        rank: of a head, or what a null gives.
        head: its record.
    """
    return rank / head.smaller if head.smaller > 0 else math.nan
