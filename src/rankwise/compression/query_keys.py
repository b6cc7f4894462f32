"""The part ``qk``: narrower queries and keys, for models whose positions are not rotated in."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from rankwise.compression.layers import AttentionLayer, Found, find_layers, linear_names, see
from rankwise.compression.memory import naming_layer
from rankwise.compression.narrow_heads import (
    chosen_widths,
    closed_form,
    head_curves,
    turned,
)
from rankwise.compression.narrowing import narrowed_heads
from rankwise.compression.null_ways import null_curves
from rankwise.compression.outputs import main_output, relative_error
from rankwise.compression.part_checks import (
    check_moments,
    check_some,
    check_width,
    keep_sound,
    no_finite_layer,
)
from rankwise.compression.parts import Change, Job, PartResult, Prepared
from rankwise.compression.qk_modules import Factors, narrow_layers


def prepare_query_keys(job: Job) -> Prepared:
    """Narrow queries and keys: closed form, widths under one budget, calibration, in that order.

    Args:
        job: what to do.

    Raises:
        CompressionError: if no layer can be done, or the request fits none.
    """
    found, left_out = _usable(job.model, job.batches[0])
    check_width(job.width, min(layer.width for layer in found))
    layers = see(job.model, found, job.batches, job.on_step)
    layers, left_out = _sound(layers, left_out)
    stacks = [stack for layer in layers for stack in (layer.query_moments, layer.key_moments)]
    width = max(layer.found.width for layer in layers)
    notes = check_moments(stacks, "queries or keys", min(layer.tokens for layer in layers), width)
    curves = []
    for layer in layers:
        with naming_layer(layer.found.name):
            curves += head_curves(layer, job.on_step)

    def starts(wanted: Job) -> list[Factors]:
        width = wanted.width if wanted.keep is None else wanted.keep * layers[0].found.width
        left = iter(chosen_widths(curves, wanted.tolerance, width))
        return [closed_form(layer, [next(left) for _ in range(layer.found.key_heads)]) for layer in layers]

    def change(keep: float) -> Change:
        factors = starts(replace(job, keep=keep, tolerance=None, width=None))
        return narrow_layers(
            job.model, [(layer.found, own) for layer, own in zip(layers, factors, strict=True)]
        )

    def finish(wanted: Job) -> PartResult:
        result = narrowed_heads(
            "qk", wanted, layers, starts(wanted), lambda figures: null_curves(job, layers, figures, curves)
        )
        return replace(result, left_out=left_out, notes=[*notes, *result.notes])

    return Prepared(linear_names([layer.found for layer in layers]), change, finish)


def _usable(model: nn.Module, batch: Any) -> tuple[list[Found], dict[str, str]]:
    """Layers whose heads may be turned into any basis; the reason for all others."""
    found, reasons = find_layers(model, batch)
    failed = keep_sound(model, batch, found, partial(_same_when_turned, model))
    reasons |= {
        layer.name: "its outputs change with the basis of queries and keys: something besides "
        "their inner products reads them"
        for layer in failed
    }
    check_some(
        model,
        found,
        reasons,
        "softmax attention whose queries and keys are outputs of linear layers, unrotated",
        "Where positions are rotated in, use `compress` with the part `rotary`.",
    )
    return found, reasons


def _same_when_turned(model: nn.Module, found: list[Found], batch: Any, before: Any, bound: float) -> bool:
    with turned(model, found):
        return relative_error(main_output(model, batch), before) <= bound


def _sound(
    layers: list[AttentionLayer], left_out: dict[str, str]
) -> tuple[list[AttentionLayer], dict[str, str]]:
    broken = {
        layer.found.name: f"NaN or infinity in head {min(layer.broken)}" for layer in layers if layer.broken
    }
    sound = [layer for layer in layers if not layer.broken]
    if not sound:
        raise no_finite_layer(broken)
    return sound, {**left_out, **broken}
