"""Modules that compute keys and values from one latent per token, and caches that keep the latents."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import BaseModel, Field
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rankwise._internals.batches import map_tensors
from rankwise._internals.forward import AddedHook, Change
from rankwise._internals.rotary import PAIRINGS, RopeLayout, apply_rope, per_pair
from rankwise._internals.torch_private import in_function_mode
from rankwise.compression.records import KEPT_KEY_BYTES
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
BLOCK = 2**17
"""Numbers of the keys that are decoded at once, so that they stay in the cache of a processor."""
SHAPES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")), Tensor.size, Tensor.dim
}  # fmt: skip
"""Functions that `Undecoded` answers without decoding."""


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
    kept_bytes = KEPT_KEY_BYTES
    """Bytes of decoded keys that each cache of this layer keeps at most."""

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

    def decode_keys(
        self, latent: Float[Tensor, "B S r"], positions: Int[Tensor, "B S"] | None
    ) -> Float[Tensor, "B G S K"]:
        """Return keys, normalized and rotated to their positions."""
        layer = self.layer
        flat = self._expand(self.key.up, latent, slice(0, _size(layer.key_channels)))
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
        return keys * layer.key_factor if layer.key_factor != 1 else keys

    def decode_values(self, latent: Float[Tensor, "B S r"]) -> Float[Tensor, "B G S V"]:
        """Return values, which are linear in the latent up to their bias."""
        layer = self.layer
        first = _size(layer.key_channels) if layer.key == layer.value else 0
        flat = self._expand(self.value.up, latent, slice(first, None))
        values = flat.unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        return values * layer.value_factor if layer.value_factor != 1 else values

    def absorb(
        self, rows: Float[Tensor, "B G N K"]
    ) -> tuple[Float[Tensor, "B G N r"], Float[Tensor, "B G N 1"] | float] | None:
        """Return queries that read latents in place of keys, and the logits of the keys' bias.

        Return None if keys are normalized, rotated or narrow, or if an adapter changes them.
        """
        layer, up = self.layer, self.key.up
        if self.norm is not None or self.rotary is not None or layer.key_width or type(up) is not nn.Linear:
            return None
        parts = [up.weight] if up.bias is None else [up.weight, up.bias[:, None]]
        heads = (part[: _size(layer.key_channels)].unflatten(0, (layer.heads, -1)) for part in parts)
        reads = [rows @ head.to(rows) * layer.key_factor for head in heads]
        return reads[0], reads[1] if len(reads) > 1 else 0.0

    def _expand(self, up: nn.Module, latent: Float[Tensor, "B S r"], rows: slice) -> Float[Tensor, "B S N"]:
        """Return some outputs of `up`, which may also compute others, or be wrapped by an adapter."""
        if self.layer.key == self.layer.value and type(up) is nn.Linear:
            return F.linear(latent, up.weight[rows], None if up.bias is None else up.bias[rows])
        expanded: Tensor = up(latent)
        return expanded[..., rows]

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


class Undecoded(Tensor):
    """Keys or values (B, G, S, N) in a cache, without memory until an operation reads them.

    Fused attention of few queries reads latents. Any other operation reads decoded keys and values.
    """

    cache: "LatentCache"
    decode: Callable[[], Tensor]

    @staticmethod
    def of(cache: "LatentCache", new: Tensor, decode: Callable[[], Tensor]) -> "Undecoded":
        """Return the keys or values of all tokens, which `decode` computes. `new` has new tokens alone."""
        shape = (*new.shape[:2], cache.keys.shape[2], new.shape[3])
        tensor = new.new_full((), math.nan).expand(shape).as_subclass(Undecoded)
        tensor.cache, tensor.decode = cache, decode
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run attention on latents, and any other operation on decoded keys and values."""
        kwargs = kwargs or {}
        if func in SHAPES:
            return super().__torch_function__(func, types, args, kwargs)
        if func is F.scaled_dot_product_attention and (mixed := attend(*args, **kwargs)) is not None:
            return mixed

        def decoded(tensor: Tensor) -> Tensor:
            return tensor.decode() if isinstance(tensor, Undecoded) else tensor

        return func(*map_tensors(args, decoded), **map_tensors(kwargs, decoded))


