"""Linear layers that compute only some channels of queries and keys, and caches of narrow keys."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from pydantic import BaseModel
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rankwise._internals.forward import AddedHook, Change, device_of
from rankwise._internals.linalg import as_float64
from rankwise.errors import CompressionError
from rankwise.tracing.projections import QueryKeyProjections, linear_parts

Runs = list[tuple[int, int]]
"""Runs of consecutive channels, each as (first, count)."""
RECORD = "_narrow_keys"
"""Name of the attribute that keeps the `NarrowedKeys` record of an attention layer."""
NARROWED = "_narrowed_linear"
"""Name of the attribute that keeps the `NarrowedLinear` record of a `NarrowProjection`."""
ChangedHead = tuple[Int[Tensor, "n"], Float64[Tensor, "n r"], Int[Tensor, "r"]]
"""Output channels of a linear layer, factors of their outputs, and the channels that get the results."""
OTHER_CLASS = "Load it into the class it was saved from."


def runs_of(channels: Sequence[int]) -> Runs:
    """Return channels as runs of consecutive numbers, in the same order.

    Examples:
        >>> runs_of([4, 5, 0, 1])
        [(4, 2), (0, 2)]
    """
    runs: Runs = []
    for channel in channels:
        if runs and sum(runs[-1]) == channel:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((channel, 1))
    return runs


def channels_of(runs: Runs) -> list[int]:
    """Return the channels in runs."""
    return [channel for first, count in runs for channel in range(first, first + count)]


def channel_index(runs: Runs, device: torch.device) -> Int[Tensor, "n"]:
    """Return the channels in runs as an index on a device."""
    return torch.tensor(channels_of(runs), dtype=torch.long, device=device)


def fill_zeros(narrow: Float[Tensor, "*B n"], channels: Int[Tensor, "n"], size: int) -> Float[Tensor, "*B N"]:
    """Return all N channels, with zeros for the channels that are not computed."""
    return narrow.new_zeros(*narrow.shape[:-1], size).index_copy_(-1, channels, narrow)


# --- modules ---------------------------------------------------------------------------------------------


class ReplacedLinear(nn.Module):
    """Base class of modules that replace a linear layer, with a placeholder ``weight`` of shape (1, 1).

    The saved placeholder fits no linear layer. Code that cannot load compressed models therefore raises an
    error, instead of a silent start from random weights. ``weight`` and ``bias`` also must exist because
    families such as T5 and SigLIP initialize ``attention.q.weight`` and its bias by name.
    """

    weight: Tensor
    bias: Tensor | None

    def set_guard(self) -> None:
        """Create the placeholder ``weight`` on the device of the module's other weights."""
        self.register_buffer("weight", torch.zeros(1, 1, device=device_of(self)))

    def __repr__(self) -> str:
        """Return one line, which PEFT prints if its `target_modules` name this module."""
        linear = (name for name, module in self.named_modules() if isinstance(module, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in linear})
        return f"{type(self).__name__}(for adapters, replace its name by {', '.join(map(repr, names))})"


