"""The part ``heads``: remove the attention heads whose removal costs least, with their weights."""

import math
from collections.abc import Hashable
from operator import attrgetter
from typing import Any

from rankwise._internals.batches import first_sequences, to_device
from rankwise._internals.forward import device_of
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
    keys are removed together with their key head.
    """
    layers, skipped = job.found
    plan, notes, importance = _share(job, layers) if job.tolerance is None else _within(job, layers)
    short = to_device(first_sequences(job.batches[0], 2), device_of(job.model))
    if reason := difference(job.model, layers, plan, short):
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
        removal(job.model, layers, plan),
        heads=heads,
        key_heads={
            layer.name: [unit for unit in range(layer.units) if unit not in plan.get(layer.name, ())]
            for layer in layers
            if layer.value_heads > 1
        },
        kl={layer.name: float("nan") for layer in layers},
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


def _share(job: Job, layers: list[HeadProjections]) -> tuple[Plan, list[str], Importance]:
    """Return the heads of least estimated cost, notes, and the importance of heads before any removal."""
    assert job.keep is not None
    total = sum(layer.heads for layer in layers)
    groups = {layer.name: layer.group for layer in layers}
    plan: Plan = {}
    measured: list[Importance] = []
    for number in range(1, ROUNDS + 1):
        measured.append(_importance(job, layers, plan, tolerance=None, probes=PROBES))
        room = (total - job.keep * total) * number / ROUNDS
        removed = sum(len(units) * groups[name] for name, units in plan.items())
        for unit in sort_by_cost(measured[-1].heads, exact=False, group=_by_unit(layers, plan)):
            group = groups[unit[0].site]  # if a layer runs several times, the unit lists each call
            if removed + group <= room + 1e-9:
                plan.setdefault(unit[0].site, set()).add((unit[0].head or 0) // group)
                removed += group
    record = measured[0].record
    note = f"Heads: {_count(plan, layers)}, the cheapest by estimate in {ROUNDS} rounds ({record.loss})."
    return plan, [note, *record.notes], measured[0]


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
