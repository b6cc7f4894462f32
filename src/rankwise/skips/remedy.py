"""What is named against a COLLAPSE: a λ, the layers that it goes to, and what says so."""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch
from rankwise.auditing.records import Finding
from rankwise.auditing.run import audit
from rankwise.errors import CaptureError
from rankwise.skips.probe import probing, replacing_sums
from rankwise.skips.skips import skips_of
from rankwise.skips.verify import scaled_sums, unhooked

KEEP = 0.5
"""The part of μ² that each layer is to keep."""

Trial = Callable[[Mapping[str, float]], Finding | None]
"""The COLLAPSE that is left with these λ, by name of the site."""


def with_remedy(finding: Finding, layers: Sequence[Any], carries: bool, tried: Trial) -> Finding:
    """A COLLAPSE with the λ that each bound asks for, and the command that puts a λ in.

    A λ below 1 is set to 1, the λ of a skip connection without any, in the layers at fault, if no COLLAPSE is
    left then. Else it is what the bound asks for or 2, the larger, in all layers of the stack below it. Where
    no λ is below 1, it is what the bound asks for or twice the least, in the layers at fault.

    Numbers are those of the mixer in the block where the collapse starts, or of the last of the stack.

    Args:
        finding: the COLLAPSE.
        layers: of the certificate of its model.
        carries: whether the model has λ-skips.
        tried: called with λ = 1 for the layers at fault, where a λ is below 1.
    """
    stack = [layer for layer in layers if layer.site.startswith(f"{finding.where.stack}.")] or list(layers)
    inside = [at for at, layer in enumerate(stack) if f"{layer.site}.".startswith(f"{finding.where.site}.")]
    at = stack[inside[-1] if inside else -1]
    # A collapse is one of μ/‖Y‖; after a norm, where ‖Y‖ is set, the scale for μ is that for both.
    sound = at.sound_scale_relative if at.norm == "none" else at.sound_scale
    scales = {
        "lambda": at.scale,
        "lambda_sound": sound,
        "lambda_paper": at.paper_scale,
        "lambda_paper_with_floor": at.paper_scale_with_floor,
    }
    known = {name: value for name, value in scales.items() if value is not None and math.isfinite(value)}
    bound = known.get("lambda_sound", 0.0)
    fault = _suspects(stack, inside[0] if inside else 0)
    least = min(abs(layer.scale) for layer in fault)
    init = 1.0 if least < 1 else _up(max(bound, 2 * least))
    if least < 1:
        left = tried(dict.fromkeys(_below(fault, 1.0), 1.0))
        if left is not None:
            # What is lost before the collapse shows is lost for the layers after it.
            fault, init = stack, _up(max(bound, 2.0))
            known["relative_spread_lowest_at_1"] = left.evidence["relative_spread_lowest"]
    named = _below(fault, init)
    # Without --sites, every λ that was fitted would be set anew.
    some = carries and len(named) < len({layer.site for layer in layers})
    sites = "".join(f"--sites {site} " for site in named) if some else ""
    return finding.model_copy(
        update={
            "evidence": finding.evidence | known,
            "remedy": f"rankwise skip MODEL --init {init:g} {sites}--text TEXT --out DIR",
        }
    )


def _suspects(stack: Sequence[Any], start: int) -> Sequence[Any]:
    """The layers from where a collapse is found to the end, and those before that keep less than they may."""
    kept = math.sqrt(KEEP)
    return [
        layer
        for at, layer in enumerate(stack)
        if at >= start or layer.relative_out < kept * layer.relative_in
    ]


def _below(layers: Sequence[Any], scale: float) -> list[str]:
    return list(dict.fromkeys(layer.site for layer in layers if abs(layer.scale) < scale))


def _up(value: float) -> float:
    """Two digits, never fewer than the value asks for."""
    return float(Context(prec=2, rounding=ROUND_CEILING).create_decimal(repr(value)))


def collapse_with(
    model: nn.Module,
    batch: Batch,
    stack: str,
    scales: Mapping[str, float],
    on_unknown: Callable[[str], None],
) -> Finding | None:
    """The COLLAPSE of a stack in an audit of a model with other λ; nothing of the model is written to.

    Cost: one audit of the batch.

    Args:
        model: with λ-skips.
        batch: what to audit it on, on its device.
        stack: the stack of blocks that is looked at.
        scales: the λ to try, by name of the site; those of other sites stay as they are.
        on_unknown: called with the reason where the model cannot be audited without further arguments, such
            as ``sites=``.

    Returns:
        None where the audit finds no COLLAPSE there, or cannot be made.
    """
    skips = skips_of(model)
    sites = list(skips.sites.values())
    given: dict[str, Tensor | float] = {site.name: skips[site.name].detach() for site in sites}
    sums = scaled_sums(sites, {**given, **scales})
    try:
        with unhooked(model), probing(model), torch.no_grad(), replacing_sums(model, sums):
            return collapse_of(model, batch, stack)
    except CaptureError as error:
        on_unknown(str(error))
        return None


def collapse_of(model: nn.Module, batch: Batch, stack: str) -> Finding | None:
    """The COLLAPSE of a stack in an audit of a model as it is.

    Args:
        model: any module, in evaluation mode.
        batch: what to audit it on, on its device.
        stack: the stack of blocks that is looked at.
    """
    found = audit(model, [batch]).findings
    return next((each for each in found if each.code == "COLLAPSE" and each.where.stack == stack), None)
