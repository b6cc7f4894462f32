"""Audits of shards of the data, joined into the audit of all of it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rankwise.auditing.findings import diagnose
from rankwise.auditing.importance_records import ImportanceRecord
from rankwise.auditing.merge_heads import SAME_MODEL, merged_heads, merged_layers
from rankwise.auditing.merge_importance import LEFT_OUT, merged_record, with_correlation
from rankwise.auditing.merge_parts import JOINT, check_apart
from rankwise.auditing.numbers import method_of
from rankwise.auditing.pooled import by_key
from rankwise.auditing.records import AuditRecord, HeadRecord, Provenance, Unseen
from rankwise.auditing.widths import HeadMoments
from rankwise.errors import InputError, RecordError

A = TypeVar("A", bound=AuditRecord)

SAME = ("model", "model_class", "revision", "parameters", "delta", "model_dtype", "measure_dtype")
"""What audits must have in common."""
JOINED = {"data": JOINT, "command": " ; ", "device": ", "}
"""What is told of each, and what stands between."""
SUMS = ("batches", "sequences", "audits")
NO_BASELINE = "baseline left out: differences to fresh weights, sequence by sequence, cannot be merged"
NO_WIDTH = "width needed left out: it rests on second moments of all sequences, which audits do not hold"
OTHER_WEIGHTS = (
    "Merge audits of the same weights only. Where some are in no checkpoint and drawn at each start, set a "
    'seed before the model is built; if no head reads them, `rw.audit(…, provenance={"weights": ""})`.'
)
ADVISED = "skip connections are to be looked at again: rw.skips.recommend(audit, model, batch)"
NEVER_CALLED = "never called"


def merge(audits: Sequence[A], names: Sequence[str] = (), moments: Sequence[HeadMoments] = ()) -> A:
    """Join audits; see `Audit.merge`.

    Args:
        audits: of one model, on other sequences each.
        names: what an error calls them; their numbers where none are given.
        moments: what `keeping_moments` has kept of each; without them no width needed is known.
    """
    if not audits:
        raise InputError(
            "`Audit.merge`", expected="at least one audit", got="none", fix="Pass a list of audits."
        )
    for number, audit in enumerate(audits, 1):
        if not isinstance(audit, AuditRecord):
            raise InputError(
                f"audit {number} of `Audit.merge`",
                expected="an audit",
                got=type(audit).__name__,
                fix="Read a saved one with `rw.Audit.load(path)`.",
            )
    if len(audits) == 1:
        return audits[0]
    _check_alike(audits)
    check_apart([audit.provenance for audit in audits], names)
    importances = [audit.importance for audit in audits]
    pictured = next((audit for audit in audits if any(head.picture for head in audit.heads)), None)
    heads = merged_heads(
        [audit.heads if audit is pictured else _without_pictures(audit.heads) for audit in audits],
        importances,
        moments,
    )
    layers = merged_layers([audit.layers for audit in audits])
    importance = _importance(
        [importance for importance in importances if importance is not None], len(audits), heads
    )
    uncaptured = _uncaptured([audit.uncaptured for audit in audits])
    return audits[0].model_copy(
        update={
            "complete": all(audit.complete for audit in audits),
            "provenance": _provenance(audits, heads),
            "heads": heads,
            "layers": layers,
            "findings": diagnose(heads, layers, uncaptured, importance),
            "uncaptured": uncaptured,
            "texts": {} if pictured is None else pictured.texts,
            "importance": importance,
            "baseline": None,
        }
    )


def _check_alike(audits: Sequence[AuditRecord]) -> None:
    _same("schema_version", [audit.schema_version for audit in audits])
    abouts = [audit.provenance for audit in audits]
    for field in SAME:
        _same(field, [getattr(about, field) for about in abouts])
    _same("weights", [about.weights for about in abouts if about.weights], OTHER_WEIGHTS)
    _same("method_asked", [about.method_asked for about in abouts if about.method_asked])
    estimates = (about.method.partition("estimated with")[2].strip() for about in abouts)
    _same("method of estimates", [estimate for estimate in estimates if estimate])


def _same(field: str, values: Sequence[object], fix: str = SAME_MODEL) -> None:
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise RecordError(
            "audits to merge",
            expected=f"the same {field} in all of them",
            got=" and ".join(map(repr, different[:2])),
            fix=fix,
        )


def _without_pictures(heads: Sequence[HeadRecord]) -> list[HeadRecord]:
    none = {"picture": None, "second_picture": None}
    return [head.model_copy(update=none) if head.picture else head for head in heads]


def _importance(
    known: Sequence[ImportanceRecord], audits: int, heads: Sequence[HeadRecord]
) -> ImportanceRecord | None:
    if len(known) < audits:
        return None
    return with_correlation(
        merged_record(known), [head.importance for head in heads if head.importance is not None]
    )


def _uncaptured(parts: Sequence[Sequence[Unseen]]) -> list[Unseen]:
    """Modules that one audit could not capture, and those that none of them called."""
    found: list[Unseen] = []
    for group in by_key(parts, lambda module: (module.name,)):
        called = [module for module in group if not module.reason.startswith(NEVER_CALLED)]
        if called or len(group) == len(parts):
            found.append(min(called or group, key=lambda module: module.reason))
    return found


def _provenance(audits: Sequence[AuditRecord], heads: Sequence[HeadRecord]) -> Provenance:
    abouts = [audit.provenance for audit in audits]
    notes = [note for about in abouts for note in about.notes]
    notes += [NO_BASELINE] if any(audit.baseline for audit in audits) else []
    before = any(_has_width(audit.heads) for audit in audits)
    notes += [NO_WIDTH] if before and not _has_width(heads) else []
    notes += [LEFT_OUT] if len({audit.importance is None for audit in audits}) > 1 else []
    notes += [ADVISED] if any(about.advised for about in abouts) else []
    libraries = _distinct(name for about in abouts for name in about.versions)
    said: dict[str, Any] = {
        "method": method_of(heads),
        "method_asked": max(about.method_asked for about in abouts),
        "created": max(about.created for about in abouts),
        "advised": False,
        "parts": sorted(part for about in abouts for part in about.parts),
        "weights": max(about.weights for about in abouts),
        "sources": {},
        "versions": {
            name: _all_of([about.versions.get(name, "") for about in abouts], ", ") for name in libraries
        },
        "notes": list(dict.fromkeys(notes)),
    }
    sums = {name: sum(getattr(about, name) for about in abouts) for name in SUMS}
    joined = {
        name: _all_of([getattr(about, name) for about in abouts], joint) for name, joint in JOINED.items()
    }
    return abouts[0].model_copy(update=said | sums | joined)


def _has_width(heads: Sequence[HeadRecord]) -> bool:
    return not all(math.isnan(head.required_head_dim) for head in heads)


def _all_of(texts: Sequence[str], joint: str) -> str:
    """What stands in any of them, once each: parts of merged audits are joined already."""
    return joint.join(_distinct(part for text in texts for part in text.split(joint)))


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted({value for value in values if value})
