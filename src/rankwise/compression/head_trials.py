"""Whether a family's own code computes with fewer heads, and with which sizes set: by trial."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Change, device_of, first_sequences, to_device
from rankwise.compression.head_sites import RUNGS, HeadSite, find_head_sites
from rankwise.compression.outputs import check_finite, main_output, relative_error
from rankwise.compression.removed_heads import build
from rankwise.errors import first_line
from rankwise.tracing import record_calls

Plan = Mapping[str, set[int]]
"""Units that go, by the name of their layer."""
NOT_SO = "its own code does not compute with fewer heads: "


def removable_sites(model: nn.Module, batch: Any) -> tuple[list[HeadSite], dict[str, str]]:
    """Attention layers from which heads can be removed, and how; the reason for all others.

    One unit is removed from a layer, with the sizes of the layer's code changed in one of a few ways, and
    what its output projection reads of the other heads must stay what it is where those of the unit are
    zero. The first way that passes is kept.

    Args:
        model: the model, in evaluation mode; it is as it was afterwards.
        batch: what it takes.
    """
    short = to_device(first_sequences(batch, 2), device_of(model))
    found, reasons = find_head_sites(model, short)
    if found or reasons:
        check_finite(model, main_output(model, short))
    settled: list[HeadSite] = []
    waiting = list(found)
    while waiting:
        first, waiting = waiting[0], waiting[1:]
        said = ""
        for rung in range(RUNGS):
            said = trial(model, [replace(first, rung=rung)], short)
            if not said:
                settled.append(replace(first, rung=rung))
                break
        if said:
            reasons[first.name] = NOT_SO + said
            continue
        alike = [replace(head, rung=settled[-1].rung) for head in waiting]
        if alike and not trial(model, alike, short):
            settled, waiting = [*settled, *alike], []
    order = {trial.name: at for at, trial in enumerate(found)}
    return sorted(settled, key=lambda trial: order[trial.name]), reasons


def trial(model: nn.Module, sites: list[HeadSite], batch: Any) -> str:
    """Remove the first unit of some layers, and look whether all else stays; what went wrong, or nothing.

    Args:
        model: the model; it is as it was afterwards.
        sites: layers.
        batch: what it takes, on its device.
    """
    plan = {site.name: {0} for site in sites}
    try:
        with zeroed(model, sites, plan):
            expected = _read(model, sites, batch)
        with removal_of(model, sites, plan):
            got = _read(model, sites, batch)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
        return first_line(error)
    bound = torch.finfo(got[""].dtype).eps ** 0.5
    for site in sites:
        kept = expected[site.name][..., site.group * site.value_width :]
        if site.units == 1:
            kept = torch.zeros_like(got[site.name])
        if got[site.name].shape != kept.shape or not bool(got[site.name].isfinite().all()):
            return f"its heads give {tuple(got[site.name].shape)} in the place of {tuple(kept.shape)}"
        if relative_error(got[site.name], kept) > bound:
            return "the heads that are left give something else"
    off = relative_error(got[""], expected[""])
    return "" if off <= bound else f"the output of the model is off by {off:.1e}"


def removal_of(model: nn.Module, sites: list[HeadSite], plan: Plan) -> Change:
    """The removal of units, not yet put in.

    Args:
        model: the model.
        sites: its layers.
        plan: what goes.
    """
    changes = [
        site.without(plan[site.name], model.get_submodule(site.name)) for site in sites if plan.get(site.name)
    ]
    return build(model, changes)


@contextmanager
def zeroed(model: nn.Module, sites: list[HeadSite], plan: Plan) -> Iterator[None]:
    """The model with zeros in the place of what some units give, at its full size.

    Args:
        model: the model.
        sites: its layers.
        plan: which units.
    """
    handles = []
    for site in sites:
        width = site.group * site.value_width
        gone = [unit * width + at for unit in sorted(plan.get(site.name, ())) for at in range(width)]
        if gone:
            module = model.get_submodule(site.into)
            handles.append(module.register_forward_pre_hook(_zeroing(gone)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeroing(channels: list[int]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = torch.ones(args[0].shape[-1], dtype=torch.bool, device=args[0].device)
        kept[channels] = False
        return (args[0].masked_fill(~kept, 0), *args[1:])

    return hook


def _read(model: nn.Module, sites: list[HeadSite], batch: Any) -> dict[str, Tensor]:
    """What the output projections read, and under ``""`` what the model gives."""
    with record_calls(model, {site.into for site in sites}) as calls:
        output = main_output(model, batch)
    read = {call.name: call.args[0] for call in calls}
    return {site.name: read[site.into] for site in sites if site.into in read} | {"": output}
