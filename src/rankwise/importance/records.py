"""Records of importance, as audits save and merge them. This module does not import torch."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from rankwise._internals.records import Address, Count, Number, Record
from rankwise.errors import RecordError

SETTINGS = ("loss", "unit", "reference_name", "chance", "probes", "seed", "tokens")
COSTS = ("curvature", "estimate", "exact")
SUMS = ("sequences", "nonfinite_sequences", "counted", "forward", "backward")
FEW_PASSES = 50
"""Number of forward passes per batch up to which costs are exact by default: about 100 heads and blocks.
Estimates take fewer passes, but on Gemma 3 270M their Spearman correlation with exact costs is only 0.82."""
MORE_TRIES = 8
"""Number of heads that are tried one by one after the first head that exceeds the tolerance. Of 16 tries, 8
find all but one head on Gemma 3 270M, 4 on all-MiniLM-L6-v2; the demo needs none."""
NOT_SEARCHED = "which heads can go together is not known of merged audits: that takes runs on all of the data"


class HeadImportance(Record):
    """Increase of the model's loss if a head is removed, in the unit of the loss.

    A number is NaN if it is unknown. Below 0, the model is better without the head.
    """

    curvature: Number = math.nan
    """½ ∂²L/∂ξ² for a gate (factor) ξ = 1 on the head's output: a Gauss–Newton estimate from random
    projections of the output. The heads of a layer share its sum in proportion to sums over gates per token.
    Without projections: half of the empirical Fisher information, ½ Σ_i (∂S_i/∂ξ)² / N, with S_i the summed
    loss of sequence i, and N tokens or labels."""
    estimate: Number = math.nan
    """Estimated cost of removal, to second order: curvature − ∂L/∂ξ."""
    exact: Number = math.nan
    """Exact cost of removal, by a run without the head."""
    standard_error: Number = math.nan
    """Standard error of the exact cost, because the loss is read at n of the N tokens of each sequence: the
    root of Σ N² (1 − n/N) s²/n over sequences, divided by Σ N, with s² the variance over tokens of the change
    of their losses. 0 if all tokens are read, NaN if one of several is read or the cost is an estimate. Other
    sequences differ more."""
    why_not: str = ""
    """Reason why no number is known. Empty if a number is known."""

    @property
    def cost(self) -> float:
        """Cost of removal: exact if it is known, otherwise the estimate."""
        return self.estimate if math.isnan(self.exact) else self.exact

    @property
    def method(self) -> Literal["exact", "estimated"]:
        """Origin of `cost`: a run without the head, or an estimate."""
        return "estimated" if math.isnan(self.exact) else "exact"


class BlockImportance(HeadImportance):
    """Importance of a block: cost if its update of the residual stream is removed."""

    stack: str
    layer: Count
    site: str


class RemovableSet(Record):
    """Largest set of heads that a search found to be removable together, by runs without these heads."""

    heads: list[Address]
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest allowed cost on the choosing sequences, divided by the reference, which is defined as in
    `ImportanceRecord.reference`."""
    chosen_on: Count
    """Number of sequences on which the set was chosen: every second one."""
    chosen_relative: Number
    """Cost on these sequences divided by the reference, at most `tolerance`. Lower than on other sequences,
    because the search prefers heads that happen to be cheap on these."""
    held_out: Count
    """Number of other sequences, on which the set is priced. If it is 0, `loss`, `cost` and `relative` are
    NaN."""
    loss: Number = math.nan
    """Loss without the heads on the held-out sequences."""
    cost: Number = math.nan
    """Increase of the loss on the held-out sequences."""
    relative: Number = math.nan
    """Held-out cost divided by the reference of the same sequences. It may exceed `tolerance`."""
    low: Number = math.nan
    """Lower end of a 95 % interval of `relative` over sequences, by Student's t. NaN if there are fewer than
    two."""
    high: Number = math.nan
    """Upper end of the interval."""
    sorted_by: Literal["exact", "estimate"]
    """Kind of costs by which heads were sorted."""
    runs: Count
    """Number of sets of heads for which the model was run."""


