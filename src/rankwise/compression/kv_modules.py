"""Modules that compute keys and values from one latent per token, and caches that keep the latents."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, Field
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rankwise._internals.forward import AddedHook, Change
from rankwise._internals.rotary import PAIRINGS, RopeLayout, apply_rope, per_pair
from rankwise.compression.width_modules import (
    ReplacedLinear,
    Runs,
    channel_index,
    channels_of,
    fill_zeros,
    find_module,
    linear_of,
    replace_cache_layer,
    runs_of,
    weights_of,
)
from rankwise.errors import CompressionError

RECORD = "_latent_layer"
"""Name of the attribute that keeps the `LatentLayer` record of an attention layer."""


class LatentLayer(BaseModel, extra="forbid"):
    """Record of an attention layer with a latent. `module` and `rotary` are full names, others relative."""

    kind: Literal["latent"] = "latent"
    module: str
    key: str
    """Linear layer that computed the keys."""
    value: str
    """Linear layer that computed the values. Equal to `key` if one layer computed both."""
    heads: int
    """Number of key heads."""
    key_channels: Runs
    """Output channels of `key`, head by head, as (first, count), without channels that ``width`` removed."""
    value_channels: Runs
    rank: int = Field(ge=1)
    """Width of the latent."""
    key_width: int = 0
    """Width of a key head including the zeros for removed channels. 0 if keys were not narrowed."""
    key_places: Runs = Field(default_factory=list)
    """Positions of the channels of narrow keys, counted over heads."""
    key_factor: float = 1.0
    value_factor: float = 1.0
    norm: str = ""
    """Module that normalizes keys before rotation. Empty if keys are not normalized."""
    norm_axes: Literal["flat", "tokens", "heads"] = "tokens"
    """Shape of the keys in `norm`: (B, T, G·K), (B, T, G, K) or (B, G, T, K)."""
    rotary: str = ""
    """Module of the model that computes cos and sin. Empty if keys are not rotated."""
    rotary_options: dict[str, str] = Field(default_factory=dict)
    rotation: RopeLayout = "halves"

    @property
    def name(self) -> str:
        """Name of the attention layer in the model."""
        return self.module

    @property
    def full(self) -> int:
        """Number of channels of keys and values together: the width of a cache without latents."""
        return sum(count for _, count in (*self.key_channels, *self.value_channels))

    def path(self, name: str) -> str:
        """Return the full name of a module whose name is relative to the attention layer."""
        return f"{self.module}.{name}" if self.module else name

    @property
    def projections(self) -> list[tuple[str, list[int]]]:
        """Full name and channels of each linear layer. There is one entry if keys and values are fused."""
        keys, values = channels_of(self.key_channels), channels_of(self.value_channels)
        if self.key == self.value:
            return [(self.path(self.key), keys + values)]
        return [(self.path(self.key), keys), (self.path(self.value), values)]


class LatentState:
    """State of one attention layer: computes the latent once per call, and decodes keys and values from it.

    The state is not an `nn.Module`, because a module would register the projections a second time.
    """

    key: "LatentProjection"
    value: "LatentProjection"
    positions: Tensor | None
    tokens: Tensor | None
    latent: Tensor | None

    def __init__(self, layer: LatentLayer, norm: nn.Module | None, rotary: nn.Module | None) -> None:
        self.layer, self.norm, self.rotary = layer, norm, rotary
        self.key_places = channel_index(layer.key_places, torch.device("cpu"))
        self.end_call()

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the attention layer: read its positions and replace an empty cache layer."""
        self.in_call, self.positions = True, kwargs.get("position_ids")
        self.tokens = self.latent = None
        replace_cache_layer(module, args, kwargs, lambda: LatentCache(self))

    def end_call(self, *_: Any) -> None:
        """Hook after the attention layer: drop the tensors of the call."""
        self.in_call = False
        self.positions = self.tokens = self.latent = None

    def encode(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... r"]:
        """Return the latent of tokens, which is computed once per call of the attention layer."""
        if not self.in_call:
            return self.key.down(tokens)
        if self.tokens is not tokens or self.latent is None:
            latent: Tensor = self.key.down(tokens)
            self.tokens, self.latent = tokens, latent
        return self.latent

    def decode(
        self, latent: Float[Tensor, "B S r"], positions: Int[Tensor, "B S"] | None
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"]]:
        """Return keys, normalized and rotated to their positions, and values."""
        layer = self.layer
        flat = self.key.up(latent)
        if layer.key == layer.value:
            count = sum(count for _, count in layer.key_channels)
            flat, values = flat[..., :count], flat[..., count:]
        else:
            values = self.value.up(latent)
        if layer.key_width:
            flat = fill_zeros(flat, self.key_places.to(flat.device), layer.heads * layer.key_width)
        if self.norm is not None and layer.norm_axes == "flat":
            flat = self.norm(flat)
        keys = flat.unflatten(-1, (layer.heads, -1))
        if self.norm is not None and layer.norm_axes == "tokens":
            keys = self.norm(keys)
        keys = keys.transpose(1, 2)
        if self.norm is not None and layer.norm_axes == "heads":
            keys = self.norm(keys)
        if self.rotary is not None:
            angles = self.rotary(latent, position_ids=positions, **layer.rotary_options)
            cos, sin = (per_pair(angle, layer.rotation)[:, None] for angle in angles)
            keys = apply_rope(keys, cos, sin, PAIRINGS[layer.rotation])
        if layer.key_factor != 1:
            keys = keys * layer.key_factor
        values = values.unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        return keys, values * layer.value_factor if layer.value_factor != 1 else values

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies of the model, without the tensors of a call."""
        return {**vars(self), "in_call": False, "positions": None, "tokens": None, "latent": None}


class LatentProjection(ReplacedLinear):
    """Linear layer that computes keys or values from the latent, and all other channels by `rest`.

    `down` computes the latent. If keys and values have one layer each, only the layer of the keys has `down`.
    """

    down: nn.Linear

    def __init__(
        self, state: LatentState, down: nn.Linear | None, up: nn.Linear, rest: nn.Linear | None, runs: Runs
    ) -> None:
        super().__init__()
        self.state, self.runs = state, runs  # `runs` puts the channels of [rest, up] in order
        self.up = up
        if down is not None:
            self.down = down
        self.rest = rest
        self.set_guard()

    def forward(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... O"]:
        """Return all channels in the order of the linear layer that was replaced."""
        read = self.up(self.state.encode(tokens))
        if self.rest is None:
            return read
        joined = torch.cat([self.rest(tokens), read], -1)
        return torch.cat([joined.narrow(-1, first, count) for first, count in self.runs], -1)


class LatentCache(DynamicLayer):
    """Cache layer with latents (B, 1, S, r) in `keys` and positions (B, 1, S, 1 or 0) in `values`.

    Positions are stored if keys are rotated. With these shapes, beam search, cropping and copying of
    `DynamicLayer` work. `update` returns full keys and values.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, state: LatentState) -> None:
        super().__init__()
        self.state = state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create empty tensors with the dtype, device and batch of the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, layer = key_states.shape[0], self.state.layer
        self.keys = key_states.new_empty(batch, 1, 0, layer.rank)
        self.values = torch.empty(batch, 1, 0, int(bool(layer.rotary)), dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "LatentCache":
        """Return a copy with its own tensors, so that a cached prompt can be continued several times."""
        other = copy.copy(self)
        memo[id(self)] = other
        if self.is_initialized:
            other.keys, other.values = self.keys.clone(), self.values.clone()
        return other

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the latents of new tokens, and return the keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        new = self.state.latent
        if new is None:  # another model runs and uses the cache of this model
            raise CompressionError(
                "the cache",
                expected="a cache that this model filled",
                got="latents of another model, or of a copy of it",
                fix="Use one cache per model.",
            )
        old, places = self.keys[:, 0], self.values[:, 0]
        positions = self.values.new_empty(batch, tokens, 0)
        if self.state.layer.rotary:
            assert self.state.positions is not None, "a rotated layer was found to receive positions"
            positions = self.state.positions.to(self.values).expand(batch, tokens)[..., None]
        self.keys = torch.cat([self.keys, new.to(self.dtype)[:, None]], dim=-2)
        self.values = torch.cat([self.values, positions[:, None]], dim=-2)
        if not old.shape[1]:
            return key_states, value_states
        keys, values = self.state.decode(old, places[..., 0] if places.shape[-1] else None)
        keys = torch.cat([keys.to(key_states.dtype), key_states], dim=-2)
        return keys, torch.cat([values.to(value_states.dtype), value_states], dim=-2)


def build(model: nn.Module, layer: LatentLayer) -> Change:
    """Return the change that a record describes. The weights of `down` and `up` are zero at first."""
    norm = find_module(model, layer.path(layer.norm)) if layer.norm else None
    state = LatentState(layer, norm, find_module(model, layer.rotary) if layer.rotary else None)
    modules: dict[str, nn.Module] = {}
    for name, channels in layer.projections:
        projection = _projection(find_module(model, name), name, state, channels, owns=not modules)
        state.key, state.value = getattr(state, "key", projection), projection
        modules[name] = projection
    # Register this hook first: the hook for narrow keys must find the cache layer already replaced.
    before = AddedHook(layer.module, "before", state.begin_call, prepend=True)
    after = AddedHook(layer.module, "after", state.end_call)
    return Change(model, modules, {layer.module: {RECORD: layer}}, [before, after])


def _projection(
    module: nn.Module, name: str, state: LatentState, channels: list[int], owns: bool
) -> LatentProjection:
    expected = f"a linear layer with at least {max(channels) + 1} channels"
    weight, bias = weights_of(name, module, expected, lambda size: size[0] > max(channels))
    (outputs, inputs), rank = weight.shape, state.layer.rank
    down = linear_of(weight.new_zeros(rank, inputs), None) if owns else None
    up = linear_of(weight.new_zeros(outputs, rank), bias, channels)
    others = sorted(set(range(outputs)) - set(channels))
    rest = linear_of(weight, bias, others) if others else None
    place = {channel: index for index, channel in enumerate(others + channels)}
    runs = runs_of([place[channel] for channel in range(outputs)])
    projection = LatentProjection(state, down, up, rest, runs)
    projection.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))
    return projection.train(module.training)


def latent_change(
    model: nn.Module, layers: Sequence[LatentLayer], factors: Sequence[tuple[Tensor, Tensor]]
) -> Change:
    """Return one change for all layers from factors `down` (r, D) and `up` (N, r).

    The rows of `up` for keys come before the rows for values.
    """
    change = Change(model)
    for layer, (down, up) in zip(layers, factors, strict=True):
        added = build(model, layer.model_copy(update={"rank": down.shape[0]}))
        projections: list[Any] = list(added.modules.values())
        sizes = [len(channels) for _, channels in layer.projections]
        with torch.no_grad():
            projections[0].down.weight.copy_(down)
            for projection, rows in zip(projections, up.split(sizes), strict=True):
                projection.up.weight.copy_(rows)
        change.modules |= added.modules
        change.attributes |= added.attributes
        change.hooks += added.hooks
    return change
