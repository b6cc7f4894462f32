"""The attention layers of a model, with what their heads saw on some batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from rankwise._internals.forward import device_of, first_sequences, run_model, to_device
from rankwise._internals.rotary import fit_rotation
from rankwise.compression.divergence import Sample
from rankwise.compression.written import find_written
from rankwise.operators import DenseMixing, SoftmaxMixing
from rankwise.tracing import MixerSite, RecordedCall, capture, record_calls
from rankwise.tracing.projections import (
    Projection,
    each_once,
    find_projection,
    is_linear,
    names_below,
    side_of,
)

WRITTEN = (
    "its softmax is written out by hand, and its logits are no scaled inner products of two projections plus "
    "what all sequences share, or the first batch has no two different sequences; attn_implementation='sdpa' "
    "may show more"
)
Step = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """Where an attention layer gets its queries and keys from."""

    name: str
    """The module that mixes."""
    stack: str
    layer: int
    query: Projection
    key: Projection
    written: float | None = None
    """Scale of the logits where the softmax is written out by hand: queries and keys are then taken from the
    projections. None where fused attention shows them."""
    pairs: Int[Tensor, "P 2"] = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.long))
    """Channels of a head that positions turn into each other; none where they are not rotated in."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return len(self.query.channels)

    @property
    def key_heads(self) -> int:
        """Key heads: fewer where they are grouped."""
        return len(self.key.channels)

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.key_heads

    @property
    def width(self) -> int:
        """K, of queries and keys."""
        return self.query.channels.shape[1]


def linear_names(layers: list[Found]) -> set[str]:
    """The linear layers behind queries and keys.

    Args:
        layers: of attention.
    """
    return {side.module for layer in layers for side in (layer.query, layer.key)}


@dataclass
class AttentionLayer:
    """One attention layer and what it saw."""

    found: Found
    query_moments: Float64[Tensor, "G K K"]
    """Σ qqᵀ over real tokens, of all query heads that read one key head; before any rotation."""
    key_moments: Float64[Tensor, "G K K"]
    tokens: int = 0
    """Real tokens behind the moments."""
    samples: list[Sample] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    """Query heads that met NaN or infinity."""


def find_layers(model: nn.Module, batch: Any) -> tuple[list[Found], dict[str, str]]:
    """Find the linear layers behind the queries and keys of every attention layer.

    Args:
        model: the model, in evaluation mode.
        batch: what it takes; a sequence or two of it are used.

    Returns:
        The layers, in the order they run; and the reason for each one that cannot be done.
    """
    sites: list[MixerSite] = []
    short = to_device(first_sequences(batch, 2), device_of(model))
    with record_calls(model, is_linear) as linear, torch.no_grad(), capture(model, on_mixer=sites.append):
        run_model(model, short)
    outputs = outputs_by_name(linear)
    found: dict[str, Found] = {}
    reasons: dict[str, str] = {}
    calls: dict[str, int] = {}
    for site in sites:
        call = calls[site.name] = calls.get(site.name, -1) + 1
        if site.name in reasons:
            continue
        projections = _projections(site, outputs, call)
        if isinstance(projections, str):
            reasons[site.name] = projections
            found.pop(site.name, None)
        elif site.name not in found:
            found[site.name] = projections
        elif not _same(projections, found[site.name]):
            reasons[site.name] = "its calls read different projections"
            del found[site.name]
    return list(found.values()), reasons


def see(
    model: nn.Module, layers: list[Found], batches: Iterable[Any], on_step: Step | None = None
) -> list[AttentionLayer]:
    """Run the model and keep what compression needs: second moments, and the sequences themselves.

    Cost: a run of the model; queries and keys of all tokens stay in memory, 2·T·(H + G)·K numbers a layer.

    Args:
        model: the model, in evaluation mode.
        layers: which layers.
        batches: what the model takes.
        on_step: told what is under way.
    """
    seen: dict[str, AttentionLayer] = {}
    wanted = {layer.name: layer for layer in layers}
    behind = [layer for layer in layers if layer.written or len(layer.pairs)]
    read = linear_names(behind)
    calls: dict[str, int] = {}

    def add(site: MixerSite) -> None:
        found = wanted.get(site.name)
        if found is None:
            return
        call = calls[site.name] = calls.get(site.name, -1) + 1
        if site.name not in seen:
            empty = torch.zeros(found.key_heads, found.width, found.width, dtype=torch.float64)
            seen[site.name] = AttentionLayer(found, empty, empty.clone())
        _add(seen[site.name], site, _sample(found, site, linear, call))

    device = device_of(model)
    for count, batch in enumerate(batches, start=1):
        if on_step is not None:
            on_step(f"running batch {count}")
        calls.clear()
        with record_calls(model, read) as linear, torch.no_grad(), capture(model, on_mixer=add):
            run_model(model, to_device(batch, device))
    return [seen[layer.name] for layer in layers if layer.name in seen]


