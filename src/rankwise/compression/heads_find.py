"""Find attention layers that work with fewer heads, and the linear layers before and after the heads.

Tensors of a forward pass show which linear layers compute the heads and which layer reads them. A table
names the attributes that contain the number of heads, and a trial shows whether it is enough to change them.
A unit is a set of heads that are removed together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from rankwise._internals.forward import AddedHook, Change, config_value
from rankwise.compression.heads_modules import CutLinear, RemovedHeads, build
from rankwise.compression.plain import change_configs, check_plain
from rankwise.compression.save import pretrained_models
from rankwise.compression.trials import (
    Found,
    at_once_and_in_halves,
    keep_passing,
    main_output,
    relative_error,
)
from rankwise.compression.width_modules import runs_of
from rankwise.errors import CompressionError, first_line
from rankwise.operators import SoftmaxMixing
from rankwise.tracing.projections import (
    MixerProjections,
    Projection,
    is_adapter,
    linear_parts,
    not_linear,
    observe,
)

NOT_FEWER = "its own code does not compute with fewer heads"
NAMES = {
    "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "num_attn_heads", "heads"),
    "key heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads"),
    "group": ("num_key_value_groups", "num_groups", "n_rep"),
    "width": (
        "all_head_size",
        "head_size",
        "embed_dim",
        "embedding_dim",
        "hidden_dim",
        "hidden_size",
        "inner_dim",
        "internal_dim",
        "dim",
        "d_model",
        "split_size",
    ),
}
"""Names of attributes of attention layers, and of fields of configurations, that contain the number of heads,
of key heads, of query heads per key head, and the width of all heads. An attribute is changed if it has
the value of the layer. A trial shows whether these changes are enough."""
Plan = dict[str, set[int]]
"""Units to remove, by the name of their layer."""


class HeadChannels(NamedTuple):
    """Channels of a linear layer's output that belong to heads."""

    size: int
    """Number of all output channels of the layer."""
    blocks: list[tuple[Int[Tensor, "_ _"], bool]]
    """Blocks of heads: the channels of each head, and True if these are query heads."""


