"""Two audits side by side: what changed, by how much, and whether the two can be compared at all."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import Field

from rankwise._internals.records import Number, Record
from rankwise.auditing.finding_changes import OUTCOMES, FindingChange, finding_changes
from rankwise.auditing.importance_differences import (
    COST,
    FRESH,
    baseline_differences,
    cost_scale,
    importance_differences,
)
from rankwise.auditing.layer_changes import LayerChange, Total, layer_changes, paired_stacks, totals
from rankwise.auditing.measures import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, LayerMeasure
from rankwise.auditing.records import AuditRecord, Finding, HeadRecord, LayerRecord, Place, Provenance
from rankwise.auditing.structure import structure_differences

SCHEMA_VERSION = 2
"""Raised whenever a field of a comparison changes its meaning."""

RecordT = TypeVar("RecordT", HeadRecord, LayerRecord)


class Change(Record):
    """One measure of one head or of the states of one layer, before and after."""

    where: Place
    measure: str
    before: Number
    after: Number
    change: Number
    """``after − before``; NaN where one of the two is not finite."""
    size: float
    """|change| as a share of the range of the measure there, in [0, 1]; of a cost of removal, of the model's
    loss; 1 where a number came or went."""


class Comparison(Record):
    """What is different between two audits."""

    format: Literal["rankwise-comparison"] = "rankwise-comparison"
    schema_version: int = SCHEMA_VERSION
    before: Provenance
    after: Provenance
    heads: int
    """Heads that both audits hold."""
    layers: int
    """Layers whose token states both audits hold."""
    warnings: list[str] = Field(default_factory=list)
    """Why the numbers may not compare."""
    structure: list[str] = Field(default_factory=list)
    """In what the architectures differ."""
    totals: list[Total] = Field(default_factory=list)
    """What compares whatever the architectures."""
    by_layer: list[LayerChange] = Field(default_factory=list)
    """Each measure of each layer, beside its spread over the sequences."""
    changes: list[Change] = Field(default_factory=list)
    """The largest first."""
    findings: list[FindingChange] = Field(default_factory=list)
    """What became of each: new, worse, better, changed, unchanged, gone, in this order."""
    matched: list[Place] = Field(default_factory=list)
    """Where the heads are that both audits hold, in the second."""
    only_before: list[Place] = Field(default_factory=list)
    only_after: list[Place] = Field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the audits say the same."""
        same = all(change.outcome == "unchanged" for change in self.findings)
        return same and not (self.changes or self.only_before or self.only_after)

    @property
    def new(self) -> list[Finding]:
        """Findings of the second audit that the first does not have."""
        return [change.finding for change in self.findings if change.outcome == "new"]

    @property
    def gone(self) -> list[Finding]:
        """Findings of the first audit that the second does not have."""
        return [change.finding for change in self.findings if change.outcome == "gone"]

    def to_html(self, path: str | Path) -> Path:
        """Write a page: what differs, findings, a map of the differences, the layers beside their spread.

        Args:
            path: the file; for an existing folder, ``comparison.html`` in it.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written.
        """
        from rankwise.report import write_comparison

        return write_comparison(self, Path(path))

    def __repr__(self) -> str:
        counts = Counter(change.outcome for change in self.findings)
        said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        names = f"{self.before.model!r} → {self.after.model!r}"
        return f"Comparison({names}: {len(self.changes)} changes; findings: {said or 'none'})"

    __str__ = __repr__


def compare_two(before: AuditRecord, after: AuditRecord) -> Comparison:
    """List what changed from one audit to another; see `compare`.

    Args:
        before: the audit to start from.
        after: the audit to hold against it.
    """
    heads = _matched_heads(before, after)
    layers = _Matched(before.layers, after.layers, _layer_key(paired_stacks(before, after)), _layer_key({}))
    unlike, only_one = importance_differences(before, after), baseline_differences(before, after)
    left_out = {*([COST] if unlike else []), *(FRESH if only_one else [])}
    measures = [measure for measure in HEAD_MEASURES if measure.name not in left_out]
    scales = {COST: cost_scale(before, after)}
    changes = [
        *(change for a, b in heads.both for change in _changes(a, b, measures, scales)),
        *(change for a, b in layers.both for change in _changes(a, b, LAYER_MEASURES)),
    ]
    return Comparison(
        before=before.provenance,
        after=after.provenance,
        heads=len(heads.both),
        layers=len(layers.both),
        warnings=[*_warnings(before, after, heads.both, layers.both), *unlike, *only_one],
        structure=structure_differences(before, after),
        totals=totals(before, after),
        by_layer=[change for change in layer_changes(before, after) if change.measure not in left_out],
        changes=sorted(changes, key=_by_size),
        findings=finding_changes(before, after),
        matched=[_place(head) for _, head in heads.both],
        only_before=[*map(_place, heads.first_only), *map(_place, layers.first_only)],
        only_after=[*map(_place, heads.second_only), *map(_place, layers.second_only)],
    )


def _matched_heads(before: AuditRecord, after: AuditRecord) -> "_Matched[HeadRecord]":
    """By their names; where none is the same, as of one model inside another, by their numbers."""
    named = _Matched(before.heads, after.heads, _head_key, _head_key)
    if named.both:
        return named
    stacks = paired_stacks(before, after)
    numbers = _Matched(before.heads, after.heads, _number_key(stacks), _number_key({}))
    return numbers if numbers.both else named


