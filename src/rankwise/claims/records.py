"""Record of a claim that was checked on a model. This module does not import torch."""

from typing import Literal

from rankwise._internals.records import Record


class CheckedClaim(Record):
    """Claim of a paper with the paper's number, the number of the model, and the outcome."""

    code: str
    """Name of the function in `rankwise.claims` that checks the claim."""
    statement: str
    source: str
    """Paper, and the part of it that makes the claim."""
    theirs: str
    ours: str = ""
    """Number of this model; empty if nothing was measured."""
    outcome: Literal["holds", "does not hold", "cannot be measured here"] = "cannot be measured here"
    reason: str = ""
    """Reason why the claim cannot be measured here."""
    definition: str
    """What is measured, when the claim holds, and how both differ from the paper."""
