"""Find attention layers whose key heads can be merged, and build layers with merged key heads.

Bases of keys, values and outputs and the order of heads are free: a trial changes them at random, in planes
that commute with rotary positions, and demands equal outputs. A second trial merges heads and demands that a
configuration describes the result.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise._internals.forward import Change, config_value
from rankwise._internals.linalg import as_float64
from rankwise.compression.evaluate import is_decoder
from rankwise.compression.heads_find import renumbered
from rankwise.compression.plain import change_configs, check_plain
from rankwise.compression.trials import (
    Found,
    at_once_and_in_halves,
    check_some,
    keep_passing,
    main_output,
)
from rankwise.compression.width_find import random_bases
from rankwise.compression.width_modules import linear_of
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
    def group(self) -> int:
        """Query heads per key head."""
        return self.query_key.groups

    @property
    def divisors(self) -> list[int]:
        """Smaller numbers of key heads that divide the number of key heads, largest first."""
        return [count for count in range(self.count - 1, 0, -1) if self.count % count == 0]


@dataclass
class Merge:
    """Key heads that become one, and factors of rows: the new heads are sums of old heads times factors."""

    heads: list[int]
    key: Float64[Tensor, "c K K"]
    """New keys: Σ_i k_i · key[i], before any rotation."""
    query: Float64[Tensor, "c K K"]
    """New queries of the query heads that read key head i: q · query[i]."""
    value: Float64[Tensor, "c V V"]
    output: Float64[Tensor, "c V V"]
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
        elif not all(
            isinstance(model.get_submodule(side.module), nn.Linear)
            for side in (query_key.query, query_key.key, value, output)
        ):
            skipped[name] = "its projections are no nn.Linear"
        else:
            layers.append(KeyHeads(query_key, value, output))
    halves = is_decoder(model) and isinstance(batch, dict) and "input_ids" in batch
    layers, skipped = keep_passing(
        model,
        batch,
        (layers, skipped),
        lambda model, layers: merging(model, {layer: _turned(layer) for layer in layers}),
        "its outputs change with the order of its heads, or with the basis of keys or values",
        EXPECTED,
        at_once_and_in_halves if halves else lambda model, batch: [main_output(model, batch)],
    )
    counts = {layer.count for layer in layers}
    reason = f"numbers of key heads that differ: {', '.join(map(str, sorted(counts)))}"
    if len(counts) == 1:
        try:
            with merging(model, {layer: _pooled(layer, layer.divisors[0]) for layer in layers}):
                check_plain(model, batch)
            reason = ""
        except CompressionError as error:
            reason = error.got
    if reason:
        left = {layer.name: reason for layer in layers}
        check_some(model, [], left | skipped, EXPECTED)
    return layers, skipped


def _turned(layer: KeyHeads) -> list[Merge]:
    """Return the trial: key heads in reversed order, each in a random basis that positions allow."""
    bases = random_bases(layer.query_key).key
    generator = torch.Generator().manual_seed(0)
    width = layer.value.channels.shape[1]
    drawn = torch.randn(layer.count, width, width, generator=generator, dtype=torch.float64)
    turns = torch.linalg.qr(drawn).Q
    return [
        Merge([head], bases[[head]], bases[[head]], turns[[head]], turns[[head]].mT)
        for head in reversed(range(layer.count))
    ]


def _pooled(layer: KeyHeads, count: int) -> list[Merge]:
    """Return merges of neighboring heads to their means."""
    size = layer.count // count
    keys, values = (
        torch.eye(side.channels.shape[1], dtype=torch.float64).repeat(size, 1, 1)
        for side in (layer.query_key.key, layer.value)
    )
    return [
        Merge([*range(first, first + size)], keys / size, keys, values / size, values)
        for first in range(0, layer.count, size)
    ]


# --- change ----------------------------------------------------------------------------------------------


def merging(model: nn.Module, plan: dict[KeyHeads, list[Merge]]) -> Change:
    """Return the change that merges key heads, with configurations that contain their number.

    Query heads are sorted by their new key heads, because the model's code repeats each key head for as many
    adjacent query heads.
    """
    modules: dict[str, nn.Module] = {}
    attributes: dict[str, dict[str, Any]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for layer, merges in plan.items():
        sides = (layer.query_key.query, layer.query_key.key, layer.value)
        rows: dict[str, list[tuple[Tensor, list[tuple[Tensor, Tensor]]]]] = {}
        columns = []
        query, key, value = sides
        for new, merge in enumerate(merges):
            for side, factors in ((key, merge.key), (value, merge.value)):
                old = [*zip(side.channels[merge.heads], factors, strict=True)]
                rows.setdefault(side.module, []).append((side.channels[new], old))
            for place, head in enumerate(merge.heads):
                for member in range(layer.group):
                    heads = [head * layer.group + member]  # the query head, before and after the sort
                    heads.append((new * len(merge.heads) + place) * layer.group + member)
                    before, after = query.channels[heads]
                    rows.setdefault(query.module, []).append((after, [(before, merge.query[place])]))
                    columns.append((*layer.output.channels[heads], merge.output[place]))
        gone = {side.module: set[int]() for side in sides}
        for side in (key, value):
            gone[side.module] |= set(side.channels[len(merges) :].flatten().tolist())
        for name, sums in rows.items():
            module = model.get_submodule(name)
            weight, bias = linear_parts(module)  # type: ignore[misc]
            wide = [as_float64(x.detach()) for x in (weight, bias) if x is not None]
            mapped = [x.clone() for x in wide]
            for after, terms in sums:
                for x, new_x in zip(wide, mapped, strict=True):
                    new_x[after] = sum(factor.to(x.device).mT @ x[before] for before, factor in terms)
            kept = [channel for channel in range(len(weight)) if channel not in gone[name]]
            modules[name] = _like(module, mapped[0][kept], mapped[1][kept] if bias is not None else None)
        module = model.get_submodule(layer.output.module)
        weight, bias = linear_parts(module)  # type: ignore[misc]
        wide_weight = as_float64(weight.detach())
        mapped_weight = wide_weight.clone()
        for before, after, factor in columns:
            mapped_weight[:, after] = wide_weight[:, before] @ factor.to(wide_weight.device).mT
        modules[layer.output.module] = _like(module, mapped_weight, bias)
        counts = {
            "key heads": (layer.count, len(merges)),
            "group": (layer.group, layer.group * layer.count // len(merges)),
        }
        attributes[layer.name] = renumbered(vars(model.get_submodule(layer.name)).get, counts)
    if all(before == after for before, after in counts.values()):
        return Change(model, modules)

    def edit(_name: str, config: Any) -> None:
        for name, number in renumbered(lambda name: config_value(config, name), counts).items():
            setattr(config, name, number)

    change = change_configs(model, attributes, edit)
    change.modules = modules
    for name, values in attributes.items():
        change.attributes.setdefault(name, {}).update(values)
    return change


def _like(module: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with other weights, in the dtype and mode of a module."""
    like: Any = module.weight
    new = linear_of(weight.to(like), None if bias is None else bias.to(like))
    new.requires_grad_(like.requires_grad)
    return new.train(module.training)