class ImportanceRecord(Record):
    """Record of how importance was measured, with the importance of blocks and the removable heads."""

    loss: str
    unit: str
    value: Number
    """Loss of the whole model. 0 if the loss measures the change of the output."""
    standard_error: Number = 0.0
    """Standard error of `value`, as `HeadImportance.standard_error`, from the losses of tokens."""
    tokens: Count | None = None
    """Largest number of tokens of each sequence at which the loss was read. None: all."""
    reference: Number
    """Number by which costs are divided: the loss, an entropy or a squared norm."""
    reference_name: str = "the loss"
    """Name of the reference: the loss, the entropy of predictions, or the squared norm of the output."""
    chance: Number = math.nan
    """Loss if all classes are equally likely. NaN if the loss is not a cross-entropy of classes."""
    sequences: Count
    nonfinite_sequences: Count = 0
    """Number of sequences that were left out because their loss is not finite."""
    counted: Number
    """Number of tokens, labels or sequences that the loss is averaged over."""
    probes: Count
    """Number of random projections of the output per batch."""
    seed: int
    choice: str = ""
    """Method and reason, if the settings left the choice of exact costs or estimates open."""
    blocks: list[BlockImportance] = Field(default_factory=list)
    removable: RemovableSet | None = None
    forward: Count = 0
    backward: Count = 0
    """Number of backward passes, each of one batch. `forward` is the number of forward passes, also of passes
    that run only some blocks, without the pass that finds the output head."""
    notes: list[str] = Field(default_factory=list)

    @property
    def quantity(self) -> str:
        """Name of the loss, with its unit."""
        return f"{self.loss} ({self.unit})"

    @property
    def is_chance(self) -> bool:
        """True if the loss is above 95 % of ``chance``: the model is not trained, or not for such data."""
        return self.value > 0.95 * self.chance

    def share(self, cost: float) -> float:
        """Return a cost divided by the reference. Return NaN if the reference is 0."""
        return cost / self.reference if self.reference else math.nan


I = TypeVar("I", bound=HeadImportance)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


@dataclass
class Importance:
    """Importance of every head of a model on some batches."""

    record: ImportanceRecord
    heads: dict[Address, HeadImportance]
    complete: bool = True
    """False if Ctrl-C stopped the removals."""

    def merge(self, other: "Importance") -> None:
        """Add the importance measured on other sequences: costs become means over all tokens.

        The removable set becomes None. Raise `RecordError` if the two were measured with different settings.
        """
        first, second = self.record, other.record
        for name in SETTINGS:
            values = [getattr(record, name) for record in (first, second)]
            if values[0] != values[1] and not all(map(_is_nan, values)):
                raise RecordError(
                    "importance of audits to merge", expected=f"the same {name} in all of them",
                    got=" and ".join(map(repr, values)),
                    fix="Audit all shards with the same settings of importance.",
                )  # fmt: skip
        share = second.counted / (first.counted + second.counted)

        def mean(old: object, new: object, name: str) -> float:
            before: float = getattr(old, name)
            return before + (getattr(new, name) - before) * share

        def error(old: HeadImportance | ImportanceRecord, new: HeadImportance | ImportanceRecord) -> float:
            return math.hypot((1 - share) * old.standard_error, share * new.standard_error)

        def joined(old: I, new: I) -> I:
            means = {name: mean(old, new, name) for name in COSTS}
            why_not = min((importance.why_not for importance in (old, new) if importance.why_not), default="")
            return old.model_copy(update=means | {"why_not": why_not, "standard_error": error(old, new)})

        self.heads = {
            address: joined(self.heads[address], head)
            for address, head in other.heads.items()
            if address in self.heads
        }
        blocks, more = (
            {(block.stack, block.layer, block.site): block for block in record.blocks}
            for record in (first, second)
        )
        value = mean(first, second, "value")
        is_loss = first.reference_name == "the loss"
        notes = [note for note in (*first.notes, *second.notes) if note != NOT_SEARCHED]
        self.record = first.model_copy(
            update={name: getattr(first, name) + getattr(second, name) for name in SUMS}
            | {
                "value": value,
                "standard_error": error(first, second),
                "reference": abs(value) if is_loss else mean(first, second, "reference"),
                "blocks": [joined(block, more[key]) for key, block in blocks.items() if key in more],
                "removable": None,
                "notes": [*dict.fromkeys(notes), *([NOT_SEARCHED] if self.heads else [])],
            }
        )
