"""Factors that narrow queries and keys: closed form, greedy choice of rotary pairs, calibration.

Factors A and B of a head turn its logits Q Kᵀ into (Q A)(K B)ᵀ. Attention KL is KL(M ‖ M') in nats, averaged
over rows: M are the original's attention matrices, M' the attention matrices with changed queries and keys.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from rankwise._internals.linalg import as_float64
from rankwise.compression.trials import Job
from rankwise.compression.width_find import QueryKeyStatistics, Sample, first_samples
from rankwise.compression.width_modules import Factors
from rankwise.measures.required_width import LogitBases, logit_bases

CURVE_SEQUENCES = 16
"""Maximum number of sequences on which a head's curve, attention KL against width, is measured."""
RATE = 0.02
"""Learning rate of Adam for factors in whitened coordinates; it falls to zero along a cosine."""
ROWS = 2**20
"""Approximate number of attention entries per calibration step: 2 sequences of 192 tokens with 12 heads."""
Curve = tuple[list[int], list[float]]
"""Ascending widths of a key head, and the attention KL at each width."""
PAIR_SEQUENCES, PAIR_ROWS = 16, 48
"""Maximum number of sequences and of rows per sequence for comparing removals of units."""


# --- attention KL ----------------------------------------------------------------------------------------


def divergence(
    matrix: Float[Tensor, "*batch T S"], change: Float[Tensor, "*batch T S"]
) -> Float[Tensor, "*batch T"]:
    """Return KL(M ‖ M') of each row, where M' has the logits of M plus a change.

    Formula: log Σ_j m_j·exp(c_j) − Σ_j m_j c_j. Masked entries (m_j = 0) need no logit.
    Range: [0, ∞) nats.
    """
    seen = matrix > 0
    mean = (matrix * change).sum(-1, keepdim=True)
    away = (change - mean).masked_fill(~seen, -torch.inf)  # minus the mean, to avoid cancellation
    top = away.amax(-1, keepdim=True).clamp(min=0)
    whole = (matrix * (away - top).exp()).sum(-1)
    kl = whole.clamp(min=torch.finfo(matrix.dtype).tiny).log() + top.squeeze(-1)
    return kl.clamp(min=0)  # KL ≥ 0 by Jensen's inequality: below 0 is rounding


