"""Input and output of each part of `compress`. CONTRIBUTING describes how to add a part."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

from rankwise._internals.forward import Change
from rankwise.compression.record import BudgetCurve, HeadWidth, LatentRank


@dataclass
class Job:
    """Data and target of one part."""

    model: nn.Module
    """In evaluation mode, with the changes of the earlier parts."""
    batches: list[Any]
    """Calibration data."""
    eval_batches: list[Any]
    """Data on which costs are measured: held-out data, or the calibration data."""
    keep: float | int | None = None
    """Share to keep, 0 < keep < 1; None if there is a tolerance."""
    tolerance: float | int | None = None
    """Largest cost, in the unit of the part."""
    calibrate: int = 0
    """Steps of Adam per layer."""
    seed: int = 0
    on_step: Callable[[str], None] = lambda step: None
    """Called with a description of each step."""


@dataclass
class Solution:
    """Change of one part, not yet applied, with its records."""

    change: Change
    heads: list[HeadWidth] = field(default_factory=list)
    latents: list[LatentRank] = field(default_factory=list)
    curves: list[BudgetCurve] = field(default_factory=list)
    kl: dict[str, float] = field(default_factory=dict)
    """Attention KL per site on the evaluation data; NaN if it was not measured."""
    key_heads: dict[str, list[int]] = field(default_factory=dict)
    """Numbers in the original of the key heads that are left in each layer, if heads were removed."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Layers that cannot be changed, each with the reason."""
    notes: list[str] = field(default_factory=list)
    advice: str = "Lower `keep` or raise the tolerance."
    """What to do if nothing was removed."""
    cost: float = math.nan
    """Cost on the evaluation data, in the unit of the tolerance; NaN if the part leaves it to `compress`."""
    complete: bool = True
    """False if Ctrl-C or a lack of memory stopped calibration."""


def solve_part(name: str, job: Job) -> Solution:
    """Import a part and return its solution."""
    solution: Solution = import_module(f"rankwise.compression.{name}_solve").solve(job)
    return solution
