"""Find attention layers whose cached keys and values are outputs of linear layers.

Between linear layer and cache, keys may pass a norm and a rotation by position. A latent is a short vector
per token from which an attention layer computes its keys and values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rankwise._internals.forward import Change
from rankwise._internals.rotary import PAIRINGS, fits_layout, per_pair, undo_rope
from rankwise.compression.kv_modules import LatentLayer, latent_change
from rankwise.compression.quantized_cache import is_decoder
from rankwise.compression.trials import NoLayersError, at_once_and_in_halves, keep_passing, same_outputs
from rankwise.compression.width_modules import NarrowKeys, NarrowProjection, channels_of, runs_of
from rankwise.tracing import RecordedCall
from rankwise.tracing.projections import (
    ObservedPass,
    Projection,
    find_projection,
    linear_parts,
    not_linear,
    observe,
)

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary positions whose angles depend on the length of the text: cached keys would be outdated."""


def find(model: nn.Module, batch: Any) -> tuple[list[LatentLayer], dict[str, str]]:
    """Return the layers that a latent of full rank leaves unchanged, and why each other layer is left out."""
    reason = "its outputs change when keys and values are read out of a full latent"
    return keep_passing(
        model,
        find_cached_layers(model, batch),
        same_outputs(model, batch, full_latents, reason, at_once_and_in_halves),
        "attention whose cached keys and values come from linear layers of the same tokens",
    )


# --- trial -----------------------------------------------------------------------------------------------


def full_latents(model: nn.Module, layers: list[LatentLayer], seed: int = 0) -> Change:
    """Return the trial change: latents of full rank in a random orthonormal basis, and no keys are kept."""
    generator = torch.Generator().manual_seed(seed)
    factors = []
    for layer in layers:
        weight = layer_weight(model, layer)
        size = min(weight.shape)
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=weight.dtype)).Q
        wide = weight.shape[1] > size
        factors.append((basis @ weight, basis.mT) if wide else (basis, weight @ basis.mT))
    return latent_change(model, layers, factors, kept_bytes=0)


def layer_weight(model: nn.Module, layer: LatentLayer) -> Float64[Tensor, "N D"]:
    """Return the weights of keys and values in float64: the rows for keys come before the rows for values."""
    rows = []
    for name, channels in layer.projections:
        parts = linear_parts(model.get_submodule(name))
        assert parts is not None
        rows.append(parts[0].detach()[channels])
    return torch.cat(rows).cpu().double()


# --- find ------------------------------------------------------------------------------------------------


def find_cached_layers(model: nn.Module, batch: Any) -> tuple[list[LatentLayer], dict[str, str]]:
    """Return the layers, in cache order, with latents of full rank, and why each other layer is left out."""
    seen, cache = _run_with_cache(model, batch)
    layers: dict[int, LatentLayer] = {}
    skipped: dict[str, str] = {}
    for name, index in _attention_layers(seen).items():
        layer = _layer(seen, name, index, cache)
        if isinstance(layer, str):
            skipped[name] = layer
        elif index in layers:
            skipped[name] = f"it reads the cache of {layers[index].module}"
        else:
            layers[index] = layer
    return [layer for _, layer in sorted(layers.items())], skipped


def _run_with_cache(model: nn.Module, batch: Any) -> tuple[ObservedPass, Any]:
    if not is_decoder(model):
        raise _no_cache(model, "an encoder-decoder, or a model that does not generate text")
    if not isinstance(batch, Mapping):
        raise _no_cache(model, f"a {type(batch).__name__} as batch", "Pass a dict: `{'input_ids': ids}`.")
    seen = observe(model, {**batch, "use_cache": True}, _is_linear)
    cache = getattr(seen.output, "past_key_values", None)
    if not getattr(cache, "layers", None) or not _attention_layers(seen):
        raise _no_cache(model, "a model without such a cache, or without modules that get it by `layer_idx`")
    return seen, cache


def _no_cache(model: nn.Module, got: str, fix: str = "") -> NoLayersError:
    expected = "a decoder that caches keys and values"
    return NoLayersError(f"model {type(model).__name__}", expected=expected, got=got, fix=fix)


def _attention_layers(seen: ObservedPass) -> dict[str, int]:
    """Return the innermost modules that received a cache, with their index in the cache."""
    layers: dict[str, int] = {}
    for name, calls in seen.calls.items():
        index = getattr(calls[-1].module, "layer_idx", None)
        arguments = (*calls[-1].kwargs.values(), *calls[-1].args)
        if isinstance(index, int) and any(hasattr(value, "get_seq_length") for value in arguments):
            layers[name] = index
    outer = {name for name in layers if any(other.startswith(f"{name}.") for other in layers)}
    return {name: index for name, index in layers.items() if name not in outer}


