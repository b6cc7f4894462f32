"""Calls of modules that may be blocks, and which of two nested ones is."""

from dataclasses import dataclass, field

from torch import Tensor

from rankwise.capture.chains import Claim, same
from rankwise.capture.frames import Frame


@dataclass
class Visit:
    """A call of a module that may be a block."""

    frame: Frame
    stack: str
    rank: int
    given: Tensor
    """What it reads."""
    before: Tensor
    """The same, safe from changes in place."""
    linked: bool
    """Whether it reads what the block before it gave."""
    apart: bool
    """Whether a like module with blocks inside ran before it, and gave something else."""
    gave: Tensor | None = None
    claim: Claim | None = None
    """It as a block, if it has the shape of one."""
    open: list["Visit"] = field(default_factory=list)
    """Calls inside it that may be blocks in its stead."""
    plain: set[tuple[str, type]] = field(default_factory=set)
    """Stacks and classes of the calls inside it that held no mixer."""
    settled: bool = False
    """Whether blocks were found inside it, so that it is none."""

    @property
    def kind(self) -> type:
        """Its module's class."""
        return type(self.frame.module)

    def offered(self, stack: str) -> list["Visit"]:
        """The calls inside it of one stack that may be blocks in its stead."""
        return [inner for inner in self.open if inner.stack == stack]

    def reads_as(self, inner: "Visit") -> bool:
        """Whether a call inside it reads what it reads and gives what it gives."""
        ends = inner.gave is not None and self.gave is not None and same(self.gave, inner.gave)
        return ends and same(self.given, inner.given)

    def yields_to_inner(self) -> bool:
        """Whether the calls inside it are the blocks: a lone one only if it is all there is to it.

        Several are if each reads what the one before it gave, as in a stage of blocks; not if others of their
        class hold no mixer, as where sublayers for attention and for the feed-forward part come in one list.
        """
        if len(self.open) == 1:
            return self.reads_as(self.open[0])
        chained = all(inner.linked for inner in self.open[1:])
        return bool(self.open) and chained and not any((v.stack, v.kind) in self.plain for v in self.open)
