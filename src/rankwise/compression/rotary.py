"""The part ``rotary``: rotary pairs that attention does not need, out of queries, keys and the cache."""

from functools import partial
from typing import Any

import torch
from torch import nn

from rankwise.compression.narrow import HeadFactors, narrow_projections, narrowed, runs_of
from rankwise.compression.narrow_heads import Swap
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
from rankwise.compression.records import BudgetCurve, HeadWidth
from rankwise.compression.rotary_calibrate import calibrate_pairs
from rankwise.compression.rotary_data import PairFactors, SeenRotary, rotary_divergence, see_rotary
from rankwise.compression.rotary_layers import RotaryLayer, find_rotary_layers
from rankwise.compression.rotary_nulls import pair_curves
from rankwise.compression.rotary_pairs import Order, greedy, kept_factors, rows_of, units_of, whole_factors
from rankwise.compression.widths import widths_for_tolerance, widths_under_budget
from rankwise.errors import CompressionError


def compress_rotary(job: Job) -> PartResult:
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
    layers = see_rotary(job.model, found, job.batches, job.on_step)
    left_out |= {
        layer.found.name: "NaN or infinity in its queries or keys" for layer in layers if layer.broken
    }
    layers = [layer for layer in layers if not layer.broken]
    if not layers:
        raise no_finite_layer(left_out)
    check_width(job.width, min(layer.found.width for layer in layers))
    check_tokens(min(layer.tokens for layer in layers), max(layer.found.width for layer in layers))
    notes: list[str] = []
    wholes = [whole_factors(layer) for layer in layers]
    orders: list[list[Order]] = []
    for layer, whole in zip(layers, wholes, strict=True):
        with naming_layer(layer.found.name):
            orders.append(_orders(layer, whole, job))
    widths = pair_widths(job, layers, orders)
    plan: list[tuple[SeenRotary, PairFactors]] = []
    heads: list[HeadWidth] = []
    complete = True
    for layer, whole, own_orders, own in zip(layers, wholes, orders, widths, strict=True):
        factors = kept_factors(layer, whole, own_orders, own)
        before = after = _by_key(layer, factors)
        if job.calibrate and complete:
            with naming_layer(layer.found.name):
                factors, after, complete = _calibrated(layer, factors, before, job)
        plan.append((layer, factors))
        heads += [_record(layer, head, own[head], before[head], after[head]) for head in range(len(own))]
    swap = pair_swap(job.model, [(layer.found, factors) for layer, factors in plan])
    figures = see_rotary(job.model, [layer.found for layer in layers], job.figures, job.on_step)
    kl = {
        seen.found.name: float(rotary_divergence(seen.samples, factors).mean())
        for seen, (_, factors) in zip(figures, plan, strict=True)
    }
    curves: list[BudgetCurve] = []
    if job.nulls:
        job.on_step("measuring other pairs")
        curves = pair_curves(job, layers, figures, wholes, orders)
    swap.put_in()
    if not complete:
        notes.append("Calibration was stopped by Ctrl-C: later layers have the pairs chosen, not calibrated.")
    return PartResult(
        heads, kl, curves, layers[0].tokens, left_out, notes, complete, swap.take_out, swap.put_in
    )


def _usable(model: nn.Module, batch: Any) -> tuple[list[RotaryLayer], dict[str, str]]:
    """Layers whose pairs may be turned by any angle; the reason for all others."""
    if any(True for _ in narrow_projections(model)):
        raise CompressionError(
            f"model {type(model).__name__}",
            wanted="a model that is not compressed yet",
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
    model: nn.Module, found: list[RotaryLayer], batch: Any, before: torch.Tensor, bound: float
) -> bool:
    """Whether outputs stay with every pair turned by a random angle, and other channels in another basis."""
    generator = torch.Generator().manual_seed(0)
    plan = []
    for layer in found:
        turns = torch.stack([_turn(layer, generator) for _ in range(layer.key_heads)])
        every = [list(range(layer.width))] * layer.key_heads
        plan.append((layer, PairFactors(turns.repeat_interleave(layer.groups, 0), turns, every)))
    swap = pair_swap(model, plan, cache=False)
    swap.put_in()
    try:
        return relative_error(main_output(model, batch), before) <= bound
    finally:
        swap.take_out()


def _turn(layer: RotaryLayer, generator: torch.Generator) -> torch.Tensor:
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


def _orders(layer: SeenRotary, whole: PairFactors, job: Job) -> list[Order]:
    job.on_step(f"comparing pairs of {layer.found.name}")
    units = units_of(layer)
    return [
        greedy(rows_of(layer.samples, head, whole, units, job.seed), units)
        for head in range(layer.found.key_heads)
    ]


def pair_widths(job: Job, layers: list[SeenRotary], orders: list[list[Order]]) -> list[list[int]]:
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


def _calibrated(
    layer: SeenRotary, start: PairFactors, before: list[float], job: Job
) -> tuple[PairFactors, list[float], bool]:
    done = 0

    def count(steps: int) -> None:
        nonlocal done
        done = steps
        job.on_step(f"calibrating {layer.found.name}: {steps} of {job.calibrate}")

    factors = calibrate_pairs(layer, start, job.calibrate, job.seed, count)
    after = _by_key(layer, factors)
    better = sum(after) < sum(before)
    return (factors, after, done == job.calibrate) if better else (start, before, done == job.calibrate)


def _by_key(layer: SeenRotary, factors: PairFactors) -> list[float]:
    each = rotary_divergence(layer.samples, factors)
    by_key: list[float] = each.unflatten(0, (-1, layer.found.groups)).mean(1).tolist()
    return by_key


def pair_swap(model: nn.Module, plan: list[tuple[RotaryLayer, PairFactors]], cache: bool = True) -> Swap:
    """Projections and caches with the pairs that are left, not yet put in.

    Args:
        model: the model.
        plan: layers and their factors.
        cache: whether caches are to keep narrow keys.
    """
    changes: dict[str, list[HeadFactors]] = {}
    for found, factors in plan:
        for side, own, groups in (
            (found.query, factors.query, found.groups),
            (found.key, factors.key, 1),
        ):
            places = [kept for kept in factors.kept for _ in range(groups)]
            columns = [factor[:, kept] for factor, kept in zip(own, places, strict=True)]
            changes.setdefault(side.module, []).append(HeadFactors(side.channels, columns, places))
    modules: dict[str, nn.Module] = {
        n: narrowed(model.get_submodule(n), change) for n, change in changes.items()
    }
    runs = {
        found.name: runs_of([h * found.width + c for h, kept in enumerate(factors.kept) for c in kept])
        for found, factors in plan
        if cache
    }
    return Swap(model, modules, runs)


def _record(layer: SeenRotary, head: int, width: int, kl: float, calibrated: float) -> HeadWidth:
    found = layer.found
    return HeadWidth(
        part="rotary",
        stack=found.stack,
        site=found.name,
        layer=found.layer,
        head=head,
        before=found.width,
        width=width,
        kl=kl,
        kl_calibrated=calibrated,
    )
