"""The part ``heads``: remove the attention heads whose removal costs least, with their weights."""

import math
from collections.abc import Hashable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rankwise._internals.records import grouped
from rankwise.compression.heads_find import (
    HeadProjections,
    Plan,
    difference,
    removal,
    zeroed,
)
from rankwise.compression.records import HeadWidth
from rankwise.compression.trials import Job, Solution
from rankwise.errors import CompressionError
from rankwise.importance import (
    Importance,
    ImportanceSettings,
    ablation_cost,
    measure_importance,
    sort_by_cost,
)
from rankwise.tracing import Address

ROUNDS = 4
"""Number of rounds in which a share of the heads is removed; each round estimates costs again."""
PROBES = 2
"""Number of random vectors per round that estimate the curvature of the loss."""


def solve(job: Job) -> Solution:
    """Return the change that removes heads.

    With a tolerance, remove the largest set that a search finds within this relative increase of the loss.
    Without a tolerance, remove the requested share of heads, the cheapest by estimate. Query heads that share
    keys are removed together with their key head. A uniform removal takes as many from each layer.
    """
    layers, skipped = job.found
    if job.uniform:
        layers, plan, notes, importance = _uniform(job, layers)
    elif job.keep is None:
        plan, notes, importance = _within(job, layers)
    else:
        total = sum(layer.heads for layer in layers)
        plan, importance = _cheapest(job, layers, total - job.keep * total)
        note = f"Heads: {_count(plan, layers)}, the cheapest by estimate in {ROUNDS} rounds"
        notes = [f"{note} ({importance.record.loss}).", *importance.record.notes]
    if reason := difference(job.model, layers, plan, job.short, job.uniform):
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected="outputs of the smaller model equal to outputs with these heads set to zero",
            got=reason,
            fix="The model is unchanged: its own code does not compute with the other heads alone.",
        )
    heads = _records(layers, plan, importance)
    by_site = grouped((head for head in heads if not head.width), attrgetter("site"))
    listed = [f"{site} {', '.join(str(head.head) for head in gone)}" for site, gone in by_site.items()]
    notes += [f"Removed heads: {'; '.join(listed)}."] if listed else []
    removable, cost = importance.record.removable, math.nan
    if removable is not None and removable.heads and job.eval_batches is not job.batches:
        settings = ImportanceSettings(seed=job.seed)
        cost = ablation_cost(job.model, job.eval_batches, removable.heads, settings).relative
    return Solution(
        removal(job.model, layers, plan, job.uniform),
        heads=heads,
        key_heads={
            layer.name: layer.remaining(plan.get(layer.name, set()))[1]
            for layer in layers
            if layer.value_heads > 1
        },
        skipped=skipped,
        notes=notes,
        cost=cost,
    )


