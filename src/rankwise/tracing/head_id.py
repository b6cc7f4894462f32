"""Addresses of heads and of module calls; saved records use them, so this module imports no torch."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from rankwise.errors import strip_control

Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class HeadId:
    """Address of a head: equal in every batch, run and saved file.

    A field at its default (None or "") widens the address to a whole mixer, layer, stack or model.

    Examples:
        >>> head = HeadId("encoder.layer", 3, "encoder.layer.3.attention.self", head=7)
        >>> str(head)
        'encoder.layer layer 3 head 7'
        >>> head.at(None) == HeadId("encoder.layer", 3, "encoder.layer.3.attention.self")
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

    def at(self, head: int | None) -> "HeadId":
        """Return the address of another head of the same mixer call; None addresses the whole call."""
        return replace(self, head=head)

    @property
    def sort_key(self) -> tuple[str, int, str, int, int]:
        """Key that sorts addresses by stack, layer, site, call and head; None comes first."""
        layer, head = (-1 if index is None else index for index in (self.layer, self.head))
        return self.stack, layer, self.site, self.call, head

    def __str__(self) -> str:
        parts = [strip_control(self.stack)] if self.stack else []
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.head is not None:
            parts.append(f"head {self.head}")
        return " ".join(parts) or strip_control(self.site) or "model"


@dataclass(frozen=True)
class CallId:
    """Address of a module call in one forward pass; unlike `HeadId`, it contains no layer index."""

    module: str
    index: int
    """Index among all calls of the module in the forward pass, from 0."""


class CallCounter(Counter[str]):
    """Counter that numbers the calls of each module from 0."""

    def count(self, module: str) -> CallId:
        """Return the address of the next call of a module, and increment its count."""
        self[module] += 1
        return CallId(module, self[module] - 1)
