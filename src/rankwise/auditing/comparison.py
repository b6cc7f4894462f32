"""Compare two audits: changes of heads, layers, totals and findings, and why numbers may not compare."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from rankwise._internals.files import SavedRecord
from rankwise._internals.records import Address, Count, Number, Record, grouped
from rankwise._internals.statistics import mean
from rankwise.auditing.match_findings import OUTCOMES, FindingChange, finding_changes
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES, HeadMeasure, StateMeasure
from rankwise.auditing.records import Finding, HeadRecord, Provenance, StateRecord, last_states
from rankwise.auditing.result import Audit

COST = "removal_cost"
"""Name of the cost of removing a head: a measure in the unit of the loss, without a fixed range."""
LOSS = "loss, "
"""Name of the total for the loss, to which the unit of the loss is appended."""

R = TypeVar("R", HeadRecord, StateRecord)
AnyMeasure = HeadMeasure | StateMeasure


class Change(Record):
    """One measure of one head, or of the token states of one layer, in two audits."""

    where: Address
    measure: str
    before: Number
    after: Number
    change: Number
    """``after − before``; NaN if one of the two is not finite."""
    size: float
    """|change| divided by the range of the measure (for costs, by the loss), at most 1; 1 if a value is not
    finite."""


class LayerChange(Record):
    """One measure of one layer in two audits: mean over the layer's heads, or value of its token states.

    For measures with `Measure.maximum`, the largest value of the layer's heads.
    """

    stack: str
    layer: Count
    cross: bool = False
    of: Literal["heads", "states"]
    measure: str
    before: Number
    after: Number
    change: Number
    """``after − before``."""
    std: Number
    """Standard deviation over sequences, √((s²_before + s²_after)/2); for heads, s is the mean over the
    heads. NaN if an audit has a single sequence."""

    @property
    def ratio(self) -> float:
        """Change in units of the standard deviation; NaN if it is 0. Two sequences usually differ by 1."""
        return self.change / self.std if self.std > 0 else math.nan


class LayerKey(NamedTuple):
    """Address of one measure of one layer: of the layer's heads, or of its token states."""

    of: Literal["heads", "states"]
    stack: str
    layer: int
    cross: bool
    measure: str


class Total(Record):
    """One number of a whole audit, before and after."""

    name: str
    before: Number
    after: Number


