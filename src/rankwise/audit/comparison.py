"""Two audits side by side: what changed, by how much, and whether the two can be compared at all."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

from pydantic import Field

from rankwise.audit.fields import Number, Record
from rankwise.audit.measures import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, LayerMeasure
from rankwise.audit.records import AuditRecord, Finding, HeadRecord, LayerRecord, Place, Provenance
from rankwise.audit.same_finding import missing_from

SCHEMA_VERSION = 1
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
    """|change| as a share of the range of the measure there, in [0, 1]; 1 where a number came or went."""


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
    changes: list[Change] = Field(default_factory=list)
    """The largest first."""
    new: list[Finding] = Field(default_factory=list)
    gone: list[Finding] = Field(default_factory=list)
    only_before: list[Place] = Field(default_factory=list)
    only_after: list[Place] = Field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the audits say the same."""
        return not (self.changes or self.new or self.gone or self.only_before or self.only_after)


def compare(before: AuditRecord, after: AuditRecord) -> Comparison:
    """List what changed from one audit to another, the largest change first.

    Heads are matched by stack, site, layer, head and whether they read another sequence; token states by
    stack and layer; findings by code, severity and place, those of a whole layer by the layer and those of
    twins by their group. A change is measured against the range that its measure can have there: 1 for
    shares and distances, 2 for a cosine, min(T, S) for a rank (min(T, D) for that of states), log S for the
    entropy, and the larger of the two values for what has no upper bound (σ_max, ‖Y‖, μ). The range is used
    rather than the spread over sequences because it is always known, and because a head that hardly varies
    from text to text would otherwise turn its rounding errors into the largest change of all.

    Cost: linear in the number of records, plus the sorting.

    Args:
        before: the audit to start from.
        after: the audit to hold against it.

    Returns:
        The differences; `Comparison.is_empty` where there are none.

    Examples:
        >>> from rankwise.audit.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> compare(audit, audit).is_empty
        True
    """
    heads = _Matched(before.heads, after.heads, _head_key)
    layers = _Matched(before.layers, after.layers, _layer_key)
    changes = [
        *(change for a, b in heads.both for change in _changes(a, b, HEAD_MEASURES)),
        *(change for a, b in layers.both for change in _changes(a, b, LAYER_MEASURES)),
    ]
    return Comparison(
        before=before.provenance,
        after=after.provenance,
        heads=len(heads.both),
        layers=len(layers.both),
        warnings=list(_warnings(before, after, heads.both, layers.both)),
        changes=sorted(changes, key=_by_size),
        new=missing_from(before, after),
        gone=missing_from(after, before),
        only_before=[*map(_place, heads.first_only), *map(_place, layers.first_only)],
        only_after=[*map(_place, heads.second_only), *map(_place, layers.second_only)],
    )


class _Matched(Generic[RecordT]):
    """Records of two audits in pairs, and those without a partner."""

    def __init__(
        self, first: Sequence[RecordT], second: Sequence[RecordT], key: Callable[[RecordT], Hashable]
    ) -> None:
        ours, theirs = _numbered(first, key), _numbered(second, key)
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


def _layer_key(layer: LayerRecord) -> Hashable:
    return layer.stack, layer.layer


def _place(record: HeadRecord | LayerRecord) -> Place:
    head = record.head if isinstance(record, HeadRecord) else None
    return Place(stack=record.stack, layer=record.layer, site=record.site, head=head)


def _changes(
    before: RecordT, after: RecordT, table: Sequence[HeadMeasure] | Sequence[LayerMeasure]
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
        scale = max(limits, default=max(abs(old), abs(new)))
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
        yield "Only one of the audits was advised (`rw.advise`): the other was not asked for drowned mixers."
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
