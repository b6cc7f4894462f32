"""Addresses of heads and of calls of modules; records use them, so this module imports no torch."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class HeadId:
    """Address of a head, the same in every batch, run and file.

    Open parts (None or an empty name) address a whole mixer, layer, stack or model.

    Examples:
        >>> head = HeadId("encoder.layer", 3, "encoder.layer.3.attention.self", head=7)
        >>> str(head)
        'encoder.layer layer 3 head 7'
        >>> head.at(None) == HeadId("encoder.layer", 3, "encoder.layer.3.attention.self")
        True
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    stack: str = ""
    """Stack of blocks, such as ``encoder.layer``."""
    layer: Index | None = None
    """Block of the stack."""
    site: str = ""
    """Module that mixes tokens."""
    call: Index = 0
    """Call of the module within its layer: 0 unless the module runs several times there."""
    head: Index | None = None

    def at(self, head: int | None) -> "HeadId":
        """Return the address of another head of the same call; None addresses the call."""
        return replace(self, head=head)

    @property
    def sort_key(self) -> tuple[str, int, str, int, int]:
        """Key that sorts addresses by stack, layer, site, call and head; open parts come first."""
        layer, head = (-1 if part is None else part for part in (self.layer, self.head))
        return self.stack, layer, self.site, self.call, head

    def __str__(self) -> str:
        parts = [self.stack] if self.stack else []
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.head is not None:
            parts.append(f"head {self.head}")
        return " ".join(parts) or self.site or "model"


@dataclass(frozen=True)
class CallId:
    """A call of a module in one forward pass: known while the model runs, before its layer is known."""

    module: str
    index: int
    """Number of the call among the calls of the module, from 0."""


class CallCounter(Counter[str]):
    """Numbers the calls of each module in the order in which they are counted."""

    def count(self, module: str) -> CallId:
        """Count one more call of a module."""
        self[module] += 1
        return CallId(module, self[module] - 1)