class Comparison(SavedRecord):
    """Differences between two audits."""

    _command: ClassVar[str] = "compare"

    format: Literal["rankwise-comparison"] = "rankwise-comparison"
    schema_version: Literal[5] = 5
    before: Provenance
    after: Provenance
    heads: int
    """Number of heads that are in both audits."""
    states: int
    """Number of token states that are in both audits."""
    warnings: list[str] = Field(default_factory=list)
    """Reasons why numbers of the two audits may not be comparable."""
    structure: list[str] = Field(default_factory=list)
    """Differences between the architectures."""
    totals: list[Total] = Field(default_factory=list)
    """Numbers of the whole audits, which are comparable between any two architectures."""
    by_layer: list[LayerChange] = Field(default_factory=list)
    """Change of each measure of each layer, with its standard deviation over sequences."""
    changes: list[Change] = Field(default_factory=list)
    """Changes of heads and token states, the largest first."""
    below_rounding: int = 0
    """Number of differences that rounding alone can cause: they are not in `changes`."""
    findings: list[FindingChange] = Field(default_factory=list)
    """Findings of both audits, sorted by outcome: new, changed, unchanged, resolved."""
    matched: list[Address] = Field(default_factory=list)
    """Heads in both audits, as the second audit names them."""
    only_before: list[Address] = Field(default_factory=list)
    only_after: list[Address] = Field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True if no number and no finding differs by more than rounding."""
        same = all(change.outcome == "unchanged" for change in self.findings)
        same = same and all(repr(total.before) == repr(total.after) for total in self.totals)
        return same and not (self.changes or self.only_before or self.only_after)

    @property
    def new(self) -> list[Finding]:
        """Findings of the second audit that the first does not have."""
        return [change.finding for change in self.findings if change.outcome == "new"]

    @property
    def resolved(self) -> list[Finding]:
        """Findings of the first audit that the second does not have."""
        return [change.finding for change in self.findings if change.outcome == "resolved"]

    def __repr__(self) -> str:
        counts = Counter(change.outcome for change in self.findings)
        outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        names = f"{self.before.model!r} → {self.after.model!r}"
        return f"Comparison({names}: {len(self.changes)} changes; findings: {outcomes or 'none'})"


def compare_two(before: Audit, after: Audit) -> Comparison:
    """Return the comparison of two audits; `compare` explains how heads and findings are matched."""
    stacks = paired_stacks(before, after)
    heads, *only_heads = _matched(before.heads, after.heads, "site layer call head cross", {})
    if not heads:
        # One model may be a part of the other, so that the names of its modules differ.
        heads, *only_heads = _matched(before.heads, after.heads, "layer call head cross kind", stacks)
    states, *only_states = _matched(before.states, after.states, "blocks", stacks)
    left_out = not_compared([before, after])
    losses = [abs(audit.importance.value) for audit in (before, after) if audit.importance is not None]
    cost_range = max((loss for loss in losses if math.isfinite(loss) and loss > 0), default=1.0)
    measures = [measure for measure in HEAD_MEASURES if measure.name not in left_out]
    dtypes = {before.provenance.model_dtype, after.provenance.model_dtype}
    eps = float(np.finfo(np.float64 if dtypes == {"float64"} else np.float32).eps)
    every = [
        *(change for pair in heads for change in _changes(*pair, measures, eps, cost_range)),
        *(change for pair in states for change in _changes(*pair, STATE_MEASURES, eps)),
    ]
    changes = [change for change in every if change.size]
    by_layer = _layer_changes(before, after, stacks)
    only = [
        [*(head.id for head in only_heads[side]), *(state.id for state in only_states[side])]
        for side in (0, 1)
    ]
    return Comparison(
        before=before.provenance, after=after.provenance, heads=len(heads), states=len(states),
        warnings=[*_warnings(before, after, heads, states), *dict.fromkeys(left_out.values())],
        structure=[*_structure(before, after, stacks)], totals=_totals(before, after),
        by_layer=[change for change in by_layer if change.measure not in left_out],
        below_rounding=len(every) - len(changes),
        changes=sorted(changes, key=lambda change: (-change.size, change.where.sort_key, change.measure)),
        findings=finding_changes(before, after), matched=[head.id for _, head in heads],
        only_before=only[0], only_after=only[1],
    )  # fmt: skip


def paired_stacks(before: Audit, after: Audit) -> dict[str, str]:
    """Return a dict from stacks of the first audit to stacks of the second audit.

    Stacks with equal names are paired. Other stacks are paired in order if both audits have equally many.
    """
    ours, theirs = _stacks(before), _stacks(after)
    pairs = {name: name for name in ours if name in theirs}
    left, right = ([name for name in names if name not in pairs] for names in (ours, theirs))
    return pairs | (dict(zip(left, right, strict=True)) if len(left) == len(right) else {})


def _stacks(audit: Audit) -> list[str]:
    return list(dict.fromkeys([head.stack for head in audit.heads] + [state.stack for state in audit.states]))


def _matched(
    first: Sequence[R], second: Sequence[R], fields: str, stacks: Mapping[str, str]
) -> tuple[list[tuple[R, R]], list[R], list[R]]:
    """Return pairs of records with equal stack and fields, and the records of each audit without a pair."""

    def by_fields(records: Sequence[R], stacks: Mapping[str, str]) -> dict[Hashable, R]:
        def key(record: R) -> Hashable:
            return stacks.get(record.stack, record.stack), *(getattr(record, name) for name in fields.split())

        groups = grouped(records, key)
        return {(key, number): record for key, group in groups.items() for number, record in enumerate(group)}

    ours, theirs = by_fields(first, stacks), by_fields(second, {})
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    only_ours = [record for key, record in ours.items() if key not in theirs]
    return both, only_ours, [record for key, record in theirs.items() if key not in ours]


def _changes(
    before: R, after: R, measures: Iterable[AnyMeasure], eps: float, cost_range: float = 1
) -> Iterator[Change]:
    """Yield the differences of two records. Differences that rounding alone can cause have size 0.

    Numbers are sums over tokens of states, which every layer up to this layer has rounded. The sum of n
    independent rounding errors of one eps of the range is about √n·eps.
    """
    depth = after.blocks if isinstance(after, StateRecord) else after.layer
    rounding = eps * math.sqrt(abs(after.tokens * (depth + 1)))
    for measure in measures:
        old, new = getattr(before, measure.name), getattr(after, measure.name)
        finite = [math.isfinite(value) for value in (old, new)]
        if old == new or not any(finite):
            continue
        spans = [span for record in (before, after) if (span := measure.span(record)) > 0]  # NaN > 0 is False
        scale = cost_range if measure.name == COST else max(spans, default=max(abs(old), abs(new)))
        change = new - old if all(finite) else math.nan
        size = min(abs(change) / scale, 1.0) if all(finite) else 1.0
        size = 0.0 if size <= rounding else size
        yield Change(where=after.id, measure=measure.name, before=old, after=new, change=change, size=size)


def layer_means(audit: Audit) -> dict[LayerKey, tuple[float, float]]:
    """Return (value, standard deviation over sequences) of each known measure of each layer, heads first.

    For heads, both are means over the heads of the layer, or the value is their maximum (`Measure.maximum`).
    """
    means: dict[LayerKey, tuple[float, float]] = {}
    for layer, heads in grouped(audit.heads, attrgetter("stack", "layer", "cross")).items():
        for measure in HEAD_MEASURES:
            values, deviations = ([of(measure, head) for head in heads] for of in (HeadMeasure.value, _std))
            value = measure.over_heads(values) if measure.maximum else mean(values)
            means[LayerKey("heads", *layer, measure.name)] = value, mean(deviations)
    for state in audit.states:
        for of_states in STATE_MEASURES:
            key = LayerKey("states", state.stack, state.blocks, False, of_states.name)
            means[key] = of_states.value(state), _std(of_states, state)
    return {key: pair for key, pair in means.items() if math.isfinite(pair[0])}


def _std(measure: AnyMeasure, record: HeadRecord | StateRecord) -> float:
    """Return the standard deviation over sequences, in the unit of `Measure.value`."""
    std = record.std.get(measure.name, math.nan)
    return std / record.full_rank if measure.share else std


def _kinds(
    before: Audit, after: Audit, stacks: Mapping[str, str]
) -> dict[tuple[str, int, bool], tuple[set[str], set[str]]]:
    """Return the kinds of mixers of each layer in both audits, by the stack names of the second audit."""
    kinds: dict[tuple[str, int, bool], tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for side, (audit, names) in enumerate(((before, stacks), (after, {}))):
        for head in audit.heads:
            kinds[names.get(head.stack, head.stack), head.layer, head.cross][side].add(head.kind)
    return kinds


def _layer_changes(before: Audit, after: Audit, stacks: Mapping[str, str]) -> Iterator[LayerChange]:
    """Yield changes of layers that are in both audits. For heads, the kinds of mixers must be equal."""
    theirs, kinds = layer_means(after), _kinds(before, after, stacks)
    for own_key, (old, old_std) in layer_means(before).items():
        key = own_key._replace(stack=stacks.get(own_key.stack, own_key.stack))
        ours, other = kinds[key.stack, key.layer, key.cross]
        if key in theirs and (key.of == "states" or ours == other):
            new, new_std = theirs[key]
            std = math.sqrt((old_std**2 + new_std**2) / 2)
            yield LayerChange(**key._asdict(), before=old, after=new, change=new - old, std=std)


def _totals(before: Audit, after: Audit) -> list[Total]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for audit in (before, after):
        last = last_states(audit.states)
        numbers["parameters"].append(audit.provenance.parameters or math.nan)
        numbers["layers that mix"].append(len({(head.stack, head.layer) for head in audit.heads}))
        numbers["heads"].append(len(audit.heads))
        numbers["tokens of a sequence"].append(mean(head.tokens for head in audit.heads))
        numbers["width of the token states"].append(mean(state.hidden_size for state in last))
        numbers["direction spread at the end"].append(mean(state.direction_spread for state in last))
        numbers["effective rank of the last states"].append(mean(state.effective_rank for state in last))
        numbers["findings"].append(len(audit.findings))
    measured = [
        audit.importance for audit in (before, after) if math.isfinite(audit.loss) and audit.importance
    ]
    if len(measured) == 2 and measured[0].quantity == measured[1].quantity:
        numbers[f"{LOSS}{measured[0].unit}"] = [before.loss, after.loss]
    return [Total(name=name, before=old, after=new) for name, (old, new) in numbers.items()]


def _structure(before: Audit, after: Audit, stacks: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences on differences of stacks and of kinds of mixers; `_totals` compares numbers."""
    for ours, theirs in stacks.items():
        if ours != theirs:
            yield f"The stack {ours or 'model'!r} is compared with {theirs or 'model'!r}."
    kinds = ([" and ".join(sorted(side)) for side in pair] for pair in _kinds(before, after, stacks).values())
    pairs = Counter((old, new) for old, new in kinds if old and new and old != new)
    for (old, new), number in pairs.items():
        yield (
            f"Mixers of {number} layers: {old} before, {new} after. Ranks of different kinds of operators do "
            "not compare; token states and totals do."
        )
    for name, audit, compared in (("before", before, stacks.keys()), ("after", after, stacks.values())):
        for stack in _stacks(audit):
            if stack not in compared:
                yield f"The stack {stack or 'model'!r} is only in the audit {name}."


