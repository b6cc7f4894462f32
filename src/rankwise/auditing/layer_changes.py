"""Two audits layer by layer: each change beside how much the measure varies from sequence to sequence."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from rankwise._internals.records import Count, Number, Record
from rankwise.auditing.measures import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, LayerMeasure
from rankwise.auditing.records import AuditRecord, HeadRecord, LayerRecord

Slot = tuple[str, int, bool]
"""A stack, a layer of it, and whether it reads another sequence."""


class LayerChange(Record):
    """One measure of one layer: of its heads the mean, or of its token states."""

    stack: str
    layer: Count
    cross: bool = False
    of: Literal["heads", "states"]
    measure: str
    before: Number
    after: Number
    change: Number
    """``after − before``."""
    spread: Number
    """Standard deviation over the sequences, √((s²_before + s²_after)/2), of several heads the mean of
    theirs; NaN where an audit has a single sequence."""

    @property
    def ratio(self) -> float:
        """The change in units of the spread: below 1 it is less than what two sequences usually differ by."""
        return self.change / self.spread if self.spread > 0 else math.nan


class Total(Record):
    """One number of the whole audit, before and after."""

    name: str
    before: Number
    after: Number


def paired_stacks(before: AuditRecord, after: AuditRecord) -> dict[str, str]:
    """Stacks of the second audit by those of the first: of the same name, else in the order of the model.

    In order only where as many are left over on both sides: models of other authors name them otherwise.

    Args:
        before: one audit.
        after: the other.
    """
    ours, theirs = stacks_of(before), stacks_of(after)
    pairs = {name: name for name in ours if name in theirs}
    left, right = ([name for name in names if name not in pairs] for names in (ours, theirs))
    return pairs | (dict(zip(left, right, strict=True)) if len(left) == len(right) else {})


def layer_changes(before: AuditRecord, after: AuditRecord) -> list[LayerChange]:
    """Each measure of each layer that both audits have, in the order of the model.

    Heads of a layer whose operators are of another kind in the second audit are left out: ranks of a softmax
    matrix and of a diagonal are no two values of one quantity. Token states compare whatever mixed them.

    Args:
        before: one audit.
        after: the other.
    """
    stacks = paired_stacks(before, after)
    ours, theirs = layer_numbers(before, stacks), layer_numbers(after)
    kinds = _kinds(before, stacks), _kinds(after, {})
    return [
        _change(key, ours[key], theirs[key])
        for key in ours
        if key in theirs and (key.of == "states" or kinds[0].get(key.slot) == kinds[1].get(key.slot))
    ]


class LayerKey(NamedTuple):
    """One measure of one layer."""

    of: Literal["heads", "states"]
    stack: str
    layer: int
    cross: bool
    measure: str

    @property
    def slot(self) -> Slot:
        """The layer alone."""
        return self.stack, self.layer, self.cross


def layer_numbers(
    audit: AuditRecord, stacks: Mapping[str, str] | None = None
) -> dict[LayerKey, tuple[float, float]]:
    """Each measure of each layer, of its heads the mean, with its standard deviation over the sequences.

    Args:
        audit: the audit.
        stacks: other names for its stacks.

    Returns:
        What is known at all, in the order of the model: heads, then states.
    """
    named = stacks or {}
    slots: dict[Slot, list[HeadRecord]] = {}
    for head in audit.heads:
        slots.setdefault((named.get(head.stack, head.stack), head.layer, head.cross), []).append(head)
    found: dict[LayerKey, tuple[float, float]] = {}
    for slot, heads in slots.items():
        for measure in HEAD_MEASURES:
            value = _mean(measure.value(head) for head in heads)
            spread = _mean(_spread(measure, head) for head in heads)
            found[LayerKey("heads", *slot, measure.name)] = value, spread
    for state in audit.layers:
        stack = named.get(state.stack, state.stack)
        for state_measure in LAYER_MEASURES:
            key = LayerKey("states", stack, state.layer, False, state_measure.name)
            found[key] = state_measure.value(state), _spread(state_measure, state)
    return {key: pair for key, pair in found.items() if math.isfinite(pair[0])}


def _kinds(audit: AuditRecord, stacks: Mapping[str, str]) -> dict[Slot, set[str]]:
    kinds: dict[Slot, set[str]] = {}
    for head in audit.heads:
        kinds.setdefault((stacks.get(head.stack, head.stack), head.layer, head.cross), set()).add(head.kind)
    return kinds


def _change(key: LayerKey, old: tuple[float, float], new: tuple[float, float]) -> LayerChange:
    spread = math.sqrt((old[1] ** 2 + new[1] ** 2) / 2)
    change = new[0] - old[0]
    return LayerChange(**key._asdict(), before=old[0], after=new[0], change=change, spread=spread)


def totals(before: AuditRecord, after: AuditRecord) -> list[Total]:
    """What compares whatever the architectures: sizes, and means over all heads and over the last states.

    Args:
        before: one audit.
        after: the other.
    """
    old, other = _totals(before), _totals(after)
    return [Total(name=name, before=value, after=other[name]) for name, value in old.items()]


def _totals(audit: AuditRecord) -> dict[str, float]:
    last = {layer.stack: layer for layer in sorted(audit.layers, key=lambda layer: layer.layer)}.values()
    numbers = {
        "parameters": audit.provenance.parameters or math.nan,
        "layers that mix": len({(head.stack, head.layer) for head in audit.heads}),
        "heads": len(audit.heads),
        "tokens of a sequence": _mean(head.tokens for head in audit.heads),
        "width of the token states": _mean(layer.width for layer in last),
        "μ/‖Y‖ at the end": _mean(layer.relative_spread for layer in last),
        "effective rank of the last states": _mean(layer.effective_rank for layer in last),
        "findings": len(audit.findings),
    }
    return {name: float(number) for name, number in numbers.items()}


def stacks_of(audit: AuditRecord) -> list[str]:
    """The names of the stacks, in the order of the model.

    Args:
        audit: the audit.
    """
    return list(dict.fromkeys([head.stack for head in audit.heads] + [state.stack for state in audit.layers]))


def _spread(measure: HeadMeasure | LayerMeasure, record: HeadRecord | LayerRecord) -> float:
    """The standard deviation over sequences, in the units of `Measure.value`."""
    spread = record.spread.get(measure.name, math.nan)
    return spread / record.smaller if measure.share else spread


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