def attend(
    query: Float[Tensor, "B H Q K"], key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Float[Tensor, "B H Q V"] | None:  # fmt: skip
    """Return softmax(q kᵀ) v: keys are decoded in blocks, values after attention mixed the latents.

    Return None if this is not possible, or if decoded values are cheaper because there are many queries.
    """
    both = isinstance(key, Undecoded) and isinstance(value, Undecoded) and key.cache is value.cache
    many = query.shape[1] * query.shape[2] > value.shape[1] * value.shape[3]
    if not both or many or dropout_p or is_causal:
        return None
    cache: LatentCache = key.cache  # type: ignore[attr-defined]
    heads, wide = cache.state.layer.heads, torch.promote_types(query.dtype, torch.float32)
    rows = query.reshape(len(query), heads, -1, query.shape[-1]).to(wide)
    rows = rows * (query.shape[-1] ** -0.5 if scale is None else scale)
    latent, kept, count = cache.keys, cache.kept.shape[2], key.shape[2]
    blocks = [rows @ cache.kept.to(wide).mT]
    absorbed = cache.state.absorb(rows) if kept < count else None
    size = max(32, BLOCK // max(1, key.shape[0] * key.shape[1] * key.shape[3]))
    for first in range(kept, count, size):
        last = min(count, first + size)
        if absorbed is None:
            blocks.append(rows @ cache.decode_keys(first, last).to(wide).mT)
        else:
            blocks.append(absorbed[0] @ latent[:, :, first:last].to(wide).mT + absorbed[1])
    logits = (torch.cat(blocks, -1) if len(blocks) > 1 else blocks[0]).view(*query.shape[:3], count)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, torch.finfo(wide).min)
    elif attn_mask is not None:
        logits = logits + attn_mask
    mixed = logits.softmax(-1).to(latent.dtype).flatten(1, 2) @ latent[:, 0]
    values = cache.state.decode_values(mixed).unflatten(2, (heads, -1))  # by the map of each head
    return values.diagonal(dim1=1, dim2=2).movedim(-1, 1).reshape(*query.shape[:3], -1).to(query.dtype)


class Reserve:
    """Memory of tokens (…, S, C) that are appended call by call, with room for a sixteenth more."""

    memory: Tensor
    last: Tensor | None = None

    def append(self, old: Tensor, new: Tensor) -> Tensor:
        """Return old and new tokens. Old tokens are copied unless the last call returned them.

        So nothing is overwritten that another cache, a cropped cache or a gradient reads.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.cat([old, new], -2)
        count, total = old.shape[-2], old.shape[-2] + new.shape[-2]
        usable = self.last is old and (torch.is_inference_mode_enabled() or not old.is_inference())
        if not usable or self.memory.shape[-2] < total:
            self.memory = new.new_empty(*new.shape[:-2], total + total // 16, new.shape[-1])
            self.memory[..., :count, :] = old
        self.memory[..., count:total, :] = new
        self.last = self.memory[..., :total, :]
        return self.last


class LatentCache(DynamicLayer):
    """Cache layer with latents (B, 1, S, r) in `keys` and positions (B, 1, S, 1 or 0) in `values`.

    Positions are stored if keys are rotated. With these shapes, beam search, cropping and copying of
    `DynamicLayer` work. `update` returns keys and values that are decoded if they are read. The keys of the
    first tokens are kept, up to `kept_bytes` of the state.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, state: LatentState) -> None:
        super().__init__()
        self.state, self.latents, self.rotated = state, Reserve(), Reserve()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create empty tensors with the dtype, device and batch of the first keys."""
        super().lazy_initialization(key_states, value_states)
        batch, layer = key_states.shape[0], self.state.layer
        self.keys = key_states.new_empty(batch, 1, 0, layer.rank)
        self.values = torch.empty(batch, 1, 0, int(bool(layer.rotary)), dtype=torch.int32, device=self.device)
        self.kept, self.kept_for = torch.empty_like(key_states[:, :, :0]), self.keys

    def decode_keys(self, first: int = 0, last: int | None = None) -> Float[Tensor, "B G _ K"]:
        """Return the keys of some tokens."""
        positions = self.values[:, 0, first:last, 0] if self.state.layer.rotary else None
        return self.state.decode_keys(self.keys[:, 0, first:last], positions).to(self.dtype)

    def whole_keys(self) -> Float[Tensor, "B G S K"]:
        """Return the keys of all tokens."""
        return torch.cat([self.kept, self.decode_keys(self.kept.shape[2])], -2)

    def whole_values(self) -> Float[Tensor, "B G S V"]:
        """Return the values of all tokens."""
        return self.state.decode_values(self.keys[:, 0]).to(self.dtype)

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
        old, current = self.keys.shape[2], self.kept_for is self.keys
        positions = self.values.new_empty(batch, tokens, 0)
        if self.state.layer.rotary:
            assert self.state.positions is not None, "a rotated layer was found to receive positions"
            positions = self.state.positions.to(self.values).expand(batch, tokens)[..., None]
        self.keys = self.latents.append(self.keys, new.to(self.dtype)[:, None])
        self.values = torch.cat([self.values, positions[:, None]], dim=-2)
        most = self.state.kept_bytes // max(1, key_states[:, :, :1].nbytes)
        if not current:  # tokens or sequences were removed, or changed their places
            self.kept = self.decode_keys(0, min(old, most))
        if self.kept.shape[2] < most:
            self.kept = self.rotated.append(self.kept, key_states[:, :, : most - self.kept.shape[2]])
        self.kept_for = self.keys
        if not old:
            return key_states, value_states
        now = copy.copy(self)
        # a mode or another class of tensors may read tensors that are not decoded
        if torch.compiler.is_compiling() or in_function_mode() or type(key_states) is not Tensor:
            return now.whole_keys(), now.whole_values()
        return (
            Undecoded.of(now, key_states, now.whole_keys),
            Undecoded.of(now, value_states, now.whole_values),
        )


def _size(runs: Runs) -> int:
    return sum(count for _, count in runs)


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
    model: nn.Module,
    layers: Sequence[LatentLayer],
    factors: Sequence[tuple[Tensor, Tensor]],
    kept_bytes: int = KEPT_KEY_BYTES,
) -> Change:
    """Return one change for all layers from factors `down` (r, D) and `up` (N, r).

    The rows of `up` for keys come before the rows for values. Caches keep `kept_bytes` of keys per layer.
    """
    change = Change(model)
    for layer, (down, up) in zip(layers, factors, strict=True):
        added = build(model, layer.model_copy(update={"rank": down.shape[0]}))
        projections: list[Any] = list(added.modules.values())
        projections[0].state.kept_bytes = kept_bytes
        sizes = [len(channels) for _, channels in layer.projections]
        with torch.no_grad():
            projections[0].down.weight.copy_(down)
            for projection, rows in zip(projections, up.split(sizes), strict=True):
                projection.up.weight.copy_(rows)
        change.modules |= added.modules
        change.attributes |= added.attributes
        change.hooks += added.hooks
    return change
