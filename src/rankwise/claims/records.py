"""Records of claims that were checked on a model. This module does not import torch."""

from typing import Literal

from pydantic import Field

from rankwise._internals.files import SavedRecord
from rankwise._internals.records import Count, Record

Outcome = Literal["holds", "does not hold", "cannot be measured here"]


class CheckedClaim(Record):
    """Claim of a paper, the paper's number, the number of the model, and the outcome."""

    code: str
    """Name of the function in `rankwise.claims` that checks the claim."""
    statement: str
    source: str
    """Paper and the part of it that makes the claim."""
    theirs: str
    """Number or statement of the paper."""
    ours: str = ""
    """Number of this model; empty if nothing was measured."""
    outcome: Outcome
    reason: str = ""
    """Reason why the claim cannot be measured here."""
    definition: str
    """What was measured, the rule of the outcome, and where both differ from the paper."""


class ClaimTable(SavedRecord):
    """Claims of papers, checked on one model and one set of batches."""

    format: Literal["rankwise-claims"] = "rankwise-claims"
    schema_version: Literal[1] = 1
    model: str = ""
    data: str = ""
    sequences: Count = 0
    tokens: Count = 0
    """Number of real tokens in all sequences."""
    claims: list[CheckedClaim]
    notes: list[str] = Field(default_factory=list)
    command: str = ""

    def __getitem__(self, code: str) -> CheckedClaim:
        """Return the claim with a code."""
        return next(claim for claim in self.claims if claim.code == code)
