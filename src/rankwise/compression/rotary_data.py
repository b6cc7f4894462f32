"""What layers with rotated positions saw: queries and keys before the rotation, and the rotation."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from rankwise.capture import MixerSite, capture
from rankwise.compression.divergence import divergence
from rankwise.compression.layers import Step, linear_outputs
from rankwise.compression.rotary_layers import PairRotation, RotaryLayer, fitted, side_of
from rankwise.operators import MixingOperator, SoftmaxMixing
from rankwise.running import device_of, moved, run_model


@dataclass(frozen=True)
class RotarySample:
    """Some sequences of a layer."""

    operator: MixingOperator
    """Shape (B, H, T, S)."""
    query: Float[Tensor, "B H T K"]
    """Before the rotation, times the scale of the logits."""
    key: Float[Tensor, "B G S K"]
    rotation: PairRotation
    tokens: Bool[Tensor, "B T"]
    """Rows that count: those of real tokens."""

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]


@dataclass
class SeenRotary:
    """A layer and what it saw."""

    found: RotaryLayer
    query_moments: Float64[Tensor, "G K K"]
    """Σ qqᵀ over real tokens before the rotation, of all query heads that read one key head."""
    key_moments: Float64[Tensor, "G K K"]
    tokens: int = 0
    samples: list[RotarySample] = field(default_factory=list)
    broken: bool = False
    """Whether it met NaN or infinity."""


@dataclass
class PairFactors:
    """What becomes of a layer's queries and keys before they are rotated."""

    query: Float64[Tensor, "H K K"]
    """Columns of channels that go are zero."""
    key: Float64[Tensor, "G K K"]
    kept: list[list[int]]
    """Channels that are left, of each key head, ascending."""


def see_rotary(
    model: nn.Module, layers: list[RotaryLayer], batches: Iterable[Any], on_step: Step
) -> list[SeenRotary]:
    """Run the model and keep queries, keys and rotations.

    Args:
        model: the model, in evaluation mode.
        layers: which layers.
        batches: what the model takes.
        on_step: told what is under way.
    """
    wanted = {layer.name: layer for layer in layers}
    names = {side.module for layer in layers for side in (layer.query, layer.key)}
    empty = {n: torch.zeros(o.key_heads, o.width, o.width, dtype=torch.float64) for n, o in wanted.items()}
    seen = {name: SeenRotary(side, empty[name], empty[name].clone()) for name, side in wanted.items()}
    outputs: dict[str, list[Tensor]] = {}

    def add(site: MixerSite) -> None:
        if site.name in wanted:
            found = wanted[site.name]
            sides = [side_of(outputs[side.module][0], side) for side in (found.query, found.key)]
            _add(seen[site.name], site, sides[0], sides[1])

    for count, batch in enumerate(batches, start=1):
        on_step(f"running batch {count}")
        outputs.clear()
        with linear_outputs(model, outputs, names), torch.no_grad(), capture(model, on_mixer=add):
            run_model(model, moved(batch, device_of(model)))
    return list(seen.values())


def _add(layer: SeenRotary, site: MixerSite, query: Tensor, key: Tensor) -> None:
    operator = site.operator
    assert isinstance(operator, SoftmaxMixing)
    layer.broken |= not bool(query.isfinite().all() and key.isfinite().all())
    copies = operator.key.shape[1] // layer.found.key_heads  # some code repeats keys, one for each query head
    after = [operator.query, operator.key[:, ::copies]]
    rotation, _ = fitted(layer.found.pairs.to(query.device), [query, key], after)
    rows = query.transpose(1, 2)[site.valid_tokens].double()
    columns = key.transpose(1, 2)[site.valid_sources].double()
    by_head = torch.einsum("nhi,nhj->hij", rows, rows).cpu()
    layer.query_moments += by_head.unflatten(0, (-1, layer.found.groups)).sum(1)
    layer.key_moments += torch.einsum("nhi,nhj->hij", columns, columns).cpu()
    layer.tokens += int(site.valid_tokens.sum())
    layer.samples.append(RotarySample(operator, query * operator.scale, key, rotation, site.valid_tokens))


def rotary_divergence(samples: list[RotarySample], factors: PairFactors) -> Float64[Tensor, "H"]:
    """Mean KL(M ‖ M') over all real rows, for each query head.

    Args:
        samples: sequences.
        factors: of their layer.
    """
    total, rows = torch.zeros(len(factors.query), dtype=torch.float64), 0
    for sample in samples:
        for head in range(len(total)):
            change = logit_change(sample, head, factors.query[head], factors.key[head // sample.groups])
            matrix = sample.operator[:, head : head + 1].dense()[:, 0].to(change)
            total[head] += divergence(matrix, change)[sample.tokens].double().sum().cpu()
        rows += int(sample.tokens.sum())
    return total / max(rows, 1)


def logit_change(
    sample: RotarySample, head: int, a: Float[Tensor, "K K"], b: Float[Tensor, "K K"]
) -> Float[Tensor, "B T S"]:
    """Logits of one head with factors, less what they were; in float32 at least.

    Args:
        sample: sequences.
        head: of the queries.
        a: of its queries.
        b: of its keys.
    """
    dtype = torch.promote_types(sample.query.dtype, torch.float32)
    query = sample.query[:, head : head + 1].to(dtype)
    key = sample.key[:, head // sample.groups][:, None].to(dtype)
    turn = sample.rotation
    narrow = turn(query @ a.to(query)) @ turn(key @ b.to(key)).mT
    return (narrow - turn(query) @ turn(key).mT)[:, 0]
