"""Audit models (batches → statistics → records → findings), and compare and merge saved audits.

Names are imported on first use, so that saved audits can be loaded, merged and compared without torch.
"""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.auditing.batches import text_batches
    from rankwise.auditing.comparison import Comparison
    from rankwise.auditing.findings import FINDING_RULES
    from rankwise.auditing.history import History, compare, sort_by_step
    from rankwise.auditing.initialization import AtInitSettings, InitializationError, reinitialized
    from rankwise.auditing.records import (
        AttentionMap,
        Finding,
        HeadRecord,
        Provenance,
        Remedy,
        StateRecord,
        UncapturedModule,
    )
    from rankwise.auditing.remedies import remedy_text
    from rankwise.auditing.result import Audit
    from rankwise.auditing.run import AuditError, audit
    from rankwise.auditing.settings import AuditSettings

__all__ = [
    "FINDING_RULES",
    "AtInitSettings",
    "AttentionMap",
    "Audit",
    "AuditError",
    "AuditSettings",
    "Comparison",
    "Finding",
    "HeadRecord",
    "History",
    "InitializationError",
    "Provenance",
    "Remedy",
    "StateRecord",
    "UncapturedModule",
    "audit",
    "compare",
    "reinitialized",
    "remedy_text",
    "sort_by_step",
    "text_batches",
]

__getattr__, __dir__ = lazy_names(__name__)
