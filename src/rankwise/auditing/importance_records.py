"""What an audit says of worth: plain records, no torch."""

import math
from typing import Annotated, Literal

from pydantic import Field

from rankwise._internals.records import Count, Number, Record
from rankwise.tracing.head_id import HeadId


class HeadImportance(Record):
    """What the model loses without a head, on the batches of the audit, in the unit of the audit's worth.

    NaN where a number is not known. Positive: the model is worse without the head.
    """

    gradient: Number = math.nan
    """∂L/∂ξ of a gate ξ = 1 on what the head gives; 0 of a loss that is how far the output moves."""
    first_order: Number = math.nan
    """Mean over sequences of |∂L_i/∂ξ| (Michel et al., 2019)."""
    fisher: Number = math.nan
    """½ of the empirical Fisher: squares of the gradients of the sequences' totals, per token."""
    curvature: Number = math.nan
    """½ of the Gauss–Newton diagonal, from random projections of the output."""
    estimate: Number = math.nan
    """What removal costs to second order: curvature − gradient; without projections fisher − gradient."""
    exact: Number = math.nan
    """The loss without the head, less that of the whole model."""
    cosine: Number = math.nan
    """Mean cosine of token states without the head with those of the whole model, where the loss is of states
    and the head was removed."""
    why_not: str = ""
    """Why nothing is known; empty where something is."""

    @property
    def cost(self) -> float:
        """What removal costs: exact where it was run, else the estimate."""
        return self.estimate if math.isnan(self.exact) else self.exact

    @property
    def how(self) -> str:
        """Where `cost` is from."""
        return "estimated" if math.isnan(self.exact) else "exact"


class BlockImportance(HeadImportance):
    """What the model loses without what a block adds to the residual stream."""

    stack: str
    layer: Count
    site: str


class Removable(Record):
    """The largest set of heads found that can go together: the model was run without them."""

    heads: list[HeadId]
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """The largest cost allowed, as a share of the reference."""
    loss: Number
    """Without them."""
    cost: Number
    """That less the loss of the whole model."""
    relative: Number
    """The cost as a share of the reference."""
    order: Literal["exact", "estimate"]
    """What heads were sorted by."""
    runs: Count
    """Sets that were run."""


class ImportanceRecord(Record):
    """What was lost, how it was measured, and what of the model can go."""

    loss: str
    """Its name."""
    unit: str
    value: Number
    """Of the whole model; 0 where the loss is how far the output moves."""
    reference: Number = math.nan
    """What costs and the tolerance are shares of; NaN in older files: the loss, or 1 where that is 0."""
    reference_name: str = "the loss"
    """The loss, the entropy of the predictions where these move, or the squared norm of the output."""
    sequences: Count
    nonfinite: Count = 0
    """Sequences whose loss is not finite, left out."""
    counted: Number
    """Tokens, labels or sequences over which the loss is a mean."""
    removal: Literal["zero", "mean"]
    """What takes a removed head's place."""
    probes: Count
    """Random projections of each batch's output."""
    seed: int
    spearman: Number = math.nan
    """Rank correlation of estimate and exact over heads, where both are known."""
    blocks: list[BlockImportance] = Field(default_factory=list)
    removable: Removable | None = None
    forward: Count = 0
    backward: Count = 0
    """How often a batch was run forward and backward."""
    notes: list[str] = Field(default_factory=list)

    def share(self, cost: float) -> float:
        """A cost as a share of the reference; NaN where that is 0.

        Args:
            cost: in the unit of the loss.
        """
        reference = self.reference if math.isfinite(self.reference) else abs(self.value) or 1.0
        return cost / reference if reference else math.nan
