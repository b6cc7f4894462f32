"""What worth measures: plain numbers of heads, blocks and sets of heads."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class HeadPlace(NamedTuple):
    """Which head of which call of which mixer."""

    stack: str
    layer: int
    site: str
    cross: bool
    occurrence: int
    """From 0, where the same mixer runs more than once in a block."""
    head: int


@dataclass(frozen=True)
class Estimates:
    """What the gradients at ξ = 1 say that removal costs; NaN where nothing is known."""

    gradient: Floats
    """∂L/∂ξ."""
    first_order: Floats
    """Mean over sequences of |∂L_i/∂ξ|."""
    fisher: Floats
    """½ Σ_i (∂S_i/∂ξ)² / N, of the sequences' totals S_i: the empirical Fisher."""
    curvature: Floats
    """½ of the Gauss–Newton matrix's diagonal, from random projections of the output."""
    removal: Floats
    """What removal costs by estimate: ``curvature − gradient``; without projections ``fisher − gradient``."""

    @property
    def heads(self) -> int:
        """How many there are."""
        return len(self.gradient)


@dataclass
class SiteImportance:
    """The heads of one mixer."""

    stack: str
    layer: int
    site: str
    cross: bool
    occurrence: int
    kind: str
    estimates: Estimates
    exact: Floats
    """The loss without each head, less that of the whole model; NaN where it was not run."""
    cosine: Floats
    """Of token states without each head with those of the whole model; NaN where it was not run."""
    why_not: str = ""
    """Why nothing is known of these heads; empty where it is."""

    def place(self, head: int) -> HeadPlace:
        """Of one head."""
        return HeadPlace(self.stack, self.layer, self.site, self.cross, self.occurrence, head)


@dataclass
class BlockImportance:
    """One block: what it adds to the residual stream."""

    stack: str
    layer: int
    site: str
    estimates: Estimates
    exact: float = math.nan
    why_not: str = ""


@dataclass(frozen=True)
class Removal:
    """What the model loses without a set of heads."""

    heads: tuple[HeadPlace, ...]
    loss: float
    """Without them."""
    cost: float
    """That less the loss of the whole model."""
    relative: float
    """The cost as a share of `Worth.reference`; NaN where that is 0."""


@dataclass(frozen=True)
class Joint:
    """The largest set of heads found that can go within a tolerance, by a run of the model without them."""

    removal: Removal
    tolerance: float
    order: str
    """What the heads were sorted by: ``exact`` or ``estimate``."""
    runs: int
    """How many sets were run."""


@dataclass
class Importance:
    """What every head, every block and a set of heads are worth to a model on some batches."""

    loss: str
    unit: str
    value: float
    """The loss of the whole model; 0 where it is how far the output moves."""
    sequences: int
    nonfinite: int
    """Sequences whose loss is not finite, left out."""
    counted: float
    """Tokens, labels or sequences over which the loss is a mean."""
    removal: str
    """What takes a head's place: ``zero`` or ``mean``."""
    probes: int
    seed: int
    sites: list[SiteImportance]
    blocks: list[BlockImportance]
    reference: float = math.nan
    """What costs are shares of: the loss; of an output that moves the entropy of the predictions, or 1, as
    the change is of the squared norm already."""
    reference_name: str = "the loss"
    joint: Joint | None = None
    spearman: float = math.nan
    """Rank correlation of estimate and exact over heads, where both are known."""
    forward: int = 0
    backward: int = 0
    """How often a batch was run forward and backward."""
    notes: list[str] = field(default_factory=list)
