"""The part ``qk``: narrower queries and keys, for models whose positions are not rotated in."""

from functools import partial
from typing import Any

import torch
from torch import nn

from rankwise.compression.layers import AttentionLayer, Found, find_layers, see
from rankwise.compression.narrow_heads import (
    Factors,
    calibrated,
    chosen_widths,
    closed_form,
    head_curves,
    layer_divergence,
    narrow_layers,
    turned,
)
from rankwise.compression.null_ways import null_curves
from rankwise.compression.outputs import main_output, relative_error
from rankwise.compression.part_checks import (
    check_some,
    check_tokens,
    check_width,
    keep_sound,
    naming_layer,
    no_finite_layer,
)
from rankwise.compression.parts import Job, PartResult
from rankwise.compression.records import HeadWidth


def compress_query_keys(job: Job) -> PartResult:
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
    notes = _check_tokens(layers)
    curves = []
    for layer in layers:
        with naming_layer(layer.found.name):
            curves += head_curves(layer, job.on_step)
    width = job.width if job.keep is None else job.keep * layers[0].found.width
    widths = chosen_widths(curves, job.tolerance, width)
    plan: list[tuple[AttentionLayer, Factors]] = []
    heads: list[HeadWidth] = []
    complete, at = True, 0
    for layer in layers:
        own, at = widths[at : at + layer.found.key_heads], at + layer.found.key_heads
        factors = closed_form(layer, own)
        before = _by_key(layer, factors)
        after = before
        if job.calibrate and complete:
            with naming_layer(layer.found.name):
                factors, after, complete = _calibrated(layer, factors, job)
        plan.append((layer, factors))
        heads += [_record(layer, head, own[head], before[head], after[head]) for head in range(len(own))]
    swap = narrow_layers(job.model, [(layer.found, factors) for layer, factors in plan])
    figures = see(job.model, [layer.found for layer in layers], job.figures, job.on_step)
    kl = {
        layer.found.name: float(layer_divergence(layer, factors).mean())
        for layer, (_, factors) in zip(figures, plan, strict=True)
    }
    nulls = null_curves(job, layers, figures, curves) if job.nulls else []
    swap.put_in()
    if not complete:
        notes.append(
            "Calibration was stopped by Ctrl-C: what was done is kept, later layers have the closed form."
        )
    return PartResult(
        heads, kl, nulls, layers[0].tokens, left_out, notes, complete, swap.take_out, swap.put_in
    )


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


def _check_tokens(layers: list[AttentionLayer]) -> list[str]:
    """Refuse too little text, and say where second moments lack rank."""
    width, tokens = max(layer.found.width for layer in layers), min(layer.tokens for layer in layers)
    check_tokens(tokens, width)
    poor = sum(
        int((torch.linalg.matrix_rank(layer.query_moments, hermitian=True) < layer.found.width).sum())
        + int((torch.linalg.matrix_rank(layer.key_moments, hermitian=True) < layer.found.width).sum())
        for layer in layers
    )
    if not poor:
        return []
    return [
        f"Second moments of {poor} sets of queries or keys lack full rank on {tokens} tokens: a ridge of "
        "1e-9 was added; directions never seen are dropped first. More text says more."
    ]


def _calibrated(layer: AttentionLayer, start: Factors, job: Job) -> tuple[Factors, list[float], bool]:
    done = 0

    def count(steps: int) -> None:
        nonlocal done
        done = steps
        job.on_step(f"calibrating {layer.found.name}: {steps} of {job.calibrate}")

    factors = calibrated(layer, start, job.calibrate, job.seed, count)
    after, before = _by_key(layer, factors), _by_key(layer, start)
    complete = done == job.calibrate
    if sum(after) < sum(before):
        return factors, after, complete
    return start, before, complete


def _by_key(layer: AttentionLayer, factors: Factors) -> list[float]:
    each = layer_divergence(layer, factors)
    return each.unflatten(0, (-1, factors.groups)).mean(1).tolist()


def _record(layer: AttentionLayer, head: int, width: int, kl: float, calibrated: float) -> HeadWidth:
    found = layer.found
    return HeadWidth(
        part="qk",
        stack=found.stack,
        site=found.name,
        layer=found.layer,
        head=head,
        before=found.width,
        width=width,
        kl=kl,
        kl_calibrated=calibrated,
    )
