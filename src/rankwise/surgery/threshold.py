"""The least λ that keeps tokens apart, found by trying."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rankwise.capture.names import stack_of
from rankwise.surgery.examples import Example
from rankwise.surgery.skips import SkipSite
from rankwise.surgery.watch import Added, watch_sums
from rankwise.theory import spread

GRID = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
HALVINGS = 5
"""A threshold is known to 1/32 of the gap between two points of the grid."""


def stacks_of(seen: Sequence[Added]) -> dict[str, list[int]]:
    """Which skips belong to one stack of blocks, by its name.

    Args:
        seen: what each skip adds, in the order they run.
    """
    found: dict[str, list[int]] = {}
    for at, one in enumerate(seen):
        found.setdefault(_stack(one.site), []).append(at)
    return found


def kept_by(seen: Sequence[Added]) -> dict[str, float]:
    """The part of μ/‖Y‖ that each stack keeps, from its first skip's residual to its last skip's sum.

    Args:
        seen: what each skip adds.
    """
    found = {}
    for stack, places in stacks_of(seen).items():
        first, last = seen[places[0]], seen[places[-1]]
        several = first.mask.sum(-1) > 1
        before, after = _share(first.residual, first.mask), _share(last.total, last.mask)
        found[stack] = float((after / before)[several].mean())
    return found


def threshold(model: nn.Module, batch: Example, sites: Sequence[SkipSite], target: float) -> dict[str, float]:
    """The least |λ|, one for all layers, from which on each stack keeps a part of μ/‖Y‖.

    "From which on" is on a grid up to 16: from the least point of it such that this one and all above pass,
    down by bisection towards the point below, which does not.

    Args:
        model: the model.
        batch: what to run it on.
        sites: its sites.
        target: the part to keep.

    Returns:
        By stack; infinite where the last point of the grid does not pass.
    """

    def kept(scale: float) -> dict[str, float]:
        return kept_by(watch_sums(model, batch, sites, {site.name: scale for site in sites}))

    on_grid = [kept(scale) for scale in GRID]
    found = {}
    for stack in on_grid[0]:
        passes = [point[stack] >= target for point in on_grid]
        found[stack] = _bisected(passes, partial(_keeps, kept, stack, target))
    return found


def _keeps(kept: Callable[[float], dict[str, float]], stack: str, target: float, scale: float) -> bool:
    return kept(scale)[stack] >= target


def _bisected(passes: Sequence[bool], good) -> float:  # type: ignore[no-untyped-def]
    first = len(passes)
    while first and passes[first - 1]:
        first -= 1
    if first == 0:
        return 0.0
    if first == len(passes):
        return math.inf
    low, high = GRID[first - 1], GRID[first]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _share(rows: Tensor, mask: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rows.double() * mask[..., None], dim=(-2, -1))
    return (spread(rows, mask) / size).nan_to_num(0.0)


def _stack(site: SkipSite) -> str:
    parts = site.name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return stack_of(".".join(parts[: numbers[-1] + 1])) if numbers else site.name
