"""Audits: capture, measures and theory over batches, streaming."""

from rankwise.audit.comparison import Comparison
from rankwise.audit.failures import AuditError
from rankwise.audit.findings import CODES, check_codes
from rankwise.audit.fresh_copies import BaselineSettings
from rankwise.audit.fresh_weights import FreshWeightsError, fresh_weights
from rankwise.audit.history import History, compare
from rankwise.audit.matrix_picture import MatrixPicture
from rankwise.audit.numbers import check_method
from rankwise.audit.pictures import chosen_heads
from rankwise.audit.records import Finding, HeadRecord, LayerRecord, Place, Provenance, Unseen
from rankwise.audit.result import Audit
from rankwise.audit.run import audit
from rankwise.audit.steps import in_order
from rankwise.audit.worth_records import BlockWorth, HeadWorth, Removable, WorthRecord

__all__ = [
    "CODES",
    "Audit",
    "AuditError",
    "BaselineSettings",
    "BlockWorth",
    "Comparison",
    "Finding",
    "FreshWeightsError",
    "HeadRecord",
    "HeadWorth",
    "History",
    "LayerRecord",
    "MatrixPicture",
    "Place",
    "Provenance",
    "Removable",
    "Unseen",
    "WorthRecord",
    "audit",
    "check_codes",
    "check_method",
    "chosen_heads",
    "compare",
    "fresh_weights",
    "in_order",
]