def _layer(seen: ObservedPass, name: str, index: int, cache: Any) -> LatentLayer | str:
    """Return the record of a layer with a latent of full rank, or the reason why it cannot have a latent."""
    cached = cache.layers[index] if index < len(cache.layers) else None
    if type(cached) not in (DynamicLayer, NarrowKeys):
        what = "a window of fixed length" if getattr(cached, "is_sliding", False) else type(cached).__name__
        return f"its cache is {what}, not all keys and values"
    keys, values = cached.keys, cached.values  # type: ignore[union-attr]
    keys = cached.whole() if isinstance(cached, NarrowKeys) else keys
    if keys is None or values is None:
        return "its cache is empty"
    near = seen.projections(name)
    value = find_projection(values, near.linear)
    if value is None:
        return near.reason("values", values)
    unrotated = _unrotated(seen, name, keys)
    if isinstance(unrotated, str):
        return unrotated
    candidates = [
        (error, order, key, rotation)
        for order, (before, rotation) in enumerate(unrotated)
        for error, key in near.sources(before)
    ]
    if not candidates:
        return near.reason("keys", keys)
    _, _, key, rotation = min(candidates, key=lambda candidate: candidate[:2])
    key_input, value_input = near.inputs[key.module], near.inputs[value.module]
    if key_input is not value_input and not torch.equal(key_input, value_input):
        return "its keys and its values are made from different tokens"
    key_name, key_channels, key_places = _computed_channels(seen.model, key)
    value_name, value_channels, _ = _computed_channels(seen.model, value)
    prefix = f"{name}." if name else ""
    narrow = len(key_places) < keys.shape[1] * keys.shape[3]
    return LatentLayer(
        module=name,
        key=key_name.removeprefix(prefix),
        value=value_name.removeprefix(prefix),
        heads=keys.shape[1],
        key_channels=runs_of(key_channels),
        value_channels=runs_of(value_channels),
        rank=min(key_input.shape[-1], len(key_channels) + len(value_channels)),
        key_width=keys.shape[3] if narrow else 0,
        key_places=runs_of(key_places) if narrow else [],
        key_factor=key.factor,
        value_factor=value.factor,
        norm=key.norm.removeprefix(prefix),
        norm_axes=key.norm_axes,
        **rotation,
    )


def _is_linear(model: nn.Module, name: str) -> bool:
    """Return True for a linear layer.

    A `NarrowProjection` counts as one linear layer, because its outer module returns all channels.
    """
    inside = isinstance(model.get_submodule(name.rpartition(".")[0]), NarrowProjection)
    module = model.get_submodule(name)
    return not inside and (isinstance(module, NarrowProjection) or not not_linear(model, name))


def _computed_channels(model: nn.Module, projection: Projection) -> tuple[str, list[int], list[int]]:
    """Return the layer that computes keys or values, its channels, and their positions counted over heads."""
    channels = projection.channels.flatten().tolist()
    module = model.get_submodule(projection.module)
    if not isinstance(module, NarrowProjection):
        return projection.module, channels, list(range(len(channels)))
    narrow = {channel: row for row, channel in enumerate(channels_of(module.runs))}
    places = [place for place, channel in enumerate(channels) if channel in narrow]
    return f"{projection.module}.narrow", [narrow[channels[place]] for place in places], places


def _unrotated(seen: ObservedPass, name: str, keys: Tensor) -> list[tuple[Tensor, dict[str, Any]]] | str:
    """Return candidates: unrotated keys, and the rotary fields of a `LatentLayer` for this rotation.

    Return the reason as text if a latent cannot work with the rotation.
    """
    arguments = seen.calls[name][-1].kwargs
    received = arguments.get("position_embeddings")
    if received is None:
        return [(keys, {})]
    source = next(
        (call for calls in seen.calls.values() for call in calls if _returned(call, received)), None
    )
    if source is None:
        return "no module gives the position embeddings it is given"
    # models with several rotations select one of them by a text argument
    options = {key: value for key, value in source.kwargs.items() if isinstance(value, str)}
    texts = [value for value in source.args if isinstance(value, str)]
    options |= {"layer_type": texts[0]} if texts else {}
    kind = getattr(source.module, "rope_type", "default")
    kind = kind.get(options.get("layer_type")) if isinstance(kind, dict) else kind
    if kind in LENGTH_DEPENDENT:
        return f"its rotation ({kind}) changes with the length of the text, and old keys keep theirs"
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return "it is not given the positions of its tokens, one number each"
    shape = received[0].shape
    if len(shape) != 3 or shape[-1] % 2 or shape[-1] > keys.shape[-1]:
        return f"its position embeddings have the unknown shape {tuple(shape)}"
    candidates: list[tuple[Tensor, dict[str, Any]]] = []
    for layout, pairing in PAIRINGS.items():
        if all(fits_layout(angles, layout, keys.shape[-1]) for angles in received):
            cos, sin = (per_pair(angles, layout)[:, None] for angles in received)
            before = undo_rope(keys, cos, sin, pairing).to(keys)
            fields = {"rotary": source.name, "rotary_options": options, "rotation": layout}
            candidates.append((before, fields))
    return [*candidates, (keys, {})]


def _returned(call: RecordedCall, angles: tuple[Tensor, Tensor]) -> bool:
    """Return True if a call returned these two tensors, such as cos and sin."""
    pair = isinstance(call.output, tuple) and len(call.output) == 2
    return pair and all(
        isinstance(x, Tensor) and (x is angle or torch.equal(x, angle))
        for x, angle in zip(call.output, angles, strict=True)
    )
