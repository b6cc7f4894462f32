"""Find attention layers whose queries and keys can be narrowed, and collect their queries and keys."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from rankwise._internals.batches import to_device
from rankwise._internals.forward import Change, Progress, device_of, run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.rotary import PairRotation, fit_rotation
from rankwise.compression.trials import check_tokens, keep_passing, same_outputs
from rankwise.compression.width_modules import Factors, narrow_layers
from rankwise.errors import CompressionError
from rankwise.operators import MixingOperator, SoftmaxMixing
from rankwise.tracing import CapturedMixer, RecordedCall, capture, record_calls
from rankwise.tracing.projections import Projection, QueryKeyProjections, observe, side_of


def find(model: nn.Module, batch: Any) -> tuple[list[QueryKeyProjections], dict[str, str]]:
    """Return the layers that allow any basis of queries and keys, and why each other layer is left out."""
    reason = "its outputs change with the basis of queries and keys: not only inner products read them"
    return keep_passing(
        model,
        find_layers(model, batch),
        same_outputs(model, batch, turned, reason),
        "softmax attention whose queries and keys are outputs of linear layers, rotated by position or not",
    )


def find_layers(model: nn.Module, batch: Any) -> tuple[list[QueryKeyProjections], dict[str, str]]:
    """Return the layers with known projections in all their calls, and why each other layer is left out."""
    seen = observe(model, batch)
    layers: list[QueryKeyProjections] = []
    skipped: dict[str, str] = {}
    for name, mixers in seen.mixers.items():
        calls = [seen.projections(name, call).query_key for call in range(len(mixers))]
        read = [layer for layer in calls if isinstance(layer, QueryKeyProjections)]
        if len(read) < len(calls):
            skipped[name] = next(reason for reason in calls if isinstance(reason, str))
        elif len(read) > 1 and len(read[0].pairs):
            skipped[name] = "it runs more than once"
        elif not all(_same(layer, read[0]) for layer in read):
            skipped[name] = "its calls read different projections"
        else:
            layers.append(read[0])
    return layers, skipped


def _same(first: QueryKeyProjections, other: QueryKeyProjections) -> bool:
    sides = ((first.query, other.query), (first.key, other.key))
    return all(a.module == b.module and bool((a.channels == b.channels).all()) for a, b in sides)


def turned(model: nn.Module, layers: list[QueryKeyProjections]) -> Change:
    """Return the trial change: queries and keys of every head in a random basis of full width.

    The two channels of a rotary pair are only rotated. Outputs change only if the layer's code reads queries
    or keys other than by their inner products.
    """
    return narrow_layers(model, [(layer, random_bases(layer)) for layer in layers], cache=False)


def random_bases(layer: QueryKeyProjections) -> Factors:
    """Return random orthonormal factors of full width. The two channels of a rotary pair are only rotated."""
    generator = torch.Generator().manual_seed(0)
    free = torch.tensor(layer.unrotated, dtype=torch.long)
    bases = torch.eye(layer.width, dtype=torch.float64).repeat(layer.key_heads, 1, 1)
    for basis in bases:
        drawn = torch.randn(len(free), len(free), generator=generator, dtype=torch.float64)
        basis[free[:, None], free] = torch.linalg.qr(drawn).Q
        for first, second in layer.pairs.tolist():
            angle = 6.28 * torch.rand((), generator=generator, dtype=torch.float64)
            basis[first, first] = basis[second, second] = angle.cos()
            basis[first, second], basis[second, first] = angle.sin(), -angle.sin()
    kept = [list(range(layer.width))] * layer.key_heads
    return Factors(bases.repeat_interleave(layer.groups, 0), bases, kept)


# --- queries and keys ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Queries, keys and attention of some sequences."""

    operator: MixingOperator
    """Attention matrices (B, H, T, S)."""
    query: Float[Tensor, "B H T K"]
    """Queries. If they are rotated by position, queries before the rotation."""
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
        """Return queries or keys after the rotation, or unchanged if there is no rotation."""
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

    projections: QueryKeyProjections
    query_moments: Float64[Tensor, "G K K"]
    """Σ qqᵀ over real tokens and the query heads that share a key head, before any rotation."""
    key_moments: Float64[Tensor, "G K K"]
    tokens: int = 0
    """Number of real tokens."""
    samples: list[Sample] = field(default_factory=list)

    def add(self, site: CapturedMixer, sample: Sample) -> None:
        """Add the sample of one call of the attention layer."""
        rows = as_float64(sample.query.transpose(1, 2)[site.valid_tokens])  # (N, H, K)
        columns = as_float64(sample.key.transpose(1, 2)[site.valid_sources])
        by_head = torch.einsum("nhi,nhj->hij", rows, rows).cpu()
        self.query_moments += by_head.unflatten(0, (-1, sample.groups)).sum(1)
        self.key_moments += torch.einsum("nhi,nhj->hij", columns, columns).cpu()
        self.tokens += int(site.valid_tokens.sum())
        self.samples.append(sample)