def _within(job: Job, layers: list[HeadProjections]) -> tuple[Plan, list[str], Importance]:
    """Return the largest set of heads whose removal is within the tolerance, notes, and the importance.

    Raise `CompressionError` if no cost is known.
    """
    importance = _importance(job, layers, {}, tolerance=job.tolerance)
    record = importance.record
    removable = record.removable
    if removable is None:
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected="heads whose cost is known",
            got="; ".join(record.notes) or "none: no gradient reaches them",
            fix="`rankwise audit --importance` shows the reason for each layer.",
        )
    plan: Plan = {}
    groups = {layer.name: layer.group for layer in layers}
    for head in removable.heads:
        plan.setdefault(head.site, set()).add((head.head or 0) // groups[head.site])
    note = (
        f"Heads: {_count(plan, layers)}; without them the loss ({record.loss}, {record.unit}) is "
        f"{record.value + removable.chosen_relative * record.reference:.4g} on the calibration data, "
        f"{record.value:.4g} with them "
        f"({removable.chosen_relative:+.2%} of {record.reference_name}); the tolerance was "
        f"{job.tolerance:g} of that. Sorted by {removable.sorted_by}; {removable.runs} sets were run."
    )
    return plan, [note, *record.notes], importance


def _cheapest(
    job: Job, layers: list[HeadProjections], count: float, each: float = math.inf
) -> tuple[Plan, Importance]:
    """Return `count` heads of least estimated cost, and the importance of heads before any removal.

    At most `each` units are taken among rivals: units of one layer, or of one of its groups if keys stay.
    """
    by_name = {layer.name: layer for layer in layers}
    plan: Plan = {}
    measured: list[Importance] = []
    for number in range(1, ROUNDS + 1):
        measured.append(_importance(job, layers, plan, tolerance=None, probes=PROBES))
        room = count * number / ROUNDS
        removed = sum(len(units) * by_name[name].group for name, units in plan.items())
        for cheapest in sort_by_cost(measured[-1].heads, exact=False, group=_by_unit(layers, plan)):
            layer = by_name[cheapest[0].site]  # a layer that runs twice lists each call
            unit, units = (cheapest[0].head or 0) // layer.group, plan.setdefault(layer.name, set())
            rivals = [other for other in units if other // layer.rivals == unit // layer.rivals]
            if removed + layer.group <= room + 1e-9 and len(rivals) < each:
                units.add(unit)
                removed += layer.group
    return plan, measured[0]


def check(job: Job) -> None:
    """Raise `CompressionError` if no configuration describes a uniform removal at the target of a job."""
    if job.uniform:
        _levels(job, job.found[0])


def _levels(job: Job, layers: list[HeadProjections]) -> list[tuple[list[HeadProjections], int]]:
    """Return uniform removals that configurations describe, largest first: layers, and units per layer.

    Units are groups of query heads with their key head, or single query heads of each group, whose key head
    stays. With a share to keep, return only the largest removal within it.
    """
    heads, value_heads = layers[0].heads, layers[0].value_heads
    sizes = {f"{layer.heads} heads for {layer.value_heads} key heads" for layer in layers}
    reasons = [f"layers with {' and '.join(sorted(sizes))}"] if len(sizes) > 1 else []
    ways = [] if reasons else [layers]
    if ways and 1 < value_heads < heads:
        ways.append([replace(layer, keys_stay=True) for layer in layers])
    options = [(some, number) for some in ways for number in range(1, some[0].rivals)]
    options.sort(key=lambda option: -_removed(*option))
    levels: list[tuple[list[HeadProjections], int]] = []
    shares: list[str] = []
    tried: dict[tuple[bool, int], str] = job.reused.setdefault("levels", {})
    for some, number in options:
        if (option := (some[0].keys_stay, number)) not in tried:
            units = {unit for unit in range(some[0].units) if unit % some[0].rivals < number}
            plan = dict.fromkeys((layer.name for layer in some), units)
            tried[option] = difference(job.model, some, plan, job.short, True)
        if tried[option]:
            reasons.append(tried[option])
            continue
        shares.append(f"{1 - _removed(some, number) / heads:.3g}")
        if job.keep is None or _removed(some, number) <= (1 - job.keep) * heads + 1e-9:
            levels.append((some, number))
            if job.keep is not None:
                break
    if not levels:
        possible = f"`keep` can be {' or '.join(dict.fromkeys(shares))}"
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected="fewer heads in every layer, in a configuration from which its class builds the model",
            got=reasons[0] if reasons else f"no number of heads for `keep` {job.keep:g} of {heads}",
            fix=f"{possible if shares else 'Remove heads without `uniform`, or blocks'}. The model is "
            "unchanged.",
        )
    return levels


def _removed(layers: list[HeadProjections], number: int) -> int:
    """Return the number of heads that each layer loses in a uniform removal."""
    return number * layers[0].heads // layers[0].rivals


def _uniform(
    job: Job, layers: list[HeadProjections]
) -> tuple[list[HeadProjections], Plan, list[str], Importance]:
    """Return layers, the units that each loses, as many in each, notes, and the importance of heads."""
    chosen: tuple[list[HeadProjections], Plan, int] | None = None

    def cost(layers: list[HeadProjections], plan: Plan, batches: list[Any]) -> Any:
        units = _by_unit(layers, plan)
        heads = [x for x in importance.heads if x.site in plan and units(x) is None]
        return ablation_cost(job.model, batches, heads, ImportanceSettings(seed=job.seed))

    for some, number in reversed(_levels(job, layers)):
        plan, importance = _cheapest(job, some, _removed(some, number) * len(some), number)
        if job.tolerance is not None and cost(some, plan, job.batches).relative > job.tolerance:
            break
        chosen = some, plan, number
    if chosen is None:
        return layers, {}, [f"Heads: {_count({}, layers)}: one of each layer costs too much."], importance
    some, plan, number = chosen
    free, _ = _cheapest(job, layers, _removed(some, number) * len(some))
    prices = [cost(each, units, job.eval_batches).cost for each, units in ((some, plan), (layers, free))]
    data = "held-out data" if job.eval_batches is not job.batches else "the calibration data"
    one = "heads" if some[0].group == 1 else "key heads"
    kind = "query heads of each key head" if some[0].keys_stay else one
    note = (
        f"Heads: {_count(plan, some)}, in every layer {number} of {some[0].rivals} {kind}. This adds "
        f"{prices[0]:.4g} to the loss ({importance.record.loss}, {importance.record.unit}) on {data}. The "
        f"cheapest {_count(free, layers).split()[0]} heads of all layers, which no plain configuration "
        f"describes, would add {prices[1]:.4g}."
    )
    return some, plan, [note, *importance.record.notes], importance


def _importance(job: Job, layers: list[HeadProjections], plan: Plan, **settings: Any) -> Importance:
    """Return the importance of heads, measured with the heads of a plan set to zero."""
    chosen = ImportanceSettings(exact=False, seed=job.seed, hold_out=False, **settings)
    group = _by_unit(layers, plan)
    with zeroed(job.model, layers, plan):
        return measure_importance(job.model, job.batches, chosen, group=group, on_progress=job.on_progress)


def _by_unit(layers: list[HeadProjections], plan: Plan) -> Any:
    """Return a function from a head to its unit.

    The function returns None if the head cannot be removed, or if its unit is already in the plan.
    """
    groups = {layer.name: layer.group for layer in layers}

    def key(head: Address) -> Hashable | None:
        if head.site not in groups:
            return None
        unit = (head.head or 0) // groups[head.site]
        return None if unit in plan.get(head.site, ()) else (head.site, unit)

    return key


def _count(plan: Plan, layers: list[HeadProjections]) -> str:
    removed = sum(len(plan.get(layer.name, ())) * layer.group for layer in layers)
    return f"{removed} of {sum(layer.heads for layer in layers)} removed"


def _records(layers: list[HeadProjections], plan: Plan, importance: Importance) -> list[HeadWidth]:
    places = {head.site: (head.stack, head.layer or 0) for head in reversed(importance.heads)}
    return [
        HeadWidth(
            part="heads",
            stack=places[layer.name][0],
            site=layer.name,
            layer=places[layer.name][1],
            head=head,
            before=layer.value_width,
            width=0 if removed else layer.value_width,
            kl=float("nan") if removed else 0.0,
            kl_calibrated=float("nan") if removed else 0.0,
        )
        for layer in layers
        for head in range(layer.heads)
        for removed in [head // layer.group in plan.get(layer.name, ())]
    ]
