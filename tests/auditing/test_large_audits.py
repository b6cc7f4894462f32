"""Findings, pages and comparisons take time in proportion to the number of heads."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.support import records
from tests.support.documents import audit_document
from tests.support.records import HeadImportance, diagnose

from rankwise.auditing import Audit, Finding, HeadRecord, StateRecord, compare
from rankwise.tracing import Address

LAYERS, HEADS = 4, 10


def large(layers: int, heads: int) -> Audit:
    """Return an audit in which every head has findings and a cost, and half of them can be removed."""
    noted = {"max_token_mass": 0.95, "nearest_head_distance": 0.01, "importance": HeadImportance(exact=0.01)}
    made = [
        head.model_copy(update={**noted, "nearest_head": head.head ^ 1})
        for head in records.grid(layers, heads)
    ]
    half = [head.id for head in made[::2]]
    removable = records.removable(half)
    audit = records.audit(made, importance=records.importance(removable=removable))
    alike = [records.finding("IDENTITY", where=place, evidence={"identity_distance": 0.01}) for place in half]
    return records.changed(audit, findings=[*audit.findings, *alike])


def reads(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    """Return the number of reads of fields of records during some work."""
    count = 0

    def counting(record: object, name: str) -> Any:
        nonlocal count
        count += 1
        return object.__getattribute__(record, name)

    with monkeypatch.context() as patch:
        for kind in (HeadRecord, StateRecord, Finding, Address):
            patch.setattr(kind, "__getattribute__", counting)
        work()
    return count


WORK: dict[str, Callable[[Audit], object]] = {
    "findings": lambda audit: diagnose(audit.heads, audit.states, [], audit.importance),
    "page": lambda audit: audit_document(audit).data,
    "comparison": lambda audit: compare(audit, audit.model_copy()),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_four_times_as_many_heads_take_about_four_times_the_work(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Audit], object]
) -> None:
    small, whole = large(LAYERS, HEADS), large(2 * LAYERS, 2 * HEADS)
    ratio = reads(monkeypatch, lambda: work(whole)) / reads(monkeypatch, lambda: work(small))
    assert 3 < ratio < 6  # 16 if each finding loops over all heads