def collect_statistics(
    model: nn.Module,
    layers: list[QueryKeyProjections],
    batches: Sequence[Any],
    on_progress: Progress = lambda step, done: None,
) -> list[QueryKeyStatistics]:
    """Run the model, and return second moments and all queries and keys of each layer that runs."""
    statistics: dict[str, QueryKeyStatistics] = {}
    for layer in layers:
        zeros = torch.zeros(layer.key_heads, layer.width, layer.width, dtype=torch.float64)
        statistics[layer.name] = QueryKeyStatistics(layer, zeros, zeros.clone())
    behind = [layer for layer in layers if layer.scale or len(layer.pairs)]
    read = {side.module for layer in behind for side in (layer.query, layer.key)}
    calls: Counter[str] = Counter()

    def add(site: CapturedMixer) -> None:
        if site.name in statistics:
            layer = statistics[site.name]
            layer.add(site, _sample(layer.projections, site, linear, calls[site.name]))
            calls[site.name] += 1

    device = device_of(model)
    for count, batch in enumerate(batches):
        on_progress(f"running batch {count + 1} of {len(batches)}", count / len(batches))
        calls.clear()
        with record_calls(model, read) as linear, torch.no_grad(), capture(model, on_mixer=add):
            run_model(model, to_device(batch, device))
    return [layer for layer in statistics.values() if layer.samples]


def _sample(layer: QueryKeyProjections, site: CapturedMixer, linear: list[RecordedCall], call: int) -> Sample:
    """Return queries, keys and the scale of the logits of one call."""
    operator = site.operator

    def projected(side: Projection) -> Tensor:
        return side_of([seen.output for seen in linear if seen.name == side.module][call], side)

    if layer.scale is not None:
        return Sample(operator, projected(layer.query), projected(layer.key), site.valid_tokens, layer.scale)
    assert isinstance(operator, SoftmaxMixing)
    # Some code repeats keys for each query head: take each key head once.
    query, key = operator.query, operator.key[:, :: operator.key.shape[1] // layer.key_heads]
    if not len(layer.pairs):
        return Sample(operator, query, key, site.valid_tokens, operator.scale)
    before = [projected(layer.query), projected(layer.key)]
    rotation, _ = fit_rotation(layer.pairs.to(query.device), before, [query, key])
    return Sample(operator, before[0], before[1], site.valid_tokens, operator.scale, rotation)


def check_statistics(layers: list[QueryKeyStatistics]) -> None:
    """Raise `CompressionError` if queries or keys are not finite, or if there are too few tokens."""
    for layer in layers:
        finite = (layer.query_moments + layer.key_moments).isfinite().all(-1).all(-1)
        if not finite.all():
            raise CompressionError(
                f"attention layer {layer.projections.name!r}",
                expected="finite queries and keys",
                got=f"NaN or infinity in key head {int(finite.int().argmin())}",
                fix="Fix the weights, or use float32: `rankwise audit` shows where it begins.",
            )
    check_tokens(min(layer.tokens for layer in layers), max(layer.projections.width for layer in layers))


def first_samples(samples: list[Sample], count: int) -> list[Sample]:
    """Return the first samples that together have `count` sequences, or all samples if these have fewer."""
    before = accumulate((sample.query.shape[0] for sample in samples), initial=0)
    return [sample for sample, earlier in zip(samples, before, strict=False) if earlier < count]
