"""Addresses in a model, and the base of records (results saved as JSON). Torch is not imported here."""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from rankwise.errors import strip_control

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MISSING = "–"
"""Text for a number that is not finite. It is not "0", because an unknown number is not a small number."""


Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""Float field. NaN and infinity are written as null in JSON, and null is read as NaN."""


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("Input should be above 0, or null")
    return value


Size = Annotated[Number, AfterValidator(_positive)]
"""Mean number of rows or columns per sequence, above 0. NaN if no sequence has rows or columns."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Count, or index from 0. The limit is 2⁵³, because JSON readers may round larger integers."""


class Record(BaseModel):
    """Base class of records: immutable, without unknown fields, with NaN and infinity written as null."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")

    def __str__(self) -> str:
        return repr(self)


Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Address:
    """Address of a head: equal in every batch, run and saved file.

    A field at its default (None or "") widens the address to a whole mixer, layer, stack or model.

    Examples:
        >>> head = Address("encoder.layer", 3, "encoder.layer.3.attention.self", head=7)
        >>> str(head)
        'encoder.layer layer 3 head 7'
        >>> head.at(None) == Address("encoder.layer", 3, "encoder.layer.3.attention.self")
        True
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    stack: str = ""
    """Name of the stack (chain of blocks), such as ``encoder.layer``."""
    layer: Index | None = None
    """Index of the block in the stack, from 0."""
    site: str = ""
    """Name of the module that mixes tokens."""
    call: Index = 0
    """Index of the call among the calls of the module in this layer, from 0."""
    head: Index | None = None

    def at(self, head: int | None) -> "Address":
        """Return the address of another head of the mixer call, or of the whole call if ``head`` is None."""
        return replace(self, head=head)

    @property
    def sort_key(self) -> tuple[str, int, str, int, int]:
        """Key that sorts addresses by stack, layer, site, call and head; None comes first."""
        layer, head = (-1 if part is None else part for part in (self.layer, self.head))
        return self.stack, layer, self.site, self.call, head

    def __str__(self) -> str:
        parts = [strip_control(self.stack)] if self.stack else []
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.head is not None:
            parts.append(f"head {self.head}")
        return " ".join(parts) or strip_control(self.site) or "model"


@dataclass(frozen=True)
class UncapturedModule:
    """Module that looks like a mixer (it mixes tokens) but was not captured, with the reason."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    type: str
    reason: str


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, in the order in which keys first occur; items need not be sorted."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def format_number(value: float, digits: int | None = None) -> str:
    """Return a number as text with ``digits`` decimals, by default with three significant digits.

    Return a dash if the number is not finite. Scientific notation is used if the number would round to 0.

    Examples:
        >>> format_number(0.6321), format_number(0.6321, 2), format_number(0.00004, 2)
        ('0.632', '0.63', '4e-05')
        >>> format_number(2048.0), format_number(float("nan"))
        ('2048', '–')
    """
    if not math.isfinite(value):
        return MISSING
    if digits is None:
        return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}"
    return f"{value:.{digits}f}"
