"""The part ``rotary``: remove the rotary pair that costs least attention KL, again and again.

A removed pair is zero in queries and keys, so it adds nothing to any logit. It is not computed and not
cached.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise.compression.layers import Factors, check_tokens
from rankwise.compression.memory import naming_layer
from rankwise.compression.parts import Job, PartResult
from rankwise.compression.qk_solve import (
    budget_curve,
    narrowed_heads,
    widths_for_tolerance,
    widths_under_budget,
)
from rankwise.compression.qk_statistics import (
    QueryKeyStatistics,
    Sample,
    collect_statistics,
    divergence,
    finite_layers,
)
from rankwise.compression.rotary_find import find_rotary_layers
from rankwise.measures.logits import logit_bases

SEQUENCES, ROWS = 16, 48
"""Sequences, and rows of each, on which pairs are compared, at most."""


@dataclass(frozen=True)
class Rows:
    """Rows of attention of a query head, and the logits that each unit adds to them."""

    matrix: Float[Tensor, "N R S"]
    parts: Float[Tensor, "U N R S"]


@dataclass(frozen=True)
class Order:
    """Order in which the units of a key head are removed."""

    units: list[int]
    """First removed first; the last unit is never removed."""
    widths: list[int]
    """Remaining channels, ascending, from the last unit alone to all."""
    losses: list[float]
    """Attention KL at these widths."""


def narrow_rotary(job: Job) -> PartResult:
    """Keep the rotary pairs that attention needs: greedy by attention KL, widths under one budget.

    Pairs are chosen for each key head; the query heads that read it keep the same. A pair that goes is zero
    in queries and keys, so that it adds nothing to any logit, and is neither computed nor cached. Channels
    that are not rotated get the closed form of the part ``qk``. With ``calibrate``, what kept pairs carry
    before the rotation becomes any linear map of the head's channels, by steps of Adam.
    """
    found, left_out = find_rotary_layers(job.model, job.batches[0])
    seen = collect_statistics(job.model, found, job.batches, job.on_step)
    layers, left_out = finite_layers(seen, left_out)
    check_tokens(min(layer.tokens for layer in layers), max(layer.found.width for layer in layers))
    wholes = [whole_factors(layer) for layer in layers]
    orders: list[list[Order]] = []
    for layer, whole in zip(layers, wholes, strict=True):
        with naming_layer(layer.found.name):
            orders.append(_orders(layer, whole, job))
    widths = pair_widths(layers, orders, job.keep, job.tolerance)
    starts = [kept_factors(*own) for own in zip(layers, wholes, orders, widths, strict=True)]
    curves = [(order.widths, order.losses) for own in orders for order in own]
    curve = budget_curve("greedy by attention KL, widths per head", curves)
    return replace(narrowed_heads("rotary", job, layers, starts), curves=[curve], left_out=left_out)


def _orders(layer: QueryKeyStatistics, whole: Factors, job: Job) -> list[Order]:
    job.on_step(f"comparing pairs of {layer.found.name}")
    units = units_of(layer)
    return [
        greedy(rows_of(layer.samples, head, whole, units, job.seed), units)
        for head in range(layer.found.key_heads)
    ]


def pair_widths(
    layers: list[QueryKeyStatistics],
    orders: list[list[Order]],
    keep: float | int | None,
    tolerance: float | int | None = None,
) -> list[list[int]]:
    """Return possible widths of each key head: rounded down under a budget, up for a tolerance."""
    every = [order for own in orders for order in own]
    curves = [(order.widths, order.losses) for order in every]
    if tolerance is not None:
        wanted = widths_for_tolerance(curves, tolerance)
        chosen = [
            min(w for w in order.widths if w >= width) for order, width in zip(every, wanted, strict=True)
        ]
    else:
        whole = [layer.found.width for layer in layers for _ in range(layer.found.key_heads)]
        assert keep is not None
        wanted = widths_under_budget(curves, round(keep * sum(whole)))
        chosen = [
            max(w for w in order.widths if w <= width) for order, width in zip(every, wanted, strict=True)
        ]
    found = iter(chosen)
    return [[next(found) for _ in own] for own in orders]


def units_of(layer: QueryKeyStatistics) -> list[list[int]]:
    """Return the channels that are removed together: pairs, and single channels without rotation."""
    return [*layer.found.pairs.tolist(), *([channel] for channel in layer.found.unrotated)]


def whole_factors(layer: QueryKeyStatistics) -> Factors:
    """Return factors that change no logit: identity for pairs, the best basis for other channels."""
    found = layer.found
    free = torch.tensor(found.unrotated, dtype=torch.long)
    key = torch.eye(found.width, dtype=torch.float64).repeat(found.key_heads, 1, 1)
    query = key.clone()
    for head in range(found.key_heads if len(free) else 0):
        block = (head, free[:, None], free[None])
        bases = logit_bases(layer.query_moments[block], layer.key_moments[block])
        query[block], key[block] = bases.query, bases.key
    every = list(range(found.width))
    return Factors(query.repeat_interleave(found.groups, 0), key, [every] * found.key_heads)


def rows_of(
    samples: list[Sample], head: int, factors: Factors, units: list[list[int]], seed: int
) -> list[Rows]:
    """Draw rows from some sequences."""
    out, left = [], SEQUENCES
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        some = slice(0, max(left, 0))
        left -= sample.query.shape[0]
        if not sample.query[some].shape[0]:
            break
        rows = _drawn(sample.tokens[some], generator).to(sample.query.device)
        members = range(head * sample.groups, (head + 1) * sample.groups)
        for member in members:
            out.append(_rows(sample, some, member, head, rows, factors, units))
    return out


def _drawn(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Draw rows of real tokens of each sequence (N, R), some twice if there are few."""
    weights = tokens.double().cpu() + 1e-300
    count = min(ROWS, tokens.shape[1])
    return torch.multinomial(
        weights, count, replacement=bool((tokens.sum(1) < count).any()), generator=generator
    )


