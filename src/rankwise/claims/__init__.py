"""Claims of papers about ranks and attention, checked on a model: each with their number and the model's."""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.claims.records import CheckedClaim, ClaimTable
    from rankwise.claims.run import CLAIMS, check

__all__ = ["CLAIMS", "CheckedClaim", "ClaimTable", "check"]

__getattr__, __dir__ = lazy_names(__name__)
