"""What module names tell about blocks: which may be one, and which stack each belongs to."""

import re
from collections import Counter
from fnmatch import fnmatchcase

from torch import nn


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