def _rows(
    sample: Sample,
    some: slice,
    member: int,
    head: int,
    rows: Tensor,
    factors: Factors,
    units: list[list[int]],
) -> Rows:
    dtype = torch.promote_types(sample.query.dtype, torch.float32)
    a, b = factors.query[member].to(rows.device, dtype), factors.key[head].to(rows.device, dtype)
    query = sample.scale * sample.turned(sample.query[:, member : member + 1].to(dtype) @ a)[some, 0]
    key = sample.turned(sample.key[:, head : head + 1].to(dtype) @ b)[some, 0]
    matrix = sample.operator[some, member : member + 1].dense()[:, 0].to(dtype)
    at = rows[..., None]
    query = query.gather(1, at.expand(-1, -1, query.shape[-1]))
    matrix = matrix.gather(1, at.expand(-1, -1, matrix.shape[-1]))
    return Rows(matrix, torch.stack([query[..., unit] @ key[..., unit].mT for unit in units]))


def greedy(rows: list[Rows], units: list[list[int]]) -> Order:
    """Return the units in order of removal: each step removes the unit of least KL per channel."""
    gone: list[int] = []
    left = list(range(len(units)))
    sizes = torch.tensor([len(unit) for unit in units], dtype=torch.float64)
    changes = [torch.zeros_like(row.matrix) for row in rows]
    now, losses = 0.0, [0.0]
    while len(left) > 1:
        costs = removal_costs(rows, changes, left)
        best = int(((costs - now) / sizes[left]).argmin())
        unit, now = left.pop(best), float(costs[best])
        changes = [change - row.parts[unit] for change, row in zip(changes, rows, strict=True)]
        gone.append(unit)
        losses.append(now)
    return make_order([*gone, *left], losses, units)


def make_order(order: list[int], losses: list[float], units: list[list[int]]) -> Order:
    """Return an order of removal with its widths; `losses` begin at full width."""
    width = sum(len(unit) for unit in units)
    widths = [width]
    for unit in order[:-1]:
        widths.append(widths[-1] - len(units[unit]))
    return Order(order, widths[::-1], losses[::-1])


def removal_costs(rows: list[Rows], changes: list[Tensor], units: list[int]) -> Float64[Tensor, "U"]:
    """Return mean attention KL if each of some units is also removed."""
    total = torch.zeros(len(units), dtype=torch.float64)
    count = 0
    for row, change in zip(rows, changes, strict=True):
        for at, unit in enumerate(units):
            total[at] += divergence(row.matrix, change - row.parts[unit]).double().sum().cpu()
        count += row.matrix.shape[0] * row.matrix.shape[1]
    return total / max(count, 1)


def kept_factors(
    layer: QueryKeyStatistics, whole: Factors, orders: list[Order], widths: list[int]
) -> Factors:
    """Return the factors with the removed units set to zero."""
    units = units_of(layer)
    query, key, kept = whole.query.clone(), whole.key.clone(), []
    for head, (order, width) in enumerate(zip(orders, widths, strict=True)):
        stay = order.widths.index(width) + 1
        channels = sorted(c for unit in order.units[-stay:] for c in units[unit])
        gone = [c for c in range(layer.found.width) if c not in channels]
        members = slice(head * layer.found.groups, (head + 1) * layer.found.groups)
        query[members, :, gone] = 0
        key[head][:, gone] = 0
        kept.append(channels)
    return Factors(query, key, kept)