def _sample(found: Found, site: MixerSite, linear: list[RecordedCall], call: int) -> Sample:
    """Queries, keys and the scale of the logits, of one call."""
    operator = site.operator
    if found.written is None and not len(found.pairs):
        assert isinstance(operator, SoftmaxMixing)
        return Sample(operator, operator.query, _keys(found, operator), site.valid_tokens, operator.scale)
    outputs = outputs_by_name(linear)
    query, key = (side_of(outputs[side.module][call], side) for side in (found.query, found.key))
    if found.written is not None:
        return Sample(operator, query, key, site.valid_tokens, found.written)
    assert isinstance(operator, SoftmaxMixing)
    after = [operator.query, _keys(found, operator)]
    rotation, _ = fit_rotation(found.pairs.to(query.device), [query, key], after)
    return Sample(operator, query, key, site.valid_tokens, operator.scale, rotation)


def _keys(found: Found, operator: SoftmaxMixing) -> Tensor:
    """Keys, each once: some code repeats them, one for each query head."""
    return operator.key[:, :: operator.key.shape[1] // found.key_heads]


def _add(layer: AttentionLayer, site: MixerSite, sample: Sample) -> None:
    query, key, groups = sample.query, sample.key, sample.groups
    fine = query.isfinite().all((0, 2, 3)) & key.isfinite().all((0, 2, 3)).repeat_interleave(groups)
    layer.broken |= {head for head, good in enumerate(fine.tolist()) if not good}
    rows = query.transpose(1, 2)[site.valid_tokens].double()  # (N, H, K)
    columns = key.transpose(1, 2)[site.valid_sources].double()
    by_head = torch.einsum("nhi,nhj->hij", rows, rows).cpu()
    layer.query_moments += by_head.unflatten(0, (-1, groups)).sum(1)
    layer.key_moments += torch.einsum("nhi,nhj->hij", columns, columns).cpu()
    layer.tokens += int(site.valid_tokens.sum())
    layer.samples.append(sample)


def _projections(site: MixerSite, outputs: dict[str, list[Tensor]], call: int) -> Found | str:
    operator = site.operator
    if site.cross:
        return "its queries and keys come from different sequences"
    near = names_below(list(outputs), site.name)
    given = {name: outputs[name][min(call, len(outputs[name]) - 1)] for name in near}
    if isinstance(operator, DenseMixing):
        if not bool(operator.matrix.isfinite().all()):
            return "its attention holds NaN or infinity"
        written = find_written(operator.matrix, given)
        if written is None:
            return WRITTEN
        return Found(site.name, site.stack, site.layer, *written)
    if not isinstance(operator, SoftmaxMixing):
        return f"it is no softmax attention, but {operator.kind}"
    if not bool(operator.query.isfinite().all() and operator.key.isfinite().all()):
        return "its queries or keys hold NaN or infinity"
    sides = []
    for what, heads in (("queries", operator.query), ("keys", operator.key)):
        side = find_projection(heads, given)
        if side is None and what == "keys":
            side = find_projection(each_once(heads), given)
        if side is None:
            return (
                f"its {what} are the output of no linear layer: positions are rotated in, a norm follows, or "
                "their weights lie in no nn.Linear"
            )
        sides.append(side)
    return Found(site.name, site.stack, site.layer, sides[0], sides[1])


def outputs_by_name(calls: Iterable[RecordedCall]) -> dict[str, list[Tensor]]:
    """Outputs of modules by name, in the order of their calls.

    Args:
        calls: recorded calls.
    """
    outputs: dict[str, list[Tensor]] = {}
    for call in calls:
        outputs.setdefault(call.name, []).append(call.output)
    return outputs


def _same(first: Found, other: Found) -> bool:
    pairs = ((first.query, other.query), (first.key, other.key))
    return all(a.module == b.module and bool((a.channels == b.channels).all()) for a, b in pairs)
