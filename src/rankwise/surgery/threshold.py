"""The least λ that keeps tokens apart, found by trying."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rankwise.capture.names import stack_of
from rankwise.surgery.examples import Example
from rankwise.surgery.skips import SkipSite
from rankwise.surgery.watch import Added, watch_sums
from rankwise.theory import spread

GRID = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
HALVINGS = 5
"""A threshold is known to 1/32 of the gap between two points of the grid."""


class Both(NamedTuple):
    """One number for each way to measure collapse."""

    share: float | None
    """Of μ/‖Y‖."""
    mu: float | None
    """Of μ."""


def norm_of(model: nn.Module, site: SkipSite) -> tuple[str, bool, float]:
    """The norm that reads the sum at a site: its kind, whether it centres, and its ε.

    Args:
        model: the model.
        site: the site.
    """
    if not site.place.norm:
        return "none", False, 0.0
    module = model.get_submodule(site.place.norm)
    eps = next((getattr(module, name) for name in ("eps", "variance_epsilon") if hasattr(module, name)), 0.0)
    centres = isinstance(module, nn.LayerNorm)
    return ("LayerNorm" if centres else "RMSNorm"), centres, float(eps or 0.0)


def normed(rows: Tensor, centre: bool, eps: float) -> Tensor:
    """LayerNorm or RMSNorm without its gain and bias.

    Args:
        rows: what it reads.
        centre: whether it is LayerNorm.
        eps: its ε.
    """
    rows = rows - rows.mean(-1, keepdim=True) if centre else rows
    size = (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    return rows / torch.where(size > 0, size, 1.0)


def stacks_of(seen: Sequence[Added]) -> dict[str, list[int]]:
    """Which skips belong to one stack of blocks, by its name.

    Args:
        seen: what each skip adds, in the order they run.
    """
    found: dict[str, list[int]] = {}
    for at, one in enumerate(seen):
        found.setdefault(_stack(one.site), []).append(at)
    return found


def equal_at_start(seen: Sequence[Added]) -> dict[str, Bool[Tensor, " B"]]:
    """The sequences of several tokens that are all equal, up to rounding, where a stack starts.

    Args:
        seen: what each skip adds.
    """
    found = {}
    for stack, places in stacks_of(seen).items():
        first = seen[places[0]]
        rounding = torch.finfo(first.residual.dtype).eps
        found[stack] = (first.mask.sum(-1) > 1) & (_share(first.residual, first.mask) <= rounding)
    return found


def kept_by(model: nn.Module, seen: Sequence[Added]) -> dict[str, Both]:
    """What each stack keeps, from its first skip's residual to its last skip's sum, as a mean over sequences.

    Those of equal tokens at the start are left out.

    Args:
        model: the model.
        seen: what each skip adds.
    """
    equal = equal_at_start(seen)
    found = {}
    for stack, places in stacks_of(seen).items():
        first, last = seen[places[0]], seen[places[-1]]
        apart = (first.mask.sum(-1) > 1) & ~equal[stack]
        if not bool(apart.any()):
            found[stack] = Both(None, None)
            continue
        kind, centre, eps = norm_of(model, last.site)
        end = last.total if kind == "none" else normed(last.total.double(), centre, eps)
        shares = _share(last.total, last.mask) / _share(first.residual, first.mask)
        mus = spread(end, last.mask).nan_to_num(0.0) / spread(first.residual, first.mask)
        found[stack] = Both(float(shares[apart].mean()), float(mus[apart].mean()))
    return found


def threshold(model: nn.Module, batch: Example, sites: Sequence[SkipSite], target: float) -> dict[str, Both]:
    """The least |λ|, one for all layers, from which on each stack keeps a part of μ/‖Y‖, and of μ.

    "From which on" is on a grid up to 16: from the least point of it such that this one and all above pass,
    down by bisection towards the point below, which does not.

    Args:
        model: the model.
        batch: what to run it on.
        sites: its sites.
        target: the part to keep.

    Returns:
        By stack; infinite where the last point of the grid does not pass, None where nothing is to keep.
    """

    @cache
    def kept(scale: float) -> dict[str, Both]:
        return kept_by(model, watch_sums(model, batch, sites, {site.name: scale for site in sites}))

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
    low, high = GRID[first - 1], GRID[first]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _share(rows: Tensor, mask: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rows.double().masked_fill(~mask[..., None], 0), dim=(-2, -1))
    return (spread(rows, mask) / size).nan_to_num(0.0)


def _stack(site: SkipSite) -> str:
    parts = site.name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return stack_of(".".join(parts[: numbers[-1] + 1])) if numbers else site.name
