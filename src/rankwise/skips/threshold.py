"""The least λ that keeps tokens apart, found by trying."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rankwise._internals.forward import Batch
from rankwise.measures import token_spread
from rankwise.skips.norms import Norm
from rankwise.skips.skip_sums import SkipSum, skip_sums
from rankwise.skips.skips import SkipSite
from rankwise.tracing.block_finder import stack_of

GRID = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
PARTS = 50
"""A threshold is known to 1/50 of the gap between two points of the grid: a number of few digits."""


class Both(NamedTuple):
    """One number for each way to measure collapse."""

    share: float | None
    """Of μ/‖Y‖."""
    mu: float | None
    """Of μ."""


def stacks_of(seen: Sequence[SkipSum]) -> dict[str, list[int]]:
    """Which skips belong to one stack of blocks, by its name.

    Args:
        seen: what each skip adds, in the order they run.
    """
    found: dict[str, list[int]] = {}
    for at, added in enumerate(seen):
        found.setdefault(_stack(added.site), []).append(at)
    return found


def equal_at_start(seen: Sequence[SkipSum]) -> dict[str, Bool[Tensor, " B"]]:
    """The sequences of several tokens that are all equal, up to rounding, where a stack starts.

    Args:
        seen: what each skip adds.
    """
    found = {}
    for stack, numbers in stacks_of(seen).items():
        first = seen[numbers[0]]
        rounding = torch.finfo(first.residual.dtype).eps
        found[stack] = (first.mask.sum(-1) > 1) & (_share(first.residual, first.mask) <= rounding)
    return found


def kept_by(seen: Sequence[SkipSum], norms: Mapping[str, Norm]) -> dict[str, Both]:
    """What each stack keeps, from its first skip's residual to its last skip's sum, as a mean over sequences.

    Those of equal tokens at the start are left out; so is μ where the norm after the last sum is not known.

    Args:
        seen: what each skip adds.
        norms: what reads the sum, by name of the site.
    """
    equal = equal_at_start(seen)
    found = {}
    for stack, numbers in stacks_of(seen).items():
        first, last = seen[numbers[0]], seen[numbers[-1]]
        apart = (first.mask.sum(-1) > 1) & ~equal[stack]
        if not bool(apart.any()):
            found[stack] = Both(None, None)
            continue
        norm = norms[last.site.name]
        shares = _share(last.total, last.mask) / _share(first.residual, first.mask)
        ends = token_spread(norm.of(last.total.double()), last.mask, normalized=False).nan_to_num(0.0)
        mus = ends / token_spread(first.residual, first.mask, normalized=False)
        mu = None if norm.kind == "unknown" else float(mus[apart].mean())
        found[stack] = Both(float(shares[apart].mean()), mu)
    return found


def threshold(
    model: nn.Module, batch: Batch, sites: Sequence[SkipSite], target: float, norms: Mapping[str, Norm]
) -> dict[str, Both]:
    """The least |λ|, one for all layers, from which on each stack keeps a part of μ/‖Y‖, and of μ.

    "From which on" is on a grid up to 16: from the least point of it such that it and all above pass,
    down by bisection towards the point below, which does not.

    Args:
        model: the model.
        batch: what to run it on.
        sites: its sites.
        target: the part to keep.
        norms: what reads the sum, by name of the site.

    Returns:
        By stack; infinite where the last point of the grid does not pass, None where nothing is to keep or
        what is kept is not known.
    """

    @cache
    def kept(scale: float) -> dict[str, Both]:
        return kept_by(skip_sums(model, batch, sites, {site.name: scale for site in sites}), norms)

    def least(stack: str, measure: int) -> float | None:
        if all(kept(scale)[stack][measure] is None for scale in GRID):
            return None

        def good(scale: float) -> bool:
            part = kept(scale)[stack][measure]
            return part is not None and part >= target

        return _bisected([good(scale) for scale in GRID], good)

    return {stack: Both(least(stack, 0), least(stack, 1)) for stack in kept(GRID[0])}


def _bisected(passes: Sequence[bool], good: Callable[[float], bool]) -> float:
    first = len(passes)
    while first and passes[first - 1]:
        first -= 1
    if first == 0:
        return 0.0
    if first == len(passes):
        return math.inf
    below, above = GRID[first - 1], GRID[first]
    low, high = 0, PARTS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(_between(below, above, middle)) else (middle, high)
    return _between(below, above, high)


def _between(below: float, above: float, part: int) -> float:
    return round(below + (above - below) * part / PARTS, 6)


def _share(rows: Tensor, mask: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rows.double().masked_fill(~mask[..., None], 0), dim=(-2, -1))
    return (token_spread(rows, mask, normalized=False) / size).nan_to_num(0.0)


def _stack(site: SkipSite) -> str:
    parts = site.name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return stack_of(".".join(parts[: numbers[-1] + 1])) if numbers else site.name