class _Matched(Generic[RecordT]):
    """Records of two audits in pairs, and those without a partner."""

    def __init__(
        self,
        first: Sequence[RecordT],
        second: Sequence[RecordT],
        key: Callable[[RecordT], Hashable],
        other_key: Callable[[RecordT], Hashable],
    ) -> None:
        ours, theirs = _numbered(first, key), _numbered(second, other_key)
        self.both: list[tuple[RecordT, RecordT]] = [
            (ours[name], theirs[name]) for name in ours if name in theirs
        ]
        self.first_only: list[RecordT] = [record for name, record in ours.items() if name not in theirs]
        self.second_only: list[RecordT] = [record for name, record in theirs.items() if name not in ours]


def _numbered(records: Sequence[RecordT], key: Callable[[RecordT], Hashable]) -> dict[Hashable, RecordT]:
    """Records by key; those of a module that ran several times are told apart by their order."""
    seen: Counter[Hashable] = Counter()
    named: dict[Hashable, RecordT] = {}
    for record in records:
        name = key(record)
        named[name, seen[name]] = record
        seen[name] += 1
    return named


def _head_key(head: HeadRecord) -> Hashable:
    return head.stack, head.site, head.layer, head.head, head.cross


def _number_key(stacks: Mapping[str, str]) -> Callable[[HeadRecord], Hashable]:
    return lambda head: (stacks.get(head.stack, head.stack), head.layer, head.head, head.cross, head.kind)


def _layer_key(stacks: Mapping[str, str]) -> Callable[[LayerRecord], Hashable]:
    return lambda layer: (stacks.get(layer.stack, layer.stack), layer.layer)


def _place(record: HeadRecord | LayerRecord) -> Place:
    head = record.head if isinstance(record, HeadRecord) else None
    return Place(stack=record.stack, layer=record.layer, site=record.site, head=head)


def _changes(
    before: RecordT,
    after: RecordT,
    table: Sequence[HeadMeasure] | Sequence[LayerMeasure],
    scales: Mapping[str, float] | None = None,
) -> Iterator[Change]:
    for measure in table:
        old, new = getattr(before, measure.name), getattr(after, measure.name)
        known = [math.isfinite(value) for value in (old, new)]
        if old == new or not any(known):
            continue
        change = new - old if all(known) else math.nan
        limits = [
            limit
            for limit in (measure.span(before), measure.span(after))
            if math.isfinite(limit) and limit > 0
        ]
        scale = (scales or {}).get(measure.name) or max(limits, default=max(abs(old), abs(new)))
        size = min(abs(change) / scale, 1.0) if all(known) else 1.0
        yield Change(
            where=_place(after), measure=measure.name, before=old, after=new, change=change, size=size
        )


def _by_size(change: Change) -> tuple[float, str, int, str, int, str]:
    where = change.where
    layer, head = (-1 if number is None else number for number in (where.layer, where.head))
    return -change.size, where.stack, layer, where.site, head, change.measure


def _warnings(
    before: AuditRecord,
    after: AuditRecord,
    heads: Sequence[tuple[HeadRecord, HeadRecord]],
    layers: Sequence[tuple[LayerRecord, LayerRecord]],
) -> Iterator[str]:
    yield from _provenance_warnings(before.provenance, after.provenance)
    tokens = [
        _mean([*(pair[side].tokens for pair in heads), *(pair[side].tokens for pair in layers)])
        for side in (0, 1)
    ]
    if tokens[0] != tokens[1] and all(map(math.isfinite, tokens)):
        yield (
            f"The sequences are not equally long: {tokens[0]:.4g} tokens on average before, {tokens[1]:.4g} "
            "after. Ranks and entropies grow with the number of tokens."
        )
    other = sum((a.kind, a.mask) != (b.kind, b.mask) for a, b in heads)
    if other:
        yield f"{other} of {len(heads)} heads have another kind or mask: their null is another."
    if before.provenance.advised != after.provenance.advised and any(
        "mixer_share" in finding.evidence for finding in (*before.findings, *after.findings)
    ):
        yield (
            "Only one of the audits was advised (`rw.skips.recommend`): the other was not asked for drowned "
            "mixers."
        )
    for name, audit in (("before", before), ("after", after)):
        if not audit.complete:
            yield f"The audit {name} is incomplete: it read only a part of its data."
    if before.heads and after.heads and not heads:
        yield "No head of one audit is in the other. Are they of the same architecture?"


def _provenance_warnings(before: Provenance, after: Provenance) -> Iterator[str]:
    consequences = {
        "delta": "Numerical ranks count by different thresholds.",
        "method": "A part of the changes may be the error of an estimate.",
        "measure_dtype": "A part of the changes may be rounding.",
        "data": "A part of the changes may be that of the data.",
        "sequences": "The means are over different numbers of sequences.",
    }
    names = {"delta": "δ", "measure_dtype": "The dtype of the measures"}
    for field, consequence in consequences.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            subject = names.get(field, f"The {field}")
            verb = "differ" if field in {"data", "sequences"} else "differs"
            yield f"{subject} {verb}: {old or 'unknown'} before, {new or 'unknown'} after. {consequence}"


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
