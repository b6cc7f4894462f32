"""The part ``rotary``: rotary pairs that attention does not need, out of queries, keys and the cache."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rankwise.compression.layers import AttentionLayer, Found, linear_names, see
from rankwise.compression.memory import naming_layer
from rankwise.compression.narrowing import narrowed_heads
from rankwise.compression.outputs import main_output, relative_error
from rankwise.compression.part_checks import (
    check_moments,
    check_some,
    check_width,
    keep_sound,
    no_finite_layer,
)
from rankwise.compression.parts import Change, Job, PartResult, Prepared
from rankwise.compression.qk_modules import Factors, narrow_layers, narrow_projections
from rankwise.compression.records import BudgetCurve
from rankwise.compression.rotary_layers import find_rotary_layers
from rankwise.compression.rotary_nulls import pair_curves
from rankwise.compression.rotary_pairs import Order, greedy, kept_factors, rows_of, units_of, whole_factors
from rankwise.compression.widths import widths_for_tolerance, widths_under_budget
from rankwise.errors import CompressionError


def prepare_rotary(job: Job) -> Prepared:
    """Keep the rotary pairs that attention needs: greedy by attention KL, widths under one budget.

    Pairs are chosen for each key head; the query heads that read it keep the same. A pair that goes is zero
    in queries and keys, so that it adds nothing to any logit, and is neither computed nor cached. Channels
    that are not rotated get the closed form of `compress_qk`. With ``calibrate``, what kept pairs carry
    before the rotation becomes any linear map of the head's channels, by steps of Adam.

    Args:
        job: what to do.

    Raises:
        CompressionError: if no layer can be done, or the request fits none.
    """
    found, left_out = _usable(job.model, job.batches[0])
    layers = see(job.model, found, job.batches, job.on_step)
    left_out |= {
        layer.found.name: "NaN or infinity in its queries or keys" for layer in layers if layer.broken
    }
    layers = [layer for layer in layers if not layer.broken]
    if not layers:
        raise no_finite_layer(left_out)
    check_width(job.width, min(layer.found.width for layer in layers))
    check_moments([], "", min(layer.tokens for layer in layers), max(layer.found.width for layer in layers))
    wholes = [whole_factors(layer) for layer in layers]
    orders: list[list[Order]] = []
    for layer, whole in zip(layers, wholes, strict=True):
        with naming_layer(layer.found.name):
            orders.append(_orders(layer, whole, job))

    def starts(wanted: Job) -> list[Factors]:
        widths = pair_widths(wanted, layers, orders)
        return [
            kept_factors(layer, whole, own_orders, own)
            for layer, whole, own_orders, own in zip(layers, wholes, orders, widths, strict=True)
        ]

    def nulls(figures: list[AttentionLayer]) -> list[BudgetCurve]:
        job.on_step("measuring other pairs")
        return pair_curves(job, layers, figures, wholes, orders)

    def change(keep: float) -> Change:
        factors = starts(replace(job, keep=keep, tolerance=None, width=None))
        return narrow_layers(
            job.model, [(layer.found, own) for layer, own in zip(layers, factors, strict=True)]
        )

    def finish(wanted: Job) -> PartResult:
        return replace(narrowed_heads("rotary", wanted, layers, starts(wanted), nulls), left_out=left_out)

    return Prepared(linear_names([layer.found for layer in layers]), change, finish)


def _usable(model: nn.Module, batch: Any) -> tuple[list[Found], dict[str, str]]:
    """Layers whose pairs may be turned by any angle; the reason for all others."""
    if any(True for _ in narrow_projections(model)):
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="a model that is not compressed yet",
            got="one with narrowed queries and keys",
            fix="Load the original, and compress it once to the width you want.",
        )
    found, reasons = find_rotary_layers(model, batch)
    failed = keep_sound(model, batch, found, partial(_same_when_turned, model))
    reasons |= {
        layer.name: "its outputs change where a pair turns in queries and keys alike" for layer in failed
    }
    check_some(
        model,
        found,
        reasons,
        "softmax attention whose queries and keys are rotated by position and nothing else",
        "Without rotated positions, the part `qk` may do.",
    )
    return found, reasons


def _same_when_turned(
    model: nn.Module, found: list[Found], batch: Any, before: torch.Tensor, bound: float
) -> bool:
    """Whether outputs stay with every pair turned by a random angle, and other channels in another basis."""
    generator = torch.Generator().manual_seed(0)
    plan: list[tuple[Found, Factors]] = []
    for layer in found:
        turns = torch.stack([_turn(layer, generator) for _ in range(layer.key_heads)])
        every = [list(range(layer.width))] * layer.key_heads
        plan.append((layer, Factors(turns.repeat_interleave(layer.groups, 0), turns, every)))
    with narrow_layers(model, plan, cache=False):
        return relative_error(main_output(model, batch), before) <= bound


def _turn(layer: Found, generator: torch.Generator) -> torch.Tensor:
    turn = torch.eye(layer.width, dtype=torch.float64)
    for first, second in layer.pairs.tolist():
        angle = 6.28 * torch.rand((), generator=generator, dtype=torch.float64)
        turn[first, first] = turn[second, second] = angle.cos()
        turn[first, second], turn[second, first] = angle.sin(), -angle.sin()
    rotated = {channel for pair in layer.pairs.tolist() for channel in pair}
    free = torch.tensor([c for c in range(layer.width) if c not in rotated], dtype=torch.long)
    drawn = torch.randn(len(free), len(free), generator=generator, dtype=torch.float64)
    turn[free[:, None], free] = torch.linalg.qr(drawn).Q
    return turn


def _orders(layer: AttentionLayer, whole: Factors, job: Job) -> list[Order]:
    job.on_step(f"comparing pairs of {layer.found.name}")
    units = units_of(layer)
    return [
        greedy(rows_of(layer.samples, head, whole, units, job.seed), units)
        for head in range(layer.found.key_heads)
    ]


def pair_widths(job: Job, layers: list[AttentionLayer], orders: list[list[Order]]) -> list[list[int]]:
    """Widths of each key head, out of those its units give: fewer under a budget, more for a tolerance.

    Args:
        job: what to do.
        layers: what the layers saw.
        orders: how the units of each key head go.
    """
    every = [order for own in orders for order in own]
    curves = [(order.widths, order.losses) for order in every]
    if job.tolerance is not None:
        wanted = widths_for_tolerance(curves, job.tolerance)
        chosen = [
            min(w for w in order.widths if w >= width) for order, width in zip(every, wanted, strict=True)
        ]
    else:
        whole = [layer.found.width for layer in layers for _ in range(layer.found.key_heads)]
        budget = job.keep * sum(whole) if job.keep is not None else (job.width or 0) * len(whole)
        wanted = widths_under_budget(curves, round(budget))
        chosen = [
            max(w for w in order.widths if w <= width) for order, width in zip(every, wanted, strict=True)
        ]
    found = iter(chosen)
    return [[next(found) for _ in own] for own in orders]
