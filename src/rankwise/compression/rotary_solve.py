"""The part ``rotary``: remove the rotary pair that costs least attention KL, again and again.

A unit is a rotary pair, or one channel that is not rotated. A removed unit is zero in queries and keys, so it
adds nothing to any logit; it is neither computed nor cached.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from rankwise._internals.linalg import as_float64
from rankwise.compression.layers import Factors
from rankwise.compression.part import Job, Solution
from rankwise.compression.qk_solve import narrow_heads
from rankwise.compression.qk_statistics import (
    QueryKeyStatistics,
    Sample,
    collect_statistics,
    divergence,
    first_samples,
    usable_layers,
)
from rankwise.compression.rotary_find import find_rotary_layers
from rankwise.measures.required_width import logit_bases

SEQUENCES, ROWS = 16, 48
"""Maximum number of sequences, and of rows per sequence, on which the removal of units is compared."""


@dataclass(frozen=True)
class Rows:
    """R attention rows of N sequences for a query head, and the logits that each of U units adds to them."""

    matrix: Float[Tensor, "N R S"]
    parts: Float[Tensor, "U N R S"]


@dataclass(frozen=True)
class Order:
    """Order in which the units (rotary pairs or single channels) of a key head are removed."""

    units: list[int]
    """Indices of units, the first to be removed first; the last one is never removed."""
    widths: list[int]
    """Remaining channels, ascending, from the last unit alone to all."""
    losses: list[float]
    """Attention KL at these widths."""


def solve(job: Job) -> Solution:
    """Remove rotary pairs in greedy order, widths under one budget, then calibrate.

    The query heads of a key head keep the same pairs. Channels without rotation get the closed form of `qk`.
    """
    found, skipped = find_rotary_layers(job.model, job.batches[0])
    statistics = collect_statistics(job.model, found, job.batches, job.on_step)
    layers, skipped = usable_layers(statistics, skipped)
    known: dict[str, tuple[Factors, list[Order]]] = {}
    for layer in layers:
        job.on_step(f"comparing pairs of {layer.projections.name}")
        whole = whole_factors(layer)
        known[layer.projections.name] = whole, greedy_orders(layer, whole, job.seed)

    def start(layer: QueryKeyStatistics, widths: list[int]) -> Factors:
        return kept_factors(layer, *known[layer.projections.name], widths)

    curves = [[(order.widths, order.losses) for order in orders] for _, orders in known.values()]
    method = "greedy by attention KL, widths per head"
    return replace(narrow_heads("rotary", job, layers, curves, start, method), skipped=skipped)


def units_of(layer: QueryKeyStatistics) -> list[list[int]]:
    """Return the channels that are removed together: pairs, and single channels without rotation."""
    return [*layer.projections.pairs.tolist(), *([channel] for channel in layer.projections.unrotated)]


def whole_factors(layer: QueryKeyStatistics) -> Factors:
    """Return factors that change no logit: identity for pairs, the closed form of `qk` for other channels."""
    found = layer.projections
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
    """Draw rows of some sequences for the query heads of one key head."""
    drawn, left = [], SEQUENCES
    generator = torch.Generator().manual_seed(seed)
    for sample in first_samples(samples, SEQUENCES):
        some = slice(0, left)
        left -= sample.query.shape[0]
        rows = _drawn(sample.tokens[some], generator).to(sample.query.device)[..., None]
        dtype = torch.promote_types(sample.query.dtype, torch.float32)
        b = factors.key[head].to(rows.device, dtype)
        key = sample.turned(sample.key[:, head : head + 1].to(dtype) @ b)[some, 0]
        for member in range(head * sample.groups, (head + 1) * sample.groups):
            a = factors.query[member].to(rows.device, dtype)
            query = sample.scale * sample.turned(sample.query[:, member : member + 1].to(dtype) @ a)[some, 0]
            query = query.gather(1, rows.expand(-1, -1, query.shape[-1]))
            matrix = sample.operator[some, member : member + 1].dense()[:, 0].to(dtype)
            matrix = matrix.gather(1, rows.expand(-1, -1, matrix.shape[-1]))
            parts = torch.stack([query[..., unit] @ key[..., unit].mT for unit in units])
            drawn.append(Rows(matrix, parts))
    return drawn


def _drawn(tokens: Tensor, generator: torch.Generator) -> Int[Tensor, "N R"]:
    """Draw rows of real tokens of each sequence, some rows twice if there are few."""
    weights, count = tokens.cpu().double() + 1e-300, min(ROWS, tokens.shape[1])
    twice = bool((tokens.sum(1) < count).any())
    return torch.multinomial(weights, count, replacement=twice, generator=generator)


def greedy_orders(layer: QueryKeyStatistics, whole: Factors, seed: int) -> list[Order]:
    """Return the greedy order of removal for each key head of a layer."""
    units = units_of(layer)
    heads = range(layer.projections.key_heads)
    return [greedy(rows_of(layer.samples, head, whole, units, seed), units) for head in heads]


def greedy(rows: list[Rows], units: list[list[int]]) -> Order:
    """Return the units in order of removal: each step removes the unit of least KL per channel."""
    removed: list[int] = []
    left = list(range(len(units)))
    sizes = torch.tensor([len(unit) for unit in units], dtype=torch.float64)
    changes = [torch.zeros_like(row.matrix) for row in rows]
    now, losses = 0.0, [0.0]
    while len(left) > 1:
        costs = removal_costs(rows, changes, left)
        best = int(((costs - now) / sizes[left]).argmin())
        unit, now = left.pop(best), float(costs[best])
        changes = [change - row.parts[unit] for change, row in zip(changes, rows, strict=True)]
        removed.append(unit)
        losses.append(now)
    return make_order([*removed, *left], losses, units)


def make_order(order: list[int], losses: list[float], units: list[list[int]]) -> Order:
    """Return an order of removal with its widths; `losses` are in that order, from full width on."""
    width = sum(len(unit) for unit in units)
    widths = [width]
    for unit in order[:-1]:
        widths.append(widths[-1] - len(units[unit]))
    return Order(order, widths[::-1], losses[::-1])


def removal_costs(rows: list[Rows], changes: list[Tensor], units: list[int]) -> Float64[Tensor, "U"]:
    """Return the mean attention KL after the removal of one more unit, for each of some units."""
    total = torch.zeros(len(units), dtype=torch.float64)
    count = 0
    for row, change in zip(rows, changes, strict=True):
        for at, unit in enumerate(units):
            total[at] += as_float64(divergence(row.matrix, change - row.parts[unit])).sum().cpu()
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
        removed = [c for c in range(layer.projections.width) if c not in channels]
        members = slice(head * layer.projections.groups, (head + 1) * layer.projections.groups)
        query[members, :, removed] = 0
        key[head][:, removed] = 0
        kept.append(channels)
    return Factors(query, key, kept)
