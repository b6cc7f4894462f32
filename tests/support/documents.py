"""Documents of all kinds of reports."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from tests.support.records import NASTY, nasty, only_nan

from rankwise.auditing import Audit, History
from rankwise.auditing.comparison import compare_two
from rankwise.compression import Compression, Preview
from rankwise.plan import HeadDimPlan
from rankwise.report.audit_report import audit_document
from rankwise.report.comparison_report import comparison_document, history_document
from rankwise.report.compression_report import compression_document, preview_document
from rankwise.report.document import Cell as Cell
from rankwise.report.document import Document
from rankwise.report.document import Figure as Figure
from rankwise.report.document import Section as Section
from rankwise.report.document import Table as Table
from rankwise.report.format import RANK as RANK
from rankwise.report.page import page_text
from rankwise.report.plan_report import plan_document
from rankwise.report.skip_report import certificate_document
from rankwise.skips import SkipCertificate


def page(audit: Audit) -> str:
    """The page of an audit."""
    return page_text(audit_document(audit))


def data(audit: Audit) -> Mapping[str, Any]:
    """The data that the scripts of an audit's page read."""
    return audit_document(audit).data


def nasty_plan() -> Document:
    plan = HeadDimPlan(
        tokens=64, mask=NASTY, least_gain=0.01, one_hot_rank=40.0, trials=2, head_dim=4,
        curve=[(2, 0.2, math.nan), (4, 0.4, 0.1)], interval=(2, 4), saturated=True,
        notes=[NASTY], about={NASTY: NASTY}, complete=False,
    )  # fmt: skip
    return plan_document(plan)


def nasty_record(kind: type[BaseModel], **values: Any) -> Any:
    """Return a record of texts that would escape and numbers that are not finite; values replace fields."""
    annotations = {name: field.annotation for name, field in kind.model_fields.items()}
    for name, annotation in annotations.items():
        [item] = get_args(annotation) if get_origin(annotation) is list else [None]
        text = str(annotation)
        if name in values or "Literal" in text:
            continue
        if get_origin(annotation) is dict:
            values[name] = {NASTY: NASTY}
        elif item is not None:
            is_record = isinstance(item, type) and issubclass(item, BaseModel)
            plain: Any = [1] if get_origin(item) is list else NASTY
            values[name] = [nasty_record(item) if is_record else plain]
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            values[name] = nasty_record(annotation)
        elif "bool" in text:
            values[name] = None if "None" in text else False
        else:
            values[name] = NASTY if "str" in text else math.inf if "float" in text else 1
    return kind(**values)


def nasty_certificate() -> Document:
    return certificate_document(nasty_record(SkipCertificate, keep_spread=0.5))


DOCUMENTS: dict[str, Callable[[], Document]] = {
    "audit": lambda: audit_document(nasty()),
    "comparison": lambda: comparison_document(compare_two(nasty(), only_nan())),
    "history": lambda: history_document(History.of([nasty(), only_nan(), only_nan()], [NASTY, "b", "c"])),
    "plan": nasty_plan,
    "compression": lambda: compression_document(
        nasty_record(Compression, timed="decoding step after 9 tokens")
    ),
    "preview": lambda: preview_document(nasty_record(Preview)),
    "certificate": nasty_certificate,
}
"""The seven kinds, with names that would escape and numbers that are not finite."""
