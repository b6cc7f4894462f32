"""Calls of modules that may be blocks: which names may be, and which of two nested calls is one."""

import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from rankwise.tracing.block_stacks import BlockCall, same
from rankwise.tracing.module_calls import ModuleCall


@dataclass
class BlockCandidate:
    """A call of a module that may be a block."""

    call: ModuleCall
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
    block: BlockCall | None = None
    """It as a block, if it has the shape of one."""
    open: list["BlockCandidate"] = field(default_factory=list)
    """Calls inside it that may be blocks in its stead."""
    plain: set[tuple[str, type]] = field(default_factory=set)
    """Stacks and classes of the calls inside it that held no mixer."""
    settled: bool = False
    """Whether blocks were found inside it, so that it is none."""

    @property
    def kind(self) -> type:
        """Its module's class."""
        return type(self.call.module)

    def offered(self, stack: str) -> list["BlockCandidate"]:
        """The calls inside it of one stack that may be blocks in its stead."""
        return [inner for inner in self.open if inner.stack == stack]

    def reads_as(self, inner: "BlockCandidate") -> bool:
        """Whether a call inside it reads what it reads and gives what it gives."""
        ends = inner.gave is not None and self.gave is not None and same(self.gave, inner.gave)
        return ends and same(self.given, inner.given)

    def yields_to_inner(self) -> bool:
        """Whether the calls inside it are the blocks: a lone one only if it is all there is to it.

        Several are if each reads what the block before it gave, as in a stage of blocks; not if others of
        their class hold no mixer, as where sublayers for attention and for the feed-forward part come in one
        list.
        """
        if len(self.open) == 1:
            return self.reads_as(self.open[0])
        chained = all(inner.linked for inner in self.open[1:])
        return bool(self.open) and chained and not any((v.stack, v.kind) in self.plain for v in self.open)


def block_ranks(model: nn.Module, pattern: str | None) -> dict[str, int]:
    """Names that may be blocks, with their rank: 0 before 1 before 2.

    0: items of a list in which their class recurs (or that has one item), and names given by hand; 1:
    numbered attributes of one class (``block1``, ``block2``); 2: items of a mixed list, such as the
    alternating layers of a hybrid.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if pattern is not None:
        return {name: 0 for name in modules if matches(name, pattern)}
    ranks: dict[str, int] = {}
    for parent_name, parent in modules.items():
        children = {name: child for name, child in parent.named_children() if re.search(r"\d", name)}
        classes = Counter(type(child) for child in children.values())
        for child_name, child in children.items():
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            alike = classes[type(child)] > 1
            if child_name.isdigit():
                ranks[name] = 0 if alike or len(children) == 1 else 2
            elif alike:
                ranks[name] = 1
    return ranks


def matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern with shell wildcards; a ``*`` stays within one part of the name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def stack_of(name: str, owner: str = "") -> str:
    """The stack a block belongs to: ``encoder.layer.3`` → ``encoder.layer``, ``block2`` → ``block*``.

    Numbers of outer lists become ``*``, ``stages.1.blocks.0`` → ``stages.*.blocks``, unless they are in the
    name of the module that runs the blocks.
    """
    *outer, last = name.split(".")
    known = len(owner.split(".")) if owner else 0
    outer = ["*" if part.isdigit() and at >= known else part for at, part in enumerate(outer)]
    if not last.isdigit():
        outer.append(re.sub(r"\d+$", "*", last))
    return ".".join(outer) or "*"


def enclosing(names: set[str], candidates: dict[str, int]) -> set[str]:
    """The candidates that are, or hold, one of the names."""
    return {outer for outer in candidates if any(f"{name}.".startswith(f"{outer}.") for name in names)}
