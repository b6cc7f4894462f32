"""Record of a claim that was checked on a model. This module does not import torch."""

from typing import Literal

from rankwise._internals.records import Record


class CheckedClaim(Record):
    """Claim of a paper with the paper's number, the number of the model, and the outcome."""

    code: str
    """Name of the function that checks the claim."""
    statement: str
    """The claim in one line."""
    source: str
    """Paper, and the part of it that makes the claim."""
    theirs: str
    """Number of the paper."""
    yours: str = ""
    """Number of the model; empty if nothing was measured."""
    outcome: Literal["holds", "does not hold", "cannot be measured here"] = "cannot be measured here"
    """Result of the check."""
    reason: str = ""
    """Reason why the claim cannot be measured."""
    definition: str
    """Measured quantity, condition under which the claim holds, and how both differ from the paper."""
