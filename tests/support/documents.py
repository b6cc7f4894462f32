"""Documents of all kinds of reports."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from tests.support.records import NASTY, nasty, only_nan

from rankwise.auditing import Audit, History
from rankwise.auditing.comparison import compare_two
from rankwise.compression import BudgetCurve, BudgetPoint, Compression, HeadWidth, LatentRank, LayerCost
from rankwise.plan import HeadDimPlan, TrainedWidth
from rankwise.report.audit_report import audit_document
from rankwise.report.comparison_report import comparison_document, history_document
from rankwise.report.compression_report import compression_document
from rankwise.report.document import Cell as Cell
from rankwise.report.document import Document
from rankwise.report.document import Figure as Figure
from rankwise.report.document import Section as Section
from rankwise.report.document import Table as Table
from rankwise.report.format import RANK as RANK
from rankwise.report.page import page_text
from rankwise.report.plan_report import plan_document
from rankwise.report.skip_report import certificate_document
from rankwise.skips import LayerCertificate, SkipCertificate, StackCertificate
from rankwise.tracing import HeadId


def page(audit: Audit) -> str:
    """The page of an audit."""
    return page_text(audit_document(audit))


def data(audit: Audit) -> Mapping[str, Any]:
    """The data that the scripts of an audit's page read."""
    return audit_document(audit).data(0)


def nasty_plan() -> Document:
    trained = [TrainedWidth(head=HeadId(stack=NASTY, layer=0, head=0), width=4, required=math.nan)]
    plan = HeadDimPlan(
        tokens=64, mask=NASTY, tolerance=0.01, barrier=40.0, inputs=NASTY, trials=2, head_dim=4,
        curve=[(2, 0.2, math.nan), (4, 0.4, 0.1)], interval=(2, 4), saturated=True, trained=trained,
        notes=[NASTY], about={NASTY: NASTY}, complete=False,
    )  # fmt: skip
    return plan_document(plan)


def nasty_compression() -> Document:
    place: dict[str, Any] = {"site": NASTY, "layer": 0}
    unknown = dict.fromkeys(("kl", "kl_calibrated"), math.nan)
    record = Compression(
        model=NASTY,
        parts=[NASTY],
        complete=False,
        sequences=1,
        tokens=2,
        measured_on=NASTY,
        heads=[
            HeadWidth(part=part, stack=NASTY, head=0, before=8, width=4, **place, **unknown)
            for part in ("heads", "width")
        ],
        layers=[LayerCost(attention_kl=math.nan, **place)],
        curves=[BudgetCurve(method=NASTY, points=[BudgetPoint(width=2, kl=0.1)])],
        latents=[LatentRank(part=NASTY, channels=8, full_rank=8, rank=4, output_kl=math.nan, **place)],
        attention_kl=0.1,
        loss_before=1.0,
        metric=NASTY,
        parameters_before=9,
        cache_bytes_before=9,
        timed=NASTY,
        left_out={NASTY: NASTY},
        notes=[NASTY],
        about=dict.fromkeys((NASTY, "folder", "load", "data", "source"), NASTY),
    )
    return compression_document(record)


def nasty_certificate() -> Document:
    def filled(kind: type[BaseModel]) -> dict[str, Any]:
        kinds = {name: str(field.annotation) for name, field in kind.model_fields.items()}
        return {
            name: NASTY if "str" in of else None if "bool" in of else math.inf if "float" in of else 1
            for name, of in kinds.items()
        }

    layer, stack = LayerCertificate(**filled(LayerCertificate)), StackCertificate(**filled(StackCertificate))
    return certificate_document(
        SkipCertificate(a=0.5, sequences=1, layers=[layer], stacks=[stack], notes=[NASTY])
    )


DOCUMENTS: dict[str, Callable[[], Document]] = {
    "audit": lambda: audit_document(nasty()),
    "comparison": lambda: comparison_document(compare_two(nasty(), only_nan())),
    "history": lambda: history_document(History.of([nasty(), only_nan(), only_nan()], [NASTY, "b", "c"])),
    "plan": nasty_plan,
    "compression": nasty_compression,
    "certificate": nasty_certificate,
}
"""The six kinds, with names that would escape and numbers that are not finite."""
