"""Find attention layers whose key heads can be merged, and build layers with merged key heads.

Bases of keys, values and outputs are free: a trial changes them at random, in planes that commute with rotary
positions, and demands equal outputs. A second trial merges heads and demands that a configuration describes
the result.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise._internals.forward import Change, config_value
from rankwise._internals.linalg import as_float64
from rankwise.compression.heads_find import renumbered
from rankwise.compression.plain import change_configs, check_plain
from rankwise.compression.trials import Found, at_once_and_in_halves, check_some, keep_passing, same_outputs
from rankwise.compression.width_find import random_bases
from rankwise.compression.width_modules import ChangedHead, changed_linear, linear_of, trained_like
from rankwise.errors import CompressionError
from rankwise.tracing.projections import Projection, QueryKeyProjections, linear_parts, observe

EXPECTED = "softmax attention of several key heads, whose number a configuration contains"


@dataclass(frozen=True)
class KeyHeads:
    """Linear layers around the heads of an attention layer."""

    query_key: QueryKeyProjections
    value: Projection
    output: Projection

    @property
    def name(self) -> str:
        """Name of the attention layer."""
        return self.query_key.name

    @property
    def count(self) -> int:
        """G, the number of key heads, which is also the number of value heads."""
        return self.query_key.key_heads

    @property
    def divisors(self) -> list[int]:
        """Smaller numbers of key heads that divide the number of key heads, largest first."""
        return [count for count in range(self.count - 1, 0, -1) if self.count % count == 0]


@dataclass
class Merge:
    """Number of key heads that remain, and factors of the heads; adjacent heads become one."""

    count: int
    query: Float64[Tensor, "G K K"]
    """New queries of the query heads that read key head i: q · query[i], before any rotation."""
    key: Float64[Tensor, "G K K"]
    """New keys: Σ_i k_i · key[i] over the heads that become one."""
    value: Float64[Tensor, "G V V"]
    output: Float64[Tensor, "G V V"]
    """Values of key head i are approximated by the new values times output[i]."""


def find(model: nn.Module, batch: Any) -> Found[KeyHeads]:
    """Return the layers with several key heads that can be merged, and why each other layer is left out.

    Raise `NoLayersError` if no layer passes, or if no configuration describes merged heads.
    """
    seen = observe(model, batch)
    layers: list[KeyHeads] = []
    skipped: dict[str, str] = {}
    for name, mixers in seen.mixers.items():
        near = seen.projections(name)
        query_key, value, output = near.query_key, near.value, near.output
        if isinstance(query_key, str) or isinstance(value, str) or isinstance(output, str):
            skipped[name] = next(x for x in (query_key, value, output) if isinstance(x, str))
        elif len(mixers) > 1:
            skipped[name] = "it runs more than once"
        elif query_key.key_heads == 1:
            skipped[name] = "it has one key head, which all query heads share already"
        elif len(value.channels) != query_key.key_heads:
            skipped[name] = f"it has {query_key.key_heads} key heads and {len(value.channels)} value heads"
        else:
            layers.append(KeyHeads(query_key, value, output))

    def turned(model: nn.Module, layers: list[KeyHeads]) -> Change:
        return merging(model, {layer: _turned(layer, layer.count) for layer in layers})

    reason = "its outputs change with the basis of keys or values"
    trial = same_outputs(model, batch, turned, reason, at_once_and_in_halves)
    layers, skipped = keep_passing(model, (layers, skipped), trial, EXPECTED)
    counts = {layer.count for layer in layers}
    reason = f"numbers of key heads that differ: {', '.join(map(str, sorted(counts)))}"
    if len(counts) == 1:
        try:
            with merging(model, {layer: _turned(layer, layer.divisors[0]) for layer in layers}):
                check_plain(model, batch)
            reason = ""
        except CompressionError as error:
            reason = error.got
    if reason:
        check_some(model, [], {layer.name: reason for layer in layers} | skipped, EXPECTED)
    return layers, skipped


def _turned(layer: KeyHeads, count: int) -> Merge:
    """Return a merge of heads in random bases that positions allow."""
    bases = random_bases(layer.query_key)
    size = layer.count, *[layer.value.channels.shape[1]] * 2
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turns = torch.linalg.qr(drawn).Q
    return Merge(count, bases.query[:: layer.query_key.groups], bases.key, turns, turns.mT)


def merging(model: nn.Module, plan: dict[KeyHeads, Merge]) -> Change:
    """Return the change that merges key heads, with configurations that contain their number."""
    modules: dict[str, nn.Module] = {}
    attributes: dict[str, dict[str, Any]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for layer, merge in plan.items():
        group, size = layer.query_key.groups, layer.count // merge.count
        heads: dict[str, list[ChangedHead]] = {}
        query = layer.query_key.query
        for channels, factor in zip(query.channels, merge.query.repeat_interleave(group, 0), strict=True):
            heads.setdefault(query.module, []).append((channels, factor, channels))
        for side, factors in ((layer.query_key.key, merge.key), (layer.value, merge.value)):
            read = side.channels.reshape(merge.count, -1)
            joined = factors.reshape(merge.count, -1, factors.shape[-1])
            sums = zip(read, joined, side.channels[: merge.count], strict=True)
            heads.setdefault(side.module, []).extend(sums)
        modules |= {name: changed_linear(model.get_submodule(name), each)[0] for name, each in heads.items()}
        module = model.get_submodule(layer.output.module)
        weight, bias = linear_parts(module)  # type: ignore[misc]
        columns = as_float64(weight.detach()).unflatten(1, layer.output.channels.shape)
        factors = merge.output.repeat_interleave(group, 0).to(columns.device)
        new = torch.einsum("ohv,hwv->ohw", columns, factors).flatten(1)
        modules[layer.output.module] = trained_like(module, linear_of(new.to(weight), bias))
        counts = {"key heads": (layer.count, merge.count), "group": (group, group * size)}
        attributes[layer.name] = renumbered(vars(model.get_submodule(layer.name)).get, counts)
    if all(before == after for before, after in counts.values()):
        return Change(model, modules)

    def edit(_name: str, config: Any) -> None:
        for name, number in renumbered(lambda name: config_value(config, name), counts).items():
            setattr(config, name, number)

    return change_configs(model, attributes, edit, modules, attributes)
