"""The part ``heads``: heads whose removal the model hardly notices go, with all their weights."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import device_of, first_sequences, to_device
from rankwise.compression.head_sites import HeadSite
from rankwise.compression.head_trials import removable_sites, removal_of, zeroed
from rankwise.compression.layers import check_some
from rankwise.compression.outputs import main_output, relative_error
from rankwise.compression.parts import Job, PartResult
from rankwise.compression.records import HeadWidth
from rankwise.compression.removed_heads import removed_heads_of
from rankwise.compression.structure import structure_of
from rankwise.errors import CompressionError
from rankwise.importance import Importance, ImportanceSettings, measure, sort_by_cost
from rankwise.tracing import HeadId

ROUNDS = 4
"""In which a share of the heads goes: costs are estimated again after each."""
PROBES = 2
"""Random projections for the curvature in each round."""


def remove_heads(job: Job) -> PartResult:
    """Remove heads: all that `rankwise.importance` finds removable within the tolerance, or a share of them.

    Under ``tolerance`` the set is the joint one of `importance.measure`; under ``keep`` heads go in
    rounds, the cheapest by estimate first. Query heads that share keys go together, with their key head.

    Args:
        job: what to do; its tolerance is a share of the loss.

    Raises:
        CompressionError: if no layer can be done, or the request fits none.
    """
    if structure_of(job.model).changes:
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected="a model that is not compressed yet",
            got="one with " + ("removed heads" if _has_removed(job.model) else "narrowed layers"),
            fix="Load the original; name all parts at once: heads are done first.",
        )
    job.on_step("looking for heads that can be removed")
    sites, left_out = removable_sites(job.model, job.batches[0])
    check_some(
        job.model,
        sites,
        left_out,
        "softmax attention whose heads come from linear layers and go into a linear layer",
        "Its heads cannot be removed this way; `rankwise audit --importance` measures what they do.",
    )
    plan, notes, importance = _within(job, sites) if job.keep is None else _share(job, sites)
    removal = removal_of(job.model, sites, plan)
    with zeroed(job.model, sites, plan):
        expected = main_output(job.model, _short(job))
    removal.apply()
    off = relative_error(main_output(job.model, _short(job)), expected)
    if not off <= torch.finfo(expected.dtype).eps ** 0.5:  # NaN is not
        removal.undo()
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected="outputs of the smaller model that are those with the heads at zero",
            got=f"a relative difference of {off:.1e}",
            fix="The model is as it was: its own code does not compute with these heads alone.",
        )
    if job.calibrate:
        notes = [*notes, "Heads are removed whole: steps of calibration are for qk and rotary alone."]
    return PartResult(
        heads=_records(sites, plan, importance),
        kl={site.name: float("nan") for site in sites},
        tokens=round(importance.record.counted),
        left_out=left_out,
        notes=notes,
        undo=removal.undo,
        redo=removal.apply,
    )


def _within(job: Job, sites: list[HeadSite]) -> tuple[dict[str, set[int]], list[str], Importance]:
    """The set that can go together within the tolerance."""
    assert job.tolerance is not None
    importance = _importance(job, sites, {}, job.tolerance)
    found = importance.record.removable
    if found is None:
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected="heads whose cost is known",
            got="; ".join(importance.record.notes) or "none: no gradient reaches them",
            fix="`rankwise audit --importance` says why, for each layer.",
        )
    plan: dict[str, set[int]] = {}
    groups = {site.name: site.group for site in sites}
    for head in found.heads:
        plan.setdefault(head.site, set()).add(number_of(head) // groups[head.site])
    record = importance.record
    share = f" ({found.relative:+.2%} of {record.reference_name})"
    say = (
        f"Heads: {_count(plan, sites)}; without them the loss ({record.loss}, {record.unit}) is "
        f"{found.loss:.4g} on the calibration data, {record.value:.4g} with them{share}; the tolerance "
        f"was {job.tolerance:g} of that. Sorted by {found.sorted_by}; {found.runs} sets were run."
    )
    return plan, [say, *record.notes], importance


def _share(job: Job, sites: list[HeadSite]) -> tuple[dict[str, set[int]], list[str], Importance]:
    """The cheapest heads, in rounds."""
    assert job.keep is not None
    every = sum(site.heads for site in sites)
    plan: dict[str, set[int]] = {}
    first = None
    for number in range(1, ROUNDS + 1):
        importance = _importance(job, sites, plan, None)
        first = first or importance
        _add_cheapest(sites, importance, (every - job.keep * every) * number / ROUNDS, plan)
    assert first is not None
    say = f"Heads: {_count(plan, sites)}, the cheapest by estimate in {ROUNDS} rounds ({first.record.loss})."
    return plan, [say, *first.record.notes], first


def _add_cheapest(
    sites: list[HeadSite], importance: Importance, room: float, plan: dict[str, set[int]]
) -> None:
    """Add the cheapest units to a plan while no more heads go than there is room for."""
    groups = {site.name: site.group for site in sites}
    gone = sum(len(units) * groups[name] for name, units in plan.items())
    for unit in sort_by_cost(importance.heads, exact=False, group=_together(sites, plan)):
        if gone + len(unit) <= room + 1e-9:
            plan.setdefault(unit[0].site, set()).add(number_of(unit[0]) // groups[unit[0].site])
            gone += len(unit)


def _importance(
    job: Job, sites: list[HeadSite], plan: dict[str, set[int]], tolerance: float | None
) -> Importance:
    probes = PROBES if tolerance is None else ImportanceSettings.probes
    settings = ImportanceSettings(tolerance=tolerance, seed=job.seed, probes=probes)
    with zeroed(job.model, sites, plan):
        return measure(
            job.model, job.batches, settings, group=_together(sites, plan), on_progress=job.on_step
        )


def _together(sites: list[HeadSite], plan: dict[str, set[int]]) -> Any:
    by_name = {site.name: site for site in sites}

    def key(head: HeadId) -> Hashable | None:
        site = by_name.get(head.site)
        if site is None or number_of(head) // site.group in plan.get(head.site, ()):
            return None
        return head.site, number_of(head) // site.group

    return key


def number_of(head: HeadId) -> int:
    """Return the number of a head in its mixer."""
    assert head.head is not None
    return head.head


def _short(job: Job) -> Any:
    return to_device(first_sequences(job.batches[0], 2), device_of(job.model))


def _has_removed(model: nn.Module) -> bool:
    return any(removed_heads_of(module) is not None for module in model.modules())


def _count(plan: dict[str, set[int]], sites: list[HeadSite]) -> str:
    gone = sum(len(plan.get(site.name, ())) * site.group for site in sites)
    empty = sum(len(plan.get(site.name, ())) == site.units for site in sites)
    words = f"{gone} of {sum(site.heads for site in sites)} go"
    return words + (f", all of {empty} layers" if empty else "")


def _records(sites: list[HeadSite], plan: dict[str, set[int]], importance: Importance) -> list[HeadWidth]:
    places = {head.site: (head.stack, head.layer or 0) for head in reversed(importance.heads)}
    return [
        HeadWidth(
            part="heads",
            stack=places[site.name][0],
            site=site.name,
            layer=places[site.name][1],
            head=head,
            before=site.value_width,
            width=0 if gone else site.value_width,
            kl=float("nan") if gone else 0.0,
            kl_calibrated=float("nan") if gone else 0.0,
        )
        for site in sites
        for head in range(site.heads)
        for gone in [head // site.group in plan.get(site.name, ())]
    ]
