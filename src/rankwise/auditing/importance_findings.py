"""Add costs of removing heads to findings, and describe these costs as text; imports no torch."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

import numpy as np

from rankwise._internals.records import Address, format_number, grouped
from rankwise._internals.statistics import Floats
from rankwise.auditing.records import Finding, HeadRecord, Provenance, Remedy, StateRecord
from rankwise.auditing.remedies import EXACTLY, removal_remedy, unless_too_little
from rankwise.importance.records import HeadImportance, ImportanceRecord, RemovableSet

CAUTION = "sort heads roughly and can fall far short of large costs"
HEAD_CAUTION = (
    f"estimates of second order {CAUTION}. Their Spearman correlation with exact costs is 0.79 to 0.99 on "
    'four models; importance "exact" states it for this model'
)
BLOCK_CAUTION = "an order at most: removing a block is a large change, and estimates can fall far short of it"
ENTROPY = "the entropy of the predictions"
TOLERANCE = 0.01
"""Largest relative increase of the loss for a removable head, used if no removable set was searched."""


def with_removal_costs(
    findings: Sequence[Finding],
    codes: Collection[str],
    heads: Sequence[HeadRecord],
    importance: ImportanceRecord,
    states: Sequence[StateRecord] = (),
    provenance: Provenance | None = None,
) -> list[Finding]:
    """Return all findings; with one of ``codes``, they also state the cost of removing the head, if known."""
    costs, extended = {head.id: head.importance for head in heads}, []
    mixers = grouped(heads, lambda head: head.id.at(None))
    for finding in findings:
        cost = costs.get(finding.where) if finding.code in codes else None
        if cost is not None and not math.isnan(cost.cost):
            mixer = mixers[finding.where.at(None)]
            saved = saved_share([finding.where], mixer, states, provenance) if provenance else math.nan
            finding = _with_removal_cost(finding, cost, importance, saved)
        extended.append(finding)
    return extended


def _with_removal_cost(
    finding: Finding, head: HeadImportance, importance: ImportanceRecord, saved: float
) -> Finding:
    tolerance = TOLERANCE if importance.removable is None else importance.removable.tolerance
    percent, share, exact = (
        _percent(importance, head.cost),
        importance.share(head.cost),
        head.method == "exact",
    )
    if exact:
        change = _change(importance, head.cost, importance.value + head.cost)
        words = f"without it the loss changes by {percent} ({change}, exact)."
    else:
        words = f"the estimated cost of removal is {percent}. Such estimates {CAUTION}."
    if finding.remedy is not None and finding.remedy.no_action:
        remedy = finding.remedy
    elif share == 0:
        remedy = Remedy(no_action="the loss does not depend on it", costs=share)
    elif math.isnan(share):
        remedy = Remedy(no_action=f"{importance.reference_name}, which costs are compared with, is 0")
    elif not exact:
        remedy = unless_too_little(EXACTLY, saved)  # exact costs lead to an action only if it saves enough
    elif share <= tolerance:
        remedy = removal_remedy(importance, saved, share, tolerance)
    else:
        remedy = Remedy(no_action="the model needs this head", costs=share)
    # the cost is in the first sentence, which the first screen shows
    first, stop, others = finding.meaning.partition(". ")
    meaning = f"{first.removesuffix('.')}; {words}{stop[1:]}{others}"
    evidence = finding.evidence | {"removal_cost": head.cost}
    return finding.model_copy(update={"meaning": meaning, "evidence": evidence, "remedy": remedy})


def describe_removable(importance: ImportanceRecord, removable: RemovableSet, saved: float) -> str:
    """Return sentences on the cost of removing a set of heads, and on the share of parameters they have."""
    layers = grouped(sorted(removable.heads, key=attrgetter("sort_key")), attrgetter("stack", "layer"))
    where = "; ".join(
        f"layer {layer}: {', '.join(str(head.head) for head in heads)}"
        for (_, layer), heads in layers.items()
    )
    removed, listed = f"layer {removable.heads[0].layer} head {removable.heads[0].head}", ""
    if len(removable.heads) > 1:
        removed, listed = f"these {len(removable.heads)} heads together", f" ({where})"
    share = removable.relative if removable.held_out else removable.chosen_relative
    cost = f"{'lowers the loss by' if share < 0 else 'costs'} {abs(share):.2%}{_of(importance)}"
    if removable.held_out:
        sequences = removable.held_out + removable.chosen_on
        cost += f" ({_change(importance, removable.cost, removable.loss)}{interval_words(removable)}) on "
        cost += f"{removable.held_out} of {sequences} sequences, which were held out, and "
        cost += f"{removable.chosen_relative:+.2%} on those that chose the set"
    else:
        cost += " on the sequences that chose the set. No other sequence says what it costs elsewhere"
    gain = "" if math.isnan(saved) else f" It saves at most {saved:.1%} of the parameters."
    return f"Removing {removed} {cost}{listed}.{gain}"


def interval_words(removable: RemovableSet) -> str:
    """Return the 95 % interval of the held-out cost of a set as text, or the reason why it is unknown."""
    if removable.held_out == 1:
        return "; one sequence has no interval"
    return f"; 95 % interval {removable.low:+.2%} to {removable.high:+.2%}"


def saved_share(
    removed: Sequence[Address],
    heads: Sequence[HeadRecord],
    states: Sequence[StateRecord],
    about: Provenance | None,
) -> float:
    """Return an upper bound on the share of the model's parameters that these heads have, or NaN if unknown.

    A head of width K has at most 2 K (D + 1) parameters for queries and output, where D is the width of token
    states. It has as many for keys and values, which count only if all heads that share them are removed. If
    a layer loses all heads, `compress` keeps the heads of one key head, or one head if all share it.
    """
    hidden_sizes = {state.stack: state.hidden_size for state in states}
    total = 0 if about is None else about.parameters
    addresses, parameters = {*removed}, list[int]()
    measured = [head for head in heads if head.id in addresses]
    if {head.id for head in measured} != addresses:
        return math.nan
    for layer in grouped(heads, lambda head: head.id.at(None)).values():
        if addresses >= {head.id for head in layer}:
            shared = layer[0].heads_per_group
            kept = [head.id for head in layer if head.head < (shared if shared < len(layer) else 1)]
            measured = [head for head in measured if head.id not in kept]
    for group in by_key_head(measured):
        projections = 2 * len(group) + 2 * (len(group) == group[0].heads_per_group)
        parameters.append(projections * (group[0].head_dim or 0) * (hidden_sizes.get(group[0].stack, -1) + 1))
    return sum(parameters) / total if total and all(parameters) else math.nan


def narrowing_saves(
    heads: Sequence[HeadRecord], states: Sequence[StateRecord], about: Provenance | None
) -> tuple[float, float, str]:
    """Return the shares of parameters and cached keys that narrow heads save, and a sentence on both.

    Heads keep the width that they need. Heads that share a key head keep one common width. If the savings are
    unknown, the shares are NaN, and the sentence is empty.
    """
    hidden_sizes = {state.stack: state.hidden_size for state in states}
    total = 0 if about is None else about.parameters
    parameters, freed, keys = 0, 0, 0
    for group in by_key_head(head for head in heads if not head.cross):
        width, tokens = group[0].head_dim or 0, hidden_sizes.get(group[0].stack, -1)
        if total and tokens >= 0 and len(group) == group[0].heads_per_group:
            unneeded = width - max(1, *(math.ceil(head.required_head_dim) for head in group))
            parameters += (len(group) + 1) * unneeded * (tokens + 1)
            freed, keys = freed + unneeded * (group[0].mask == "causal"), keys + width
    if not keys:
        return math.nan, math.nan, ""
    saved, cached = parameters / total, freed / keys
    also = f" and {cached:.0%} of the cached keys" if cached else ""
    words = (
        f" Narrowing all {len(heads)} heads to the width they need saves about {saved:.1%} of the parameters"
    )
    return saved, cached, f"{words}{also}."


def by_key_head(heads: Iterable[HeadRecord]) -> Collection[list[HeadRecord]]:
    """Return groups of heads that share a key head."""
    return grouped(heads, lambda head: (head.id.at(None), head.head // head.heads_per_group)).values()


def whole_words(importance: ImportanceRecord) -> str:
    """Return the loss of the unchanged model as text, or the reference of costs if the loss is 0."""
    if importance.value:
        return f"{format_number(importance.value)} {importance.unit}"
    if _of(importance):
        return f"{importance.unit}, {format_number(importance.reference)} in {importance.reference_name}"
    return "" if importance.unit.startswith("of ") else importance.unit  # a unit "of X" names the reference


def _of(importance: ImportanceRecord) -> str:
    """Return " of REFERENCE" if shares refer to the entropy of predictions; "" if they refer to the loss."""
    return f" of {importance.reference_name}" if importance.reference_name == ENTROPY else ""


def _percent(importance: ImportanceRecord, cost: float) -> str:
    """Return a cost as a share of the reference. If the reference is 0, return it in the unit of the loss."""
    share = importance.share(cost)
    if math.isnan(share):
        return f"{cost:+.2g} {importance.unit}"
    return f"{share:+.{2 if abs(share) < 0.1 else 1}%}" + _of(importance)


def _change(importance: ImportanceRecord, cost: float, loss: float) -> str:
    if importance.value:
        return f"{importance.unit} {loss - cost:.4g} → {loss:.4g}"
    return f"{importance.loss} {cost:.2g}" + (f" {importance.unit}" if _of(importance) else "")


def estimate_words(
    heads: Mapping[Address, HeadImportance], importance: ImportanceRecord
) -> list[tuple[str, str]]:
    """Return pairs (title, words) on estimated costs: a caution, or their agreement with exact costs."""
    words = []
    by_name: dict[str, Sequence[HeadImportance]] = {"heads": [*heads.values()], "blocks": importance.blocks}
    for (name, importances), caution in zip(by_name.items(), (HEAD_CAUTION, BLOCK_CAUTION), strict=True):
        methods = [cost.method for cost in importances if math.isfinite(cost.cost)]
        if "estimated" in methods:
            words.append((f"Estimated costs of {name}", caution))
    both = {head: cost for head, cost in heads.items() if math.isfinite(cost.estimate + cost.exact)}
    if len(both) > 2:
        estimates, exact = np.array([(cost.estimate, cost.exact) for cost in both.values()]).T
        head, worst = max(both.items(), key=lambda item: abs(item[1].estimate - item[1].exact))
        text = (
            f"Spearman {spearman(estimates, exact):.2f} with exact costs over {len(both)} heads; "
            f"largest miss {head}: estimated {_percent(importance, worst.estimate)}, "
            f"exact {_percent(importance, worst.exact)}"
        )
        words.append(("Estimates on this model", text))
    return words


def spearman(first: Floats, second: Floats) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties. NaN if all values of one are equal."""
    ranks = []
    for values in (first, second):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum() - counts / 2)[places])
    with np.errstate(invalid="ignore"):
        return float(np.asarray(np.corrcoef(ranks))[0, 1])
