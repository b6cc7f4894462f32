"""Records of the same head, or of the same token states, joined into one."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rankwise.auditing.importance_records import ImportanceRecord
from rankwise.auditing.layers import COLUMNS as LAYER_COLUMNS
from rankwise.auditing.merge_importance import merged_importance
from rankwise.auditing.merge_records import Merging
from rankwise.auditing.numbers import AVERAGED, ERRORS, RANKS_AT
from rankwise.auditing.pooled import Moments, by_key, pooled, weighted_mean
from rankwise.auditing.records import HeadRecord, LayerRecord, RankAt
from rankwise.auditing.token_names import commonest
from rankwise.auditing.widths import HeadMoments, merged_width
from rankwise.errors import RecordError
from rankwise.measures import LogitMoments

R = TypeVar("R", HeadRecord, LayerRecord)
SAME_MODEL = "Merge audits of the same model only, each of other sequences."


def merged_heads(
    parts: Sequence[Sequence[HeadRecord]],
    importances: Sequence[ImportanceRecord | None],
    moments: Sequence[HeadMoments] = (),
) -> list[HeadRecord]:
    """The records of all heads, in the order of the model.

    Args:
        parts: the heads of each audit.
        worths: the worth of each audit.
        moments: of the heads of each audit, where they are known.

    Raises:
        RecordError: if one of them is of another model.
    """
    known = moments or [[None] * len(heads) for heads in parts]
    found = [
        [(head, importance, moment) for head, moment in zip(heads, of_heads, strict=True)]
        for heads, importance, of_heads in zip(parts, importances, known, strict=True)
    ]
    merged = [_head(group) for group in by_key(found, lambda one: (*_site_of(one[0]), one[0].head))]
    turns: Counter[tuple[Any, ...]] = Counter()
    calls: dict[tuple[Any, ...], list[HeadRecord]] = {}
    for head in merged:  # a mixer may run twice in a block
        place = (*_site_of(head), head.head)
        calls.setdefault((*_site_of(head), turns[place]), []).append(head)
        turns[place] += 1
    nearest = {id(head): _with_nearest(head, heads) for heads in calls.values() for head in heads}
    return [nearest[id(head)] for head in merged]


def _site_of(head: HeadRecord) -> tuple[str, int, str, bool]:
    return head.stack, head.layer, head.site, head.cross


def merged_layers(parts: Sequence[Sequence[LayerRecord]]) -> list[LayerRecord]:
    """The records of all token states, in the order of the model.

    Args:
        parts: the token states of each audit.

    Raises:
        RecordError: if one of them is of another model.
    """
    return [_layer(group) for group in by_key(parts, lambda layer: (layer.stack, layer.layer))]


def _layer(records: Sequence[LayerRecord]) -> LayerRecord:
    first = records[0]
    for field in ("site", "width"):
        _same(records, field, f"token states of {first.stack!r} after {first.layer} blocks")
    numbers = {
        name: pooled(_moments(record, name, record.known.get(name, record.sequences)) for record in records)
        for name in LAYER_COLUMNS
    }
    sequences = sum(record.sequences for record in records)
    said = {
        "sequences": sequences,
        "nonfinite": sum(record.nonfinite for record in records),
        "spread": {name: numbers[name].spread for name in LAYER_COLUMNS[1:]},
        "known": _where_fewer({name: moments.number for name, moments in numbers.items()}, sequences),
        "baseline": None,
    }
    return first.model_copy(update={name: moments.mean for name, moments in numbers.items()} | said)


def _head(found: Sequence[tuple[HeadRecord, ImportanceRecord | None, LogitMoments | None]]) -> HeadRecord:
    records = [head for head, _, _ in found]
    first = records[0]
    _same(records, "kind", f"head {first.head} of {first.site!r}")
    means = {
        name: pooled(_moments(record, name, _known(record, name)) for record in records) for name in AVERAGED
    }
    errors = {name: pooled(_errors(record, name) for record in records) for name in ERRORS}
    sequences, estimated = (
        sum(getattr(record, name) for record in records) for name in ("sequences", "estimated")
    )
    longest = max(records, key=_length)
    masks = {record.mask for record in records if _length(record) == _length(longest)}
    counts = {name: moments.number for name, moments in means.items() if name not in RANKS_AT}
    counts |= {f"stderr of {name}": moments.number for name, moments in errors.items()}
    merging = _merging(records, _where_fewer(counts, sequences))
    pictured = _first(records, lambda record: record.picture)
    mapped = _first(records, lambda record: record.membership_map)
    whole = merging is None or len(mapped.membership_map) == merging.longest
    importance = merged_importance([(head.importance, of) for head, of, _ in found])
    peak, agreeing = ("", 0) if merging is None else commonest(merging.names, merging.named)
    said = {
        "sequences": sequences,
        "nonfinite": sum(record.nonfinite for record in records),
        "estimated": estimated,
        "fallbacks": sum(record.fallbacks for record in records),
        "mask": min(masks),
        "band": _band(records),
        "membership_map": mapped.membership_map,
        "membership_grid": mapped.membership_grid if whole else None,
        "spread": {name: means[name].spread for name in AVERAGED[3:]},
        "stderr": {name: moments.mean for name, moments in errors.items()} if estimated else {},
        "max_token": peak,
        "max_token_sequences": agreeing,
        "picture": pictured.picture,
        "second_picture": pictured.second_picture,
        "spectrum": _first(records, lambda record: record.spectrum).spectrum,
        "importance": importance,
        "removal_cost": math.nan if importance is None else importance.cost,
        "required_head_dim": merged_width([moments for _, _, moments in found]),
        "baseline": None,
        "init_numerical_rank": math.nan,
        "init_effective_rank": math.nan,
        "merging": merging,
    }
    return first.model_copy(update={name: moments.mean for name, moments in means.items()} | said)


def _same(records: Sequence[HeadRecord] | Sequence[LayerRecord], field: str, subject: str) -> None:
    values = list(dict.fromkeys(getattr(record, field) for record in records))
    if len(values) > 1:
        raise RecordError(
            subject,
            expected=f"the same {field} in all audits",
            got=" and ".join(map(repr, values)),
            fix=SAME_MODEL,
        )


def _moments(record: R, name: str, count: int) -> Moments:
    """Of a measure; of none where no sequence has it, but for ranks: of these one unknown leaves all so."""
    mean = getattr(record, name)
    if math.isnan(mean) and (name not in RANKS_AT or isinstance(record, LayerRecord)):
        count = 0
    return Moments(count, mean, record.spread.get(name, math.nan))


def _known(head: HeadRecord, name: str) -> int:
    return head.sequences if head.merging is None else head.merging.known.get(name, head.sequences)


def _errors(head: HeadRecord, name: str) -> Moments:
    error = head.stderr.get(name, math.nan if head.estimated else 0.0)
    count = 0 if math.isnan(error) else _known(head, f"stderr of {name}")
    return Moments(count, error)


def _length(head: HeadRecord) -> float:
    """Of the longest sequence; in older files the mean."""
    length = head.tokens if head.merging is None else float(head.merging.longest)
    return length if head.sequences else 0.0


def _first(records: Sequence[HeadRecord], has: Callable[[HeadRecord], object]) -> HeadRecord:
    """The first that has something; else the first."""
    return next((record for record in records if has(record)), records[0])


def _where_fewer(counts: dict[str, int], sequences: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if 0 < count < sequences}


def _band(records: Sequence[HeadRecord]) -> list[RankAt]:
    """At the thresholds that all have."""
    there = [record for record in records if record.sequences] or list(records)
    shared = [point for point in there[0].band if all(_at(record, point.delta) for record in there)]
    return [_rank_at(there, point.delta) for point in shared]


def _at(head: HeadRecord, delta: float) -> RankAt | None:
    return next((point for point in head.band if point.delta == delta), None)


def _rank_at(heads: Sequence[HeadRecord], delta: float) -> RankAt:
    points = [(record, point) for record in heads if (point := _at(record, delta))]
    ranks = {
        name: weighted_mean([(record.sequences, getattr(point, name)) for record, point in points])
        for name in RANKS_AT
    }
    nulls = [(_known(record, "hardmax_rank"), point.hardmax_rank) for record, point in points]
    null = weighted_mean([(count, null) for count, null in nulls if not math.isnan(null)])
    return RankAt(delta=delta, hardmax_rank=null, **ranks)


def _merging(records: Sequence[HeadRecord], known: dict[str, int]) -> Merging | None:
    """None where one of them comes from an older file."""
    parts = [record.merging for record in records if record.merging is not None]
    if len(parts) < len(records):
        return None
    many = {len(part.distances) for part in parts}
    if len(many) > 1:
        raise RecordError(
            f"heads of {records[0].site!r}",
            expected="the same number in all audits",
            got=" and ".join(map(str, sorted(many))),
            fix=SAME_MODEL,
        )
    pairs = [[part.pairs[at] for part in parts] for at in range(*many)]
    apart = [
        weighted_mean([(count, part.distances[at]) for count, part in zip(counts, parts, strict=True)])
        for at, counts in enumerate(pairs)
    ]
    names: list[Counter[str]] = []
    for part in parts:
        names += [Counter() for _ in part.names[len(names) :]]
        for kind, counted in zip(names, part.names, strict=False):
            kind.update(counted)
    return Merging(
        longest=max(part.longest for part in parts),
        known=known,
        distances=apart,
        pairs=[sum(counts) for counts in pairs],
        named=sum(part.named for part in parts),
        names=[dict(kind) for kind in names],
    )


def _with_nearest(head: HeadRecord, heads: Sequence[HeadRecord]) -> HeadRecord:
    """With the head of its site that is nearest on average over all sequences; with none in older files."""
    distances = [] if head.merging is None else head.merging.distances
    known = [
        (distance, other.head)
        for other, distance in zip(heads, distances, strict=False)
        if other is not head and not math.isnan(distance)
    ]
    distance, nearest = min(known) if known else (math.nan, None)
    return head.model_copy(update={"nearest_head": nearest, "nearest_distance": distance})
