"""Collect queries and keys with their second moments, and compute the attention KL of changed logits.

Attention KL is KL(M ‖ M') in nats, averaged over rows: M are the original's attention matrices, M' those with
changed queries and keys.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from rankwise._internals.forward import device_of, run_model, to_device
from rankwise._internals.linalg import as_float64
from rankwise._internals.rotary import PairRotation, fit_rotation
from rankwise.compression.layers import Factors, Projections, Step, check_tokens
from rankwise.errors import CompressionError
from rankwise.measures.required_width import LogitBases
from rankwise.operators import MixingOperator, SoftmaxMixing
from rankwise.tracing import MixerSite, RecordedCall, capture, record_calls
from rankwise.tracing.projections import Projection, side_of


@dataclass(frozen=True)
class Sample:
    """Queries, keys and attention of some sequences."""

    operator: MixingOperator
    """Attention matrices (B, H, T, S)."""
    query: Float[Tensor, "B H T K"]
    """Queries before their rotation by position, if there is one."""
    key: Float[Tensor, "B G S K"]
    tokens: Bool[Tensor, "B T"]
    """True for real tokens; rows of padding are not measured."""
    scale: float = 1.0
    """The logits are scale·query·keyᵀ, without masks and biases."""
    rotation: PairRotation | None = None
    """Rotation of queries and keys by position before their inner product."""

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    def turned(self, heads: Float[Tensor, "B h T r"]) -> Float[Tensor, "B h T r"]:
        """Return queries or keys after the rotation."""
        return heads if self.rotation is None else self.rotation(heads)

    def logit_change(
        self,
        query: Float[Tensor, "B H T K"],
        key: Float[Tensor, "B G S K"],
        a: Float[Tensor, "H K r"],
        b: Float[Tensor, "G K r"],
    ) -> Float[Tensor, "B H T S"]:
        """Return how factors of some heads change their logits: (Q A)(K B)ᵀ − Q Kᵀ, scaled and rotated."""
        groups = query.shape[1] // key.shape[1]

        def logits(q: Tensor, k: Tensor) -> Tensor:
            return self.scale * self.turned(q) @ self.turned(k).repeat_interleave(groups, 1).mT

        return logits(query @ a, key @ b) - logits(query, key)


@dataclass
class QueryKeyStatistics:
    """Second moments and samples of the queries and keys of one layer."""

    projections: Projections
    query_moments: Float64[Tensor, "G K K"]
    """Σ qqᵀ over real tokens and the query heads that share a key head, before any rotation."""
    key_moments: Float64[Tensor, "G K K"]
    tokens: int = 0
    """Number of real tokens."""
    samples: list[Sample] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    """Query heads with NaN or infinity."""

    def add(self, site: MixerSite, sample: Sample) -> None:
        """Add the sample of one call of the attention layer."""
        query, key, groups = sample.query, sample.key, sample.groups
        fine = query.isfinite().all((0, 2, 3)) & key.isfinite().all((0, 2, 3)).repeat_interleave(groups)
        self.broken |= {head for head, good in enumerate(fine.tolist()) if not good}
        rows = as_float64(query.transpose(1, 2)[site.valid_tokens])  # (N, H, K)
        columns = as_float64(key.transpose(1, 2)[site.valid_sources])
        by_head = torch.einsum("nhi,nhj->hij", rows, rows).cpu()
        self.query_moments += by_head.unflatten(0, (-1, groups)).sum(1)
        self.key_moments += torch.einsum("nhi,nhj->hij", columns, columns).cpu()
        self.tokens += int(site.valid_tokens.sum())
        self.samples.append(sample)


def collect_statistics(
    model: nn.Module, layers: list[Projections], batches: Iterable[Any], on_step: Step = lambda what: None
) -> list[QueryKeyStatistics]:
    """Run the model and return second moments and all queries and keys of each layer that is called."""
    statistics: dict[str, QueryKeyStatistics] = {}
    for layer in layers:
        zeros = torch.zeros(layer.key_heads, layer.width, layer.width, dtype=torch.float64)
        statistics[layer.name] = QueryKeyStatistics(layer, zeros, zeros.clone())
    behind = [layer for layer in layers if layer.scale or len(layer.pairs)]
    read = {side.module for layer in behind for side in (layer.query, layer.key)}
    calls: Counter[str] = Counter()

    def add(site: MixerSite) -> None:
        if site.name in statistics:
            own = statistics[site.name]
            own.add(site, _sample(own.projections, site, linear, calls[site.name]))
            calls[site.name] += 1

    device = device_of(model)
    for count, batch in enumerate(batches, start=1):
        on_step(f"running batch {count}")
        calls.clear()
        with record_calls(model, read) as linear, torch.no_grad(), capture(model, on_mixer=add):
            run_model(model, to_device(batch, device))
    return [own for own in statistics.values() if own.samples]


def _sample(found: Projections, site: MixerSite, linear: list[RecordedCall], call: int) -> Sample:
    """Return queries, keys and the scale of the logits of one call."""
    operator = site.operator

    def projected(side: Projection) -> Tensor:
        return side_of([one.output for one in linear if one.name == side.module][call], side)

    if found.scale is not None:
        query, key = projected(found.query), projected(found.key)
        return Sample(operator, query, key, site.valid_tokens, found.scale)
    assert isinstance(operator, SoftmaxMixing)
    # Some code repeats keys for each query head: take each key head once.
    query, key = operator.query, operator.key[:, :: operator.key.shape[1] // found.key_heads]
    if not len(found.pairs):
        return Sample(operator, query, key, site.valid_tokens, operator.scale)
    before = [projected(found.query), projected(found.key)]
    rotation, _ = fit_rotation(found.pairs.to(query.device), before, [query, key])
    return Sample(operator, before[0], before[1], site.valid_tokens, operator.scale, rotation)


def usable_layers(
    layers: list[QueryKeyStatistics], skipped: dict[str, str]
) -> tuple[list[QueryKeyStatistics], dict[str, str]]:
    """Return the layers with finite queries and keys, and why each other layer is left out.

    Raises:
        CompressionError: if no layer is finite, or there are too few tokens.
    """
    finite = [layer for layer in layers if not layer.broken]
    heads = {layer.projections.name: layer.broken for layer in layers if layer.broken}
    broken = {name: f"NaN or infinity in head {min(own)}" for name, own in heads.items()}
    if not finite:
        name, reason = next(iter(broken.items()))
        fix = "Fix the weights, or use float32: `rankwise audit` shows where it begins."
        expected = "finite queries and keys"
        raise CompressionError(f"attention layer {name!r}", expected=expected, got=reason, fix=fix)
    check_tokens(min(layer.tokens for layer in finite), max(layer.projections.width for layer in finite))
    return finite, skipped | broken


def first_samples(samples: list[Sample], sequences: int) -> list[Sample]:
    """Return the first samples that together have at least a number of sequences; all if they have fewer."""
    before = accumulate((sample.query.shape[0] for sample in samples), initial=0)
    return [sample for sample, count in zip(samples, before, strict=False) if count < sequences]


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
    away = (change - mean).masked_fill(~seen, -torch.inf)  # around the mean: no cancellation in the logarithm
    top = away.amax(-1, keepdim=True).clamp(min=0)
    whole = (matrix * (away - top).exp()).sum(-1)
    kl = whole.clamp(min=torch.finfo(matrix.dtype).tiny).log() + top.squeeze(-1)
    return kl.clamp(min=0)  # below 0 only by rounding, by Jensen's inequality


def layer_divergence(samples: list[Sample], factors: Factors) -> Float64[Tensor, "H"]:
    """Return mean KL(M ‖ M') over real rows for each query head, where M' has the logits (Q A)(K B)ᵀ."""

    def changes(sample: Sample, head: int, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        a, b = factors.query[head], factors.key[head // sample.groups]
        yield sample.logit_change(q, k, a.to(q)[None], b.to(q)[None])[:, 0]

    return _mean_divergence(samples, len(factors.query), 1, changes)[:, 0]


def width_curves(samples: list[Sample], bases: list[LogitBases], widths: list[int]) -> Float64[Tensor, "H W"]:
    """Return attention KL of each query head at ascending widths.

    A width takes that many columns of the bases of the key head.
    """

    def changes(sample: Sample, head: int, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        own = bases[head // sample.groups]
        q, k = sample.scale * q[:, 0], k[:, 0]
        turned_q, turned_k = q @ own.query.to(q), k @ own.key.to(k)
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
            for at, change in enumerate(changes(sample, head, query, key)):
                total[head, at] += as_float64(divergence(matrix, change)[sample.tokens]).sum().cpu()
        rows += int(sample.tokens.sum())
    return total / max(rows, 1)
