"""Table of claims: the decorator that registers the function that checks a claim."""

from collections.abc import Callable
from dataclasses import dataclass

from rankwise.claims.evidence import Evidence

Check = Callable[[Evidence], tuple[str, bool]]
"""Function of the evidence that returns the number of the model in words, and True if the claim holds."""


@dataclass(frozen=True)
class Claim:
    """Claim of a paper and the function that checks it; the fields are those of `CheckedClaim`."""

    check: Check
    statement: str
    source: str
    theirs: str
    definition: str


CLAIMS: dict[str, Claim] = {}
"""Claims by code, in the order of the table."""


def claim(statement: str, *, source: str, theirs: str, definition: str) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a claim; the arguments are the fields of `Claim`."""

    def register(check: Check) -> Check:
        CLAIMS[check.__name__] = Claim(check, statement, source, theirs, definition)
        return check

    return register
