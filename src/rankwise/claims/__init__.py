"""Claims of papers about ranks and attention, checked on a model."""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.claims.records import CheckedClaim
    from rankwise.claims.table import check

__all__ = ["CheckedClaim", "check"]

__getattr__, __dir__ = lazy_names(__name__)