@dataclass(frozen=True)
class HeadProjections:
    """An attention layer and the linear layers around its heads."""

    name: str
    heads: int
    value_heads: int
    """Number of key heads, which is also the number of value heads."""
    value_width: int
    inputs: dict[str, HeadChannels]
    """Channels of the linear layers that compute queries, keys and values, by module name."""
    output: str
    """Name of the linear layer that reads the concatenated heads."""
    keys_stay: bool = False
    """If True, a unit is a query head, and all key heads stay. Each group must lose as many query heads."""

    @property
    def group(self) -> int:
        """Number of query heads of a unit: the number per key head if queries are grouped, otherwise 1."""
        return self.heads // self.value_heads if self.value_heads > 1 and not self.keys_stay else 1

    @property
    def units(self) -> int:
        """Number of units."""
        return self.heads // self.group

    @property
    def rivals(self) -> int:
        """Number of units among which a uniform removal takes as many in all layers and in all groups."""
        return self.heads // self.value_heads if self.keys_stay else self.units

    def remaining(self, units: set[int]) -> tuple[list[int], list[int]]:
        """Return the query heads and the key heads that stay without some units: one unit, if all go."""
        kept = [unit for unit in range(self.units) if unit not in units] or [0]
        query = [unit * self.group + member for unit in kept for member in range(self.group)]
        return query, [*range(self.value_heads)] if self.keys_stay or self.value_heads == 1 else kept

    def without(self, units: set[int], module: nn.Module) -> RemovedHeads:
        """Return the record of the layer without some units; `module` is the layer before its change."""
        query, values = self.remaining(units)
        cuts = [self._cut(name, set(query), set(values)) for name in self.inputs]
        width = self.value_width
        runs = runs_of([head * width + channel for head in query for channel in range(width)])
        cuts.append(CutLinear(module=self.output, side="in", size=self.heads * width, runs=runs))
        sizes = renumbered(vars(module).get, self._counts(units))
        return RemovedHeads(module=self.name, cuts=cuts, sizes=sizes, config=self.fields(module, units))

    def fields(self, source: Any, units: set[int]) -> dict[str, int]:
        """Return new values of fields of a configuration, or of a module's configuration, without units."""
        counts = self._counts(units)
        del counts["width"]
        return renumbered(lambda name: config_value(source, name), counts)

    def _cut(self, name: str, query: set[int], values: set[int]) -> CutLinear:
        size, blocks = self.inputs[name]
        removed = {
            channel
            for channels, of_queries in blocks
            for head, each in enumerate(channels.tolist())
            if head not in (query if of_queries else values)
            for channel in each
        }
        left = [channel for channel in range(size) if channel not in removed]
        return CutLinear(module=name, side="out", size=size, runs=runs_of(left))

    def _counts(self, units: set[int]) -> dict[str, tuple[int, int]]:
        """Return the numbers that `NAMES` lists, before and after the removal of some units."""
        heads, value_heads = map(len, self.remaining(units))
        return {
            "heads": (self.heads, heads),
            "key heads": (self.value_heads, value_heads),
            "group": (self.heads // self.value_heads, heads // value_heads),
            "width": (self.heads * self.value_width, heads * self.value_width),
        }


def renumbered(read: Callable[[str], Any], counts: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return new values of the fields in `NAMES`; `counts` has each number before and after."""
    return {
        name: after
        for kind, (before, after) in counts.items()
        for name in NAMES[kind]
        if read(name) == before
    }


def find(model: nn.Module, batch: Any) -> Found[HeadProjections]:
    """Return the layers from which heads can be removed, and why each other layer is left out.

    A trial removes one unit per layer. It passes if the outputs equal outputs of the full model with these
    units set to zero. All layers are tried together. If this trial fails, each layer is tried alone. Raise
    `NoLayersError` if no layer passes.
    """
    seen = observe(model, batch)
    results = {name: _layer(seen.projections(name)) for name in seen.mixers}
    layers = [layer for layer in results.values() if isinstance(layer, HeadProjections)]
    skipped = {name: reason for name, reason in results.items() if isinstance(reason, str)}

    def trial(some: list[HeadProjections]) -> str:
        reason = difference(model, some, {layer.name: {0} for layer in some}, batch)
        return reason and f"{NOT_FEWER}: {reason}"

    expected = "softmax attention whose heads come from linear layers and go into a linear layer"
    return keep_passing(model, (layers, skipped), trial, expected)


# --- trial -----------------------------------------------------------------------------------------------


def difference(
    model: nn.Module, layers: list[HeadProjections], plan: Plan, batch: Any, uniform: bool = False
) -> str:
    """Return how outputs without some units differ from outputs with these units set to zero.

    Return "" if the outputs are equal. The model also runs with a mask, with a cache, and in eager attention,
    because its code may repeat keys in one of these cases alone. If the removal is uniform, a configuration
    must describe the model.
    """
    try:
        for how, run in _ways(model, batch).items():
            with zeroed(model, layers, plan):
                try:
                    before = run(model, batch)
                except Exception:  # the unchanged model fails, so the trial cannot use this way
                    continue
            with removal(model, layers, plan, uniform):
                off = relative_error(run(model, batch), before)
            if before.isfinite().all() and not off <= torch.finfo(before.dtype).eps ** 0.5:  # NaN differs
                return f"the output of the model{how} is off by {off:.1e}"
        if uniform:
            with removal(model, layers, plan, uniform):
                check_plain(model, batch)
    except CompressionError as error:
        return error.got
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
        return first_line(error)
    return ""


def _ways(model: nn.Module, batch: Any) -> dict[str, Callable[[nn.Module, Any], Tensor]]:
    """Return functions that run a model: unchanged, with a mask, with a cache, and in eager attention."""
    ways: dict[str, Callable[[nn.Module, Any], Tensor]] = {"": main_output}
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is not None and ids.shape[1] > 1:
        mask = torch.ones_like(ids)
        mask[-1, ids.shape[1] // 2 :] = 0
        ways[" with a mask"] = lambda model, batch: main_output(model, {**batch, "attention_mask": mask})
        ways[" with a cache"] = lambda model, batch: at_once_and_in_halves(model, batch)[-1]

    def eager(model: nn.Module, batch: Any) -> Tensor:
        inner = pretrained_models(model)
        usual = [config_value(inner_model, "_attn_implementation") for inner_model in inner]
        try:
            for inner_model in inner:
                inner_model.set_attn_implementation("eager")
            return main_output(model, batch)
        finally:
            for inner_model, name in zip(inner, usual, strict=True):
                inner_model.set_attn_implementation(name)

    return {**ways, " in eager attention": eager}


def removal(model: nn.Module, layers: list[HeadProjections], plan: Plan, uniform: bool = False) -> Change:
    """Return the `Change` that removes the planned units (groups of heads) from their layers.

    If all units of a layer go, the first stays with output weights of zero, because code needs a head.
    If the change is uniform, as many units of each layer are removed, and configurations describe the result.
    """
    cut = [layer for layer in layers if plan.get(layer.name)]
    records = [layer.without(plan[layer.name], model.get_submodule(layer.name)) for layer in cut]
    if not uniform or not cut:
        change = build(model, *records)
        for layer in cut:
            if len(plan[layer.name]) == layer.units:
                nn.init.zeros_(change.modules[layer.output].weight)  # type: ignore[arg-type]
        return change

    def edit(_name: str, config: Any) -> None:
        fields = cut[0].fields(config, plan[cut[0].name])
        if fields and config_value(config, "head_dim") is None:  # or its class would derive a larger width
            fields["head_dim"] = cut[0].value_width
        for name, number in fields.items():
            setattr(config, name, number)

    sizes = {record.module: record.sizes for record in records}
    return change_configs(model, sizes, edit, build(model, *records).modules, sizes)


def zeroed(model: nn.Module, layers: list[HeadProjections], plan: Plan) -> Change:
    """Return the `Change` that sets the outputs of the planned units to zero and keeps all sizes."""
    hooks = []
    for layer in layers:
        width = layer.group * layer.value_width
        units = sorted(plan.get(layer.name, ()))
        channels = [unit * width + channel for unit in units for channel in range(width)]
        if channels:
            hooks.append(AddedHook(layer.output, "before", partial(_set_zero, channels)))
    return Change(model, hooks=hooks)


def _set_zero(channels: list[int], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    removed = torch.tensor(channels, device=args[0].device)
    return (args[0].index_fill(-1, removed, 0), *args[1:]), kwargs


# --- find ------------------------------------------------------------------------------------------------


def _layer(near: MixerProjections) -> HeadProjections | str:
    assert near.mixer is not None
    mixer = near.mixer
    if mixer.kind != "softmax":
        return f"its mixing is {mixer.kind}: only heads of softmax attention are removed"
    if adapted := [name for name in near.others if is_adapter(near.model, name)]:
        return f"it has {adapted[0]!r}, {not_linear(near.model, adapted[0])}"
    output, value = near.output, near.value
    if isinstance(output, str) or isinstance(value, str):
        return output if isinstance(output, str) else str(value)
    heads, width = output.channels.shape
    value_heads = len(value.channels)
    widths = {width} | (
        {mixer.operator.query.shape[-1]} if isinstance(mixer.operator, SoftmaxMixing) else set()
    )
    linear = {
        name: linear_parts(near.model.get_submodule(name)) for name in near.linear if name != output.module
    }
    sizes = {name: parts[0].shape[0] for name, parts in linear.items() if parts is not None}
    sources = _sources(value, heads, value_heads, widths, sizes)
    if sources is None:
        return f"{value.module!r} has more than queries, keys and values, in an unknown order"
    return HeadProjections(mixer.name, heads, value_heads, width, sources, output.module)


def _sources(
    value: Projection, heads: int, value_heads: int, widths: set[int], sizes: dict[str, int]
) -> dict[str, HeadChannels] | None:
    """Return the linear layers that compute queries, keys and values, with the channels of each head.

    These are the layer of the values, and layers whose number of channels fits the heads. Return None if the
    layer of the values has more channels and their order is unknown.
    """
    size = sizes[value.module]
    if value_heads * value.channels.shape[1] != size:
        blocks = _fused_blocks(value.channels, heads, value_heads, size)
        return None if blocks is None else {value.module: HeadChannels(size, blocks)}
    sources = {value.module: HeadChannels(size, [(value.channels, False)])}
    for name, size in sizes.items():
        for count, of_queries in ((heads, True), (value_heads, False)):
            if name not in sources and size in {count * width for width in widths}:
                sources[name] = HeadChannels(size, [(torch.arange(size).reshape(count, -1), of_queries)])
    return sources


def _fused_blocks(
    values: Int[Tensor, "G V"], heads: int, value_heads: int, size: int
) -> list[tuple[Tensor, bool]] | None:
    """Return the channels of each head in a fused projection.

    Known orders are [q | k | v], and q, k and v head by head. Return None for another order.
    """
    width = values.shape[1]
    if size != (heads + 2 * value_heads) * width:
        return None
    channels = torch.arange(size)
    if int(values[0, 0]) == (heads + value_heads) * width and int(values[-1, -1]) == size - 1:
        query, key = channels[: heads * width], channels[heads * width : (heads + value_heads) * width]
        return [(query.reshape(heads, -1), True), (key.reshape(value_heads, -1), False), (values, False)]
    if heads == value_heads and bool((values[:, 0] == torch.arange(heads) * 3 * width + 2 * width).all()):
        return [(channels.reshape(heads, -1), True)]
    return None
