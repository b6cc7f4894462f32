"""Documents of all kinds of reports."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from tests.support.records import NASTY, nasty, only_nan

from rankwise.auditing import Audit, History
from rankwise.auditing.comparison import compare_two
from rankwise.compression import Compression
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
from rankwise.tracing import Address

OLD_FILES = Path(__file__).parents[1] / "old_files"


def page(audit: Audit) -> str:
    """The page of an audit."""
    return page_text(audit_document(audit))


def data(audit: Audit) -> Mapping[str, Any]:
    """The data that the scripts of an audit's page read."""
    return audit_document(audit).data(0)


def nasty_plan() -> Document:
    head = Address(stack=NASTY, layer=0, head=0)
    trained = [TrainedWidth(head=head, head_dim=4, required_head_dim=math.nan)]
    plan = HeadDimPlan(
        tokens=64, mask=NASTY, least_gain=0.01, one_hot_rank=40.0, trials=2, head_dim=4,
        curve=[(2, 0.2, math.nan), (4, 0.4, 0.1)], interval=(2, 4), saturated=True, trained=trained,
        notes=[NASTY], about={NASTY: NASTY}, complete=False,
    )  # fmt: skip
    return plan_document(plan)


R = TypeVar("R")


def nasty_copy(file: str, load: Callable[[Path], R]) -> R:
    """Load a copy of an old file whose texts would escape and whose spreads are missing."""

    def nasty_value(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: nasty_value(key, item) for key, item in value.items()}
        if isinstance(value, list):
            return [nasty_value(name, item) for item in value]
        if isinstance(value, str) and name not in {"format", "phase", "part"}:
            return NASTY
        return None if name in {"kl", "kl_calibrated", "nats", "effective_rank"} else value

    content = json.loads((OLD_FILES / file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.json"
        path.write_text(json.dumps(nasty_value("", content)), encoding="utf-8")
        return load(path)


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
    "compression": lambda: compression_document(
        nasty_copy("compressed/together/compression.json", Compression.load)
    ),
    "certificate": nasty_certificate,
}
"""The six kinds, with names that would escape and numbers that are not finite."""
