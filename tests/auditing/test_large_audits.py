"""What is made of an audit takes time in proportion to its heads: of 10,000 heads seconds, not minutes."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.support import records

from rankwise.auditing import compare
from rankwise.auditing.findings import diagnose
from rankwise.auditing.records import Finding, HeadId, HeadRecord, LayerRecord
from rankwise.auditing.result import Audit
from rankwise.importance.records import HeadImportance, ImportanceRecord, RemovableSet
from rankwise.report.audit_report import audit_document

LAYERS, HEADS = 4, 10


def large(layers: int, heads: int) -> Audit:
    """An audit in which every head has a finding and a worth, and half of them can go."""
    noted = {"max_token_mass": 0.95, "nearest_distance": 0.01, "importance": HeadImportance(exact=0.01)}
    made = [
        head.model_copy(update={**noted, "nearest_head": head.head ^ 1})
        for head in records.grid(layers, heads)
    ]
    named = [HeadId(**head.model_dump(include={"stack", "layer", "site", "head"})) for head in made[::2]]
    removable = RemovableSet(
        heads=named, tolerance=0.01, loss=3.2, cost=0.01, relative=0.003, sorted_by="exact", runs=5
    )
    importance = ImportanceRecord(
        loss="causal", unit="nats", value=3.2, sequences=4, counted=9, ablation="zero", probes=0, seed=0
    ).model_copy(update={"removable": removable})
    found = diagnose(made, [], [], importance)
    twins = [
        records.finding(
            "DUPLICATE_HEADS",
            where=HeadId(**head.model_dump(include={"stack", "layer", "site", "head"})),
            evidence={"nearest_head": float(head.head ^ 1), "nearest_distance": 0.01},
        )
        for head in made[::2]
    ]
    return Audit(
        provenance=records.provenance(),
        heads=made,
        layers=[],
        findings=[*found, *twins],
        importance=importance,
    )


def reads(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    """How often a field of a record is read while work is done."""
    count = 0

    def counting(record: object, name: str) -> Any:
        nonlocal count
        count += 1
        return object.__getattribute__(record, name)

    with monkeypatch.context() as patch:
        for kind in (HeadRecord, LayerRecord, Finding, HeadId):
            patch.setattr(kind, "__getattribute__", counting)
        work()
    return count


WORK: dict[str, Callable[[Audit], object]] = {
    "findings": lambda audit: diagnose(audit.heads, audit.layers, [], audit.importance),
    "page": lambda audit: audit_document(audit).data(0),
    "comparison": lambda audit: compare(audit, audit.model_copy()),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_four_times_as_many_heads_take_about_four_times_the_work(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Audit], object]
) -> None:
    small, whole = large(LAYERS, HEADS), large(2 * LAYERS, 2 * HEADS)
    ratio = reads(monkeypatch, lambda: work(whole)) / reads(monkeypatch, lambda: work(small))
    assert 3 < ratio < 6  # 16 where each finding walks over all heads


def test_the_count_sees_a_walk_over_all_heads_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def walks(audit: Audit) -> Callable[[], object]:
        return lambda: [
            other.layer for head in audit.heads for other in audit.heads if other.head == head.head
        ]

    small, whole = large(LAYERS, HEADS), large(2 * LAYERS, 2 * HEADS)
    assert reads(monkeypatch, walks(whole)) / reads(monkeypatch, walks(small)) > 10