def layer_divergence(samples: list[Sample], factors: Factors) -> Float64[Tensor, "H"]:
    """Return mean KL(M ‖ M') over real rows for each query head, where M' has the logits (Q A)(K B)ᵀ."""

    def changes(sample: Sample, head: int, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        a, b = factors.query[head], factors.key[head // sample.groups]
        yield sample.logit_change(q, k, a.to(q)[None], b.to(q)[None])[:, 0]

    return _mean_divergence(samples, len(factors.query), 1, changes)[:, 0]


def width_curves(samples: list[Sample], bases: list[LogitBases], widths: list[int]) -> Float64[Tensor, "H W"]:
    """Return attention KL of each query head at ascending widths.

    At width w, a head uses the first w columns of the bases of its key head.
    """

    def changes(sample: Sample, head: int, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        basis = bases[head // sample.groups]
        q, k = sample.scale * q[:, 0], k[:, 0]
        turned_q, turned_k = q @ basis.query.to(q), k @ basis.key.to(k)
        change = -(q @ k.mT)
        for start, width in pairwise([0, *widths]):
            change = change + turned_q[..., start:width] @ turned_k[..., start:width].mT
            yield change

    return _mean_divergence(samples, len(bases) * samples[0].groups, len(widths), changes)


def _mean_divergence(
    samples: list[Sample],
    heads: int,
    points: int,
    changes: Callable[[Sample, int, Tensor, Tensor], Iterable[Tensor]],
) -> Float64[Tensor, "H N"]:
    """Return mean KL over real rows for each query head and each of several changes of its logits.

    `changes` receives queries (B, 1, T, K) and keys (B, 1, S, K) of the head, in float32 or float64.
    """
    total, rows = torch.zeros(heads, points, dtype=torch.float64), 0
    for sample in samples:
        dtype = torch.promote_types(sample.query.dtype, torch.float32)
        for head in range(heads):
            matrix = sample.operator[:, head : head + 1].dense()[:, 0].to(dtype)
            query, key = sample.query[:, [head]].to(dtype), sample.key[:, [head // sample.groups]].to(dtype)
            for point, change in enumerate(changes(sample, head, query, key)):
                total[head, point] += as_float64(divergence(matrix, change)[sample.tokens]).sum().cpu()
        rows += int(sample.tokens.sum())
    return total / max(rows, 1)


# --- closed form ----------------------------------------------------------------------------------------


def head_curves(layer: QueryKeyStatistics) -> list[Curve]:
    """Return the curve of each key head of a layer without pairs: attention KL at all widths."""
    widths = [*range(1, layer.projections.width + 1)]
    samples = first_samples(layer.samples, CURVE_SEQUENCES)
    bases = [logit_bases(P, S) for P, S in zip(layer.query_moments, layer.key_moments, strict=True)]
    by_key = width_curves(samples, bases, widths).unflatten(0, (-1, layer.projections.groups)).mean(1)
    return [(widths, losses) for losses in by_key.tolist()]


# --- rotary pairs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """R attention rows of N sequences for a query head, and the logits that each of U units adds to them."""

    matrix: Float[Tensor, "N R S"]
    parts: Float[Tensor, "U N R S"]


@dataclass(frozen=True)
class Order:
    """Order in which the units (rotary pairs or single channels) of a key head are removed."""

    units: list[int]
    """Indices of units in the order of removal. The last unit is never removed."""
    widths: list[int]
    """Ascending numbers of remaining channels, from the last unit alone to all units."""
    losses: list[float]
    """Attention KL at these widths."""


def units_of(layer: QueryKeyStatistics) -> list[list[int]]:
    """Return the channels of each unit: rotary pairs, then single channels that are not rotated."""
    return [*layer.projections.pairs.tolist(), *([channel] for channel in layer.projections.unrotated)]


def whole_factors(layer: QueryKeyStatistics) -> Factors:
    """Return factors that change no logit: identity for pairs, the closed form for other channels.

    Columns of the closed form are scaled so that queries and keys have equal size, for low precision.
    """
    side = layer.projections
    free = torch.tensor(side.unrotated, dtype=torch.long)
    key = torch.eye(side.width, dtype=torch.float64).repeat(side.key_heads, 1, 1)
    query = key.clone()
    for head in range(side.key_heads if len(free) else 0):
        block = (head, free[:, None], free[None])
        P, S = layer.query_moments[block], layer.key_moments[block]
        bases = logit_bases(P, S)
        size_q = (bases.query * (P / side.groups @ bases.query)).sum(0).clamp(min=1e-300)
        size_k = (bases.key * (S @ bases.key)).sum(0).clamp(min=1e-300)
        balance = (size_k / size_q) ** 0.25
        query[block], key[block] = bases.query * balance, bases.key / balance
    every = list(range(side.width))
    return Factors(query.repeat_interleave(side.groups, 0), key, [every] * side.key_heads)


def rows_of(
    samples: list[Sample], head: int, factors: Factors, units: list[list[int]], seed: int
) -> list[Rows]:
    """Draw rows of some sequences for the query heads of one key head."""
    drawn, left = [], PAIR_SEQUENCES
    generator = torch.Generator().manual_seed(seed)
    for sample in first_samples(samples, PAIR_SEQUENCES):
        some = slice(0, left)
        left -= sample.query.shape[0]
        rows = _drawn_rows(sample.tokens[some], generator).to(sample.query.device)[..., None]
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


def _drawn_rows(tokens: Tensor, generator: torch.Generator) -> Int[Tensor, "N R"]:
    """Draw rows of real tokens of each sequence. Rows repeat if a sequence has too few real tokens."""
    weights, count = tokens.cpu().double() + 1e-300, min(PAIR_ROWS, tokens.shape[1])
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
    """Return a removal order and the width after each removal; `losses` begin with the loss at full width."""
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
        for index, unit in enumerate(units):
            total[index] += as_float64(divergence(row.matrix, change - row.parts[unit])).sum().cpu()
        count += row.matrix.shape[0] * row.matrix.shape[1]
    return total / max(count, 1)


def kept_factors(
    layer: QueryKeyStatistics, whole: Factors, orders: list[Order], widths: list[int]
) -> Factors:
    """Return the factors at the given widths: the channels of removed units are set to zero."""
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


# --- calibration ----------------------------------------------------------------------------------------


def calibrate(layer: QueryKeyStatistics, start: Factors, job: Job) -> Factors:
    """Return factors improved by Adam steps on mean attention KL.

    Factors A and B are balanced and stepped in whitened coordinates, so that one rate fits all heads. Each
    step reads a few random sequences. With rotary positions, a kept pair may become any linear map of the
    head's channels before rotation: pairs of similar frequency take over the content of removed pairs.
    """
    groups, device = layer.projections.groups, layer.samples[0].query.device
    steps, name = job.calibrate, layer.projections.name
    rotated = len(layer.projections.pairs) > 0
    white_q, white_k = (whitening(moments) for moments in (layer.query_moments, layer.key_moments))
    white_q = white_q.repeat_interleave(groups, 0)
    a, b = torch.linalg.solve(white_q, start.query), torch.linalg.solve(white_k, start.key)
    # Balance: columns of A and B get equal sizes. Rotation mixes columns, which then share one factor.
    size_a, size_b = a.square().sum(1).unflatten(0, (-1, groups)).mean(1), b.square().sum(1)
    if rotated:
        size_a, size_b = size_a.sum(-1, keepdim=True), size_b.sum(-1, keepdim=True)
    balance = (size_b.clamp(min=1e-24) / size_a.clamp(min=1e-24))[:, None] ** 0.25
    a, b = a * balance.repeat_interleave(groups, 0), b / balance
    mask = torch.zeros(len(start.key), 1, layer.projections.width, dtype=torch.float32)
    for head, channels in enumerate(start.kept):
        mask[head, 0, channels] = 1
    wide = layer.projections.width if rotated else max(map(len, start.kept))  # omit columns of zeros
    kept_k = mask[..., :wide].to(device)
    kept_q = kept_k.repeat_interleave(groups, 0)
    # contiguous, because products of matrices in another memory layout round differently
    a, b = (factors.contiguous()[..., :wide].float().to(device).requires_grad_() for factors in (a, b))
    to_q, to_k = (factors.float().to(device) for factors in (white_q, white_k))
    optimizer = torch.optim.Adam([a, b], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(job.seed)
    with torch.enable_grad():
        for done in range(1, steps + 1):
            sample = _drawn(layer.samples, generator)
            factors = (to_q @ a) * kept_q, (to_k @ b) * kept_k
            change = sample.logit_change(sample.query.float(), sample.key.float(), *factors)
            real = sample.tokens[:, None].expand(change.shape[:-1])
            loss = divergence(sample.operator.dense().float().detach(), change)[real].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            job.on_progress(f"calibrating {name}: {done} of {steps}", done / steps)
    query, key = torch.zeros_like(start.query), torch.zeros_like(start.key)
    query[..., :wide] = ((to_q @ a) * kept_q).detach().cpu().double()
    key[..., :wide] = ((to_k @ b) * kept_k).detach().cpu().double()
    return Factors(query, key, start.kept)


def _drawn(samples: list[Sample], generator: torch.Generator) -> Sample:
    sample = samples[int(torch.randint(len(samples), (), generator=generator))]
    batch, heads, tokens, sources = sample.operator.shape
    count = max(1, min(batch, round(ROWS / (heads * tokens * sources))))
    rows = torch.randperm(batch, generator=generator)[:count].to(sample.query.device)
    rotation = None if sample.rotation is None else sample.rotation[rows]
    drawn = sample.operator[rows], sample.query[rows], sample.key[rows], sample.tokens[rows]
    return Sample(*drawn, sample.scale, rotation)


def whitening(moments: Float64[Tensor, "G K K"]) -> Float64[Tensor, "G K K"]:
    """Return S^−½, with S the moments divided by their mean eigenvalue. Eigenvalues near 0 are raised."""
    values, vectors = torch.linalg.eigh(moments)
    values = values / values.clamp(min=0).mean(-1, keepdim=True).clamp(min=1e-300)
    return (vectors / values.clamp(min=1e-4).sqrt()[:, None]) @ vectors.mT