class NarrowProjection(ReplacedLinear):
    """Linear layer that computes only some of its channels; the other channels are zero.

    Heads keep their places and widths, so the model's attention, masks and positions need no change. A zero
    at the same place of query and key adds nothing to a logit. Without the zeros, fused attention on a CPU
    would be slow, because queries and keys would be narrower than values.
    """

    channels: Tensor

    def __init__(self, narrow: nn.Linear, runs: Sequence[tuple[int, int]], out_features: int) -> None:
        super().__init__()
        self.narrow = narrow  # a linear layer, which the part kv may replace by a `LatentProjection`
        self.runs: Runs = [(int(first), int(count)) for first, count in runs]
        self.in_features, self.out_features = narrow.in_features, out_features
        # the record has no module name, because `structure_of` adds the current name
        self._narrowed_linear = NarrowedLinear(module="", out_features=out_features, runs=self.runs)
        self.set_guard()
        self.register_buffer("bias", None if narrow.bias is None else self.weight[0], persistent=False)

    def forward(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... O"]:
        """Return all channels, with zeros for the channels that are not computed."""
        return fill_zeros(self.narrow(tokens), self.channels, self.out_features)

    def set_guard(self) -> None:
        """Create the placeholder ``weight`` and the index ``channels`` on the device of the other weights."""
        super().set_guard()
        self.register_buffer("channels", channel_index(self.runs, device_of(self)), persistent=False)


class NarrowKeys(DynamicLayer):
    """Cache layer that keeps keys as (B, 1, S, ΣK_h), without zeros. `update` returns keys with zeros."""

    keys: Tensor
    values: Tensor

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.runs = runs

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create empty tensors with the dtype, device and batch of the first keys."""
        super().lazy_initialization(key_states, value_states)
        self.heads, self.width = key_states.shape[1], key_states.shape[3]
        self.channels = channel_index(self.runs, key_states.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values, and return the keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        flat = key_states.transpose(1, 2).flatten(2).index_select(-1, self.channels)[:, None]
        self.keys = torch.cat([self.keys, flat], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.whole(), self.values

    def whole(self) -> Float[Tensor, "B G S K"]:
        """Return the keys of all tokens and channels, with zeros for removed channels."""
        flat = fill_zeros(self.keys[:, 0], self.channels, self.heads * self.width)
        return flat.unflatten(-1, (self.heads, self.width)).transpose(1, 2)


def replace_cache_layer(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[[], Any]
) -> None:
    """Hook before an attention layer: replace its cache layer if it is exactly `DynamicLayer` and empty.

    If the cache has no layer for this module yet, a new cache layer is appended. Caches of fixed size and
    windows stay unchanged: they keep keys in full and still work.
    """
    cache = next((value for value in (*kwargs.values(), *args) if hasattr(value, "get_seq_length")), None)
    cache = getattr(cache, "self_attention_cache", cache)
    at, layers = getattr(module, "layer_idx", None), getattr(cache, "layers", None)
    if layers is None or not isinstance(at, int):
        return
    grows = getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
    if len(layers) == at and grows:
        layers.append(make())
    elif at < len(layers) and type(layers[at]) is DynamicLayer and not layers[at].is_initialized:
        layers[at] = make()


# --- saved records ---------------------------------------------------------------------------------------


class NarrowedLinear(BaseModel, extra="forbid"):
    """Record of a linear layer with fewer channels."""

    kind: Literal["narrow"] = "narrow"
    module: str
    out_features: int
    runs: Runs
    """Channels that are computed, as (first, count)."""


class NarrowedKeys(BaseModel, extra="forbid"):
    """Record of an attention layer whose cache keeps fewer channels of the keys."""

    kind: Literal["keys"] = "keys"
    module: str
    runs: Runs
    """Channels of the keys, counted over all heads."""


def build_keys(model: nn.Module, *changes: NarrowedKeys) -> Change:
    """Return the change that installs the caches of narrow keys that records describe."""
    hooks = [
        AddedHook(
            record.module, "before", partial(replace_cache_layer, make=partial(NarrowKeys, record.runs))
        )
        for record in changes
    ]
    attributes = {record.module: {RECORD: record} for record in changes}
    return Change(model, attributes=attributes, hooks=hooks)


def build(model: nn.Module, saved: NarrowedLinear) -> Change:
    """Return the change to the narrow layer that a record describes. Loading replaces its weights later."""
    expected = f"a linear layer with {saved.out_features} channels"
    module = find_module(model, saved.module)
    weight, bias = weights_of(saved.module, module, expected, lambda size: size[0] == saved.out_features)
    narrow = linear_of(weight, bias, channels_of(saved.runs))
    return Change(model, {saved.module: NarrowProjection(narrow, saved.runs, saved.out_features)})


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module that a record names. Raise `CompressionError` if the model has no such module."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        subject, expected = f"model {type(model).__name__}", f"a module {name!r}, which was compressed"
        raise CompressionError(subject, expected=expected, got="none", fix=OTHER_CLASS) from None


def weights_of(
    name: str, module: nn.Module, expected: str, fits: Callable[[torch.Size], bool]
) -> tuple[Float[Tensor, "O D"], Float[Tensor, "O"] | None]:
    """Return weight and bias of a linear layer. Raise `CompressionError` if the weight has a wrong shape."""
    parts = linear_parts(module)
    if parts is None or not fits(parts[0].shape):
        raise CompressionError(f"module {name!r}", expected=expected, got=f"{module!r}", fix=OTHER_CLASS)
    return parts


def linear_of(
    weight: Float[Tensor, "O D"], bias: Float[Tensor, "O"] | None, rows: list[int] | slice = slice(None)
) -> nn.Linear:
    """Return a linear layer with a copy of some rows of a weight and a bias."""
    weight = weight.detach()[rows].clone(memory_format=torch.contiguous_format)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach()[rows].clone())
    return linear


# --- narrow layers from factors --------------------------------------------------------------------------


@dataclass
class Factors:
    """Factors A and B of each head: logits Q Kᵀ become (Q A)(K B)ᵀ, before positions rotate queries and keys.

    Columns of removed channels are zero.
    """

    query: Float64[Tensor, "H K K"]
    key: Float64[Tensor, "G K K"]
    kept: list[list[int]]
    """Remaining channels of each key head, ascending."""


def trained_like(module: nn.Module, new: nn.Module) -> Any:
    """Return a new module in the mode of a module. Its weights require gradients if one of the module did."""
    new.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))
    return new.train(module.training)


def changed_linear(module: nn.Module, heads: Iterable[ChangedHead]) -> tuple[nn.Linear, list[int]]:
    """Return a linear layer whose heads are multiplied by factors in float64 and rounded once.

    Channels that are read and get no result are removed. Also return the old numbers of the other channels.
    """
    parts = linear_parts(module)
    assert parts is not None
    old = [weight.detach() for weight in parts if weight is not None]
    new = [weight.clone() for weight in old]
    gone, kept = set[int](), set[int]()
    for channels, factor, places in heads:
        gone.update(channels.tolist())
        kept.update(places.tolist())
        for before, after in zip(old, new, strict=True):
            wide = as_float64(before[channels])
            after[places] = (factor.to(wide.device).mT @ wide).to(before)
    computed = sorted({*range(len(new[0]))} - gone | kept)
    linear = linear_of(new[0], new[1] if len(new) > 1 else None, computed)
    return trained_like(module, linear), computed


def narrow_linear(module: nn.Module, heads: Iterable[ChangedHead]) -> NarrowProjection:
    """Return a `changed_linear` whose outputs have their old places."""
    linear, computed = changed_linear(module, heads)
    size = linear_parts(module)[0].shape[0]  # type: ignore[index]
    narrow: NarrowProjection = trained_like(module, NarrowProjection(linear, runs_of(computed), size))
    return narrow


def narrow_layers(
    model: nn.Module, plan: Sequence[tuple[QueryKeyProjections, Factors]], cache: bool = True
) -> Change:
    """Return the change that multiplies projections by factors, with key caches if `cache` is True.

    Each linear layer is replaced once, also if it computes queries and keys.
    """
    heads: dict[str, list[ChangedHead]] = {}
    for layer, factors in plan:
        for side, matrices, groups in (
            (layer.query, factors.query, layer.groups),
            (layer.key, factors.key, 1),
        ):
            for head, (channels, factor) in enumerate(zip(side.channels, matrices, strict=True)):
                kept = factors.kept[head // groups]
                heads.setdefault(side.module, []).append((channels, factor[:, kept], channels[kept]))
    keys = []
    for layer, factors in plan if cache else ():
        places = [h * layer.width + c for h, kept in enumerate(factors.kept) for c in kept]
        keys.append(NarrowedKeys(module=layer.name, runs=runs_of(places)))
    change = build_keys(model, *keys)
    change.modules = {name: narrow_linear(model.get_submodule(name), each) for name, each in heads.items()}
    return change