_PROVENANCE = {
    "delta": ("δ differs", "Numerical ranks use different thresholds."),
    "rank_method": ("The method differs", "Some changes may be errors of estimates."),
    "data": ("The data differ", "Some changes may come from the data."),
    "sequences": ("The sequences differ", "The means are over different numbers of sequences."),
}


def _warnings(
    before: Audit,
    after: Audit,
    heads: Sequence[tuple[HeadRecord, HeadRecord]],
    states: Sequence[tuple[StateRecord, StateRecord]],
) -> Iterator[str]:
    """Yield reasons why numbers of two audits may not be comparable, except reasons of `not_compared`."""
    for field, (subject, consequence) in _PROVENANCE.items():
        old_value, new_value = (getattr(audit.provenance, field) for audit in (before, after))
        if old_value != new_value:
            yield f"{subject}: {old_value or 'unknown'} before, {new_value or 'unknown'} after. {consequence}"
    pairs: list[tuple[HeadRecord | StateRecord, HeadRecord | StateRecord]] = [*heads, *states]
    old, new = (mean(pair[side].tokens for pair in pairs) for side in (0, 1))
    if old != new and math.isfinite(old) and math.isfinite(new):
        yield (
            f"The sequences are not equally long: {old:.4g} tokens on average before, {new:.4g} after. Ranks "
            "and entropies grow with the number of tokens."
        )
    unlike = sum((a.kind, a.mask) != (b.kind, b.mask) for a, b in heads)
    if unlike:
        yield f"{unlike} of {len(heads)} heads have another kind or mask: their references differ."
    for name, audit in (("before", before), ("after", after)):
        if not audit.complete:
            yield f"The audit {name} is incomplete: some measurements are missing."
    if before.heads and after.heads and not heads:
        yield "No head of one audit is in the other. Are they of the same architecture?"


def cost_quantity(audit: Audit) -> str:
    """Return a text that names the loss and the method by which costs of removal were measured.

    Costs of two audits are comparable only if these texts are equal. Return an empty string if the audit has
    no costs.
    """
    importances = [head.importance for head in audit.heads if head.importance is not None]
    methods = " and ".join(sorted({cost.method for cost in importances if math.isfinite(cost.cost)}))
    if audit.importance is None or not methods:
        return ""
    return f"{audit.importance.quantity}, {methods}"


def not_compared(audits: Sequence[Audit]) -> dict[str, str]:
    """Return a dict from measures that are not comparable between audits to a sentence that says why."""
    quantities = list(dict.fromkeys(map(cost_quantity, audits)))
    listed = "; ".join(quantity or "not measured" for quantity in quantities)
    words = f"Costs of removal are left out, because audits differ in them: {listed}."
    return {COST: words} if len(quantities) > 1 else {}
