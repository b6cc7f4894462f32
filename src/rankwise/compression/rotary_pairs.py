"""Which rotary pairs a key head keeps: the pair that costs least attention KL goes, again and again."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise.compression.divergence import Sample, divergence
from rankwise.compression.layers import AttentionLayer
from rankwise.compression.qk_modules import Factors
from rankwise.measures.logits import logit_bases

SEQUENCES, ROWS = 16, 48
"""Sequences, and rows of each, on which pairs are compared, at most."""


@dataclass(frozen=True)
class Rows:
    """Rows of attention of a query head, and what each unit adds to their logits."""

    matrix: Float[Tensor, "N R S"]
    parts: Float[Tensor, "U N R S"]


@dataclass(frozen=True)
class Order:
    """How the units of a key head go."""

    units: list[int]
    """The first to go first; the last one stays."""
    widths: list[int]
    """Channels that are left, ascending, from the last unit alone to all."""
    losses: list[float]
    """Attention KL at these widths."""


def units_of(layer: AttentionLayer) -> list[list[int]]:
    """Channels that go together: both of a pair; each one that is not rotated for itself.

    Args:
        layer: a layer.
    """
    pairs = layer.found.pairs.tolist()
    rotated = {channel for pair in pairs for channel in pair}
    return [*pairs, *([channel] for channel in range(layer.found.width) if channel not in rotated)]


def whole_factors(layer: AttentionLayer) -> Factors:
    """Factors that change no logit: pairs stay what they are, unrotated channels get their best basis.

    Args:
        layer: a layer and what it saw.
    """
    found = layer.found
    rotated = {channel for pair in found.pairs.tolist() for channel in pair}
    free = torch.tensor([c for c in range(found.width) if c not in rotated], dtype=torch.long)
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
    """Rows drawn from some sequences.

    Args:
        samples: of the layer.
        head: of the keys.
        factors: that change no logit.
        units: channels that go together.
        seed: of the draws.
    """
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
    """(N, R): rows of real tokens of each sequence, some twice where there are few."""
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
    """Units in the order they go: at each step the one that costs least for each channel it frees.

    Args:
        rows: of one key head.
        units: channels that go together.
    """
    gone: list[int] = []
    left = list(range(len(units)))
    sizes = torch.tensor([len(unit) for unit in units], dtype=torch.float64)
    changes = [torch.zeros_like(row.matrix) for row in rows]
    now, losses = 0.0, [0.0]
    while len(left) > 1:
        costs = _costs(rows, changes, left)
        best = int(((costs - now) / sizes[left]).argmin())
        unit, now = left.pop(best), float(costs[best])
        changes = [change - row.parts[unit] for change, row in zip(changes, rows, strict=True)]
        gone.append(unit)
        losses.append(now)
    return _order([*gone, *left], losses, units)


def along(rows: list[Rows], units: list[list[int]], order: list[int]) -> Order:
    """Attention KL along a given order.

    Args:
        rows: of one key head.
        units: channels that go together.
        order: the first to go first.
    """
    changes = [torch.zeros_like(row.matrix) for row in rows]
    losses = [0.0]
    for unit in order[:-1]:
        losses.append(float(_costs(rows, changes, [unit])[0]))
        changes = [change - row.parts[unit] for change, row in zip(changes, rows, strict=True)]
    return _order(order, losses, units)


def _order(order: list[int], losses: list[float], units: list[list[int]]) -> Order:
    width = sum(len(unit) for unit in units)
    widths = [width]
    for unit in order[:-1]:
        widths.append(widths[-1] - len(units[unit]))
    return Order(order, widths[::-1], losses[::-1])


def _costs(rows: list[Rows], changes: list[Tensor], units: list[int]) -> Float64[Tensor, "U"]:
    """Mean attention KL with each of some units gone besides."""
    total = torch.zeros(len(units), dtype=torch.float64)
    count = 0
    for row, change in zip(rows, changes, strict=True):
        for at, unit in enumerate(units):
            total[at] += divergence(row.matrix, change - row.parts[unit]).double().sum().cpu()
        count += row.matrix.shape[0] * row.matrix.shape[1]
    return total / max(count, 1)


def kept_factors(layer: AttentionLayer, whole: Factors, orders: list[Order], widths: list[int]) -> Factors:
    """The factors with the units that go at zero.

    Args:
        layer: a layer.
        whole: factors that change no logit.
        orders: of each key head.
        widths: of each key head, out of its order's.
    """
    units = units_of(layer)
    query, key, kept = whole.query.clone(), whole.key.clone(), []
    for head, (order, width) in enumerate(zip(orders, widths, strict=True)):
        stay = len(order.units) - (len(order.widths) - 1 - order.widths.index(width))
        channels = sorted(c for unit in order.units[len(order.units) - stay :] for c in units[unit])
        gone = [c for c in range(layer.found.width) if c not in channels]
        members = slice(head * layer.found.groups, (head + 1) * layer.found.groups)
        query[members, :, gone] = 0
        key[head][:, gone] = 0
        kept.append(channels)
    return Factors(query, key, kept)
