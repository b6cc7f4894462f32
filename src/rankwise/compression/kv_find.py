"""Find attention layers whose cached keys and values are outputs of linear layers.

Between linear layer and cache, keys may pass a norm and a rotation by position. A latent is the vector per
token from which such a layer can compute its keys and values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from rankwise._internals.forward import Change, config_value, device_of, first_sequences, run_model, to_device
from rankwise._internals.linalg import as_float64
from rankwise._internals.rotary import PAIRINGS, fits_layout, per_pair, undo_rope
from rankwise.compression.kv_modules import LatentLayer, latent_change
from rankwise.compression.layers import Nearby, at_once_and_in_halves, keep_passing, not_linear
from rankwise.compression.qk_modules import NarrowKeys, NarrowProjection, channels_of, runs_of
from rankwise.errors import CompressionError
from rankwise.tracing import RecordedCall, record_calls
from rankwise.tracing.projections import Projection, find_projection, linear_parts

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary positions whose angles depend on the length of the text: cached keys would be outdated."""


def find_latent_layers(model: nn.Module, batch: Any) -> tuple[list[LatentLayer], dict[str, str]]:
    """Return the layers that a latent of full rank leaves unchanged, and why each other layer is left out."""
    return keep_passing(
        model,
        batch,
        find_cached_layers(model, batch),
        full_latents,
        "its outputs change when keys and values are read out of a full latent",
        expected="attention whose cached keys and values come from linear layers of the same tokens",
        fix="Remove `kv` from the parts; in Python, `rw.capture` shows which mixers the model has.",
        outputs=at_once_and_in_halves,
    )


# --- trial -----------------------------------------------------------------------------------------------


def full_latents(model: nn.Module, layers: list[LatentLayer], seed: int = 0) -> Change:
    """Return the trial change: latents of full rank in a random orthonormal basis."""
    generator = torch.Generator().manual_seed(seed)
    factors = []
    for layer in layers:
        weight = layer_weight(model, layer)
        size = min(weight.shape)
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=weight.dtype)).Q
        wide = weight.shape[1] > size
        factors.append((basis @ weight, basis.mT) if wide else (basis, weight @ basis.mT))
    return latent_change(model, layers, factors)


def layer_weight(model: nn.Module, layer: LatentLayer) -> Float64[Tensor, "N D"]:
    """Return the weight rows of the keys, then of the values."""
    rows = []
    for name, channels in layer.projections:
        parts = linear_parts(model.get_submodule(name))
        assert parts is not None
        rows.append(parts[0].detach()[channels])
    return torch.cat(rows).cpu().double()


# --- find ------------------------------------------------------------------------------------------------


@dataclass
class _Observed:
    """Inputs and outputs of modules in one forward pass with a cache."""

    attention: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    """Modules that received a cache: their index in the cache, and their keyword arguments."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Inputs and outputs, by module name, of all modules that map a tensor to a tensor."""
    rotations: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    """Modules that returned two tensors, such as cos and sin: name, tensors, text options of the call."""


def find_cached_layers(model: nn.Module, batch: Any) -> tuple[list[LatentLayer], dict[str, str]]:
    """Return records with latents of full rank, in cache order, and why each other layer is left out."""
    seen, cache = _run_with_cache(model, to_device(first_sequences(batch, 2), device_of(model)))
    found: dict[int, LatentLayer] = {}
    skipped: dict[str, str] = {}
    for name, (at, _) in seen.attention.items():
        layer = _layer(model, name, at, cache, seen)
        if isinstance(layer, str):
            skipped[name] = layer
        elif at in found:
            skipped[name] = f"it reads the cache of {found[at].module}"
        else:
            found[at] = layer
    return [layer for _, layer in sorted(found.items())], skipped


def _run_with_cache(model: nn.Module, batch: Any) -> tuple[_Observed, Any]:
    config, can = getattr(model, "config", None), getattr(model, "can_generate", None)
    if config_value(config, "is_encoder_decoder"):
        raise _no_cache(model, "an encoder-decoder, whose decoder caches two kinds of keys")
    if config is None or can is None or not can():
        raise _no_cache(model, "a model that does not generate: only a cache gains from a latent")
    if not isinstance(batch, Mapping):
        raise _no_cache(model, f"a {type(batch).__name__} as batch", "Pass a dict: `{'input_ids': ids}`.")
    with record_calls(model, lambda *_: True) as calls, torch.no_grad():
        out = run_model(model, {**batch, "use_cache": True})
    seen, cache = _observed(calls), getattr(out, "past_key_values", None)
    if not getattr(cache, "layers", None) or not seen.attention:
        raise _no_cache(model, "a model without such a cache, or without modules that get it by `layer_idx`")
    return seen, cache


def _no_cache(model: nn.Module, got: str, fix: str = "Remove `kv` from the parts.") -> CompressionError:
    expected = "a decoder that caches keys and values"
    return CompressionError(f"model {type(model).__name__}", expected=expected, got=got, fix=fix)


def _observed(calls: Iterable[RecordedCall]) -> _Observed:
    seen = _Observed()
    for call in calls:
        at, arguments = getattr(call.module, "layer_idx", None), (*call.kwargs.values(), *call.args)
        if isinstance(at, int) and any(hasattr(value, "get_seq_length") for value in arguments):
            seen.attention[call.name] = at, call.kwargs
        out = call.output
        if isinstance(out, Tensor) and call.args and isinstance(call.args[0], Tensor):
            seen.inputs[call.name], seen.outputs[call.name] = call.args[0], out
        elif isinstance(out, tuple) and len(out) == 2 and all(isinstance(part, Tensor) for part in out):
            options = {key: value for key, value in call.kwargs.items() if isinstance(value, str)}
            named = [value for value in call.args if isinstance(value, str)]
            seen.rotations.append((call.name, out, options | ({"layer_type": named[0]} if named else {})))
    innermost = [name for name in seen.attention if not any(_inside(other, name) for other in seen.attention)]
    seen.attention = {name: seen.attention[name] for name in innermost}
    return seen


def _inside(name: str, outer: str) -> bool:
    return name != outer and name.startswith(f"{outer}.")


def _layer(model: nn.Module, name: str, at: int, cache: Any, seen: _Observed) -> LatentLayer | str:
    """Return the record of a layer with a latent of full rank, or the reason why it cannot have a latent."""
    cached = cache.layers[at] if at < len(cache.layers) else None
    below = [module for module in seen.outputs if _inside(module, name)]
    if type(cached) not in (DynamicLayer, NarrowKeys):
        what = "a window of fixed length" if getattr(cached, "is_sliding", False) else type(cached).__name__
        return f"its cache is {what}, not all keys and values"
    keys, values = cached.keys, cached.values  # type: ignore[union-attr]
    keys = cached.whole() if isinstance(cached, NarrowKeys) else keys
    if keys is None or values is None:
        return "its cache is empty"
    linear = {module: seen.outputs[module] for module in below if _is_linear(model, module)}
    near = Nearby(model, name, linear, {own: seen.outputs[own] for own in below if own not in linear})
    value = find_projection(values, linear)
    if value is None:
        return near.reason("values", values)
    unrotated = _unrotated(model, name, keys, seen)
    if isinstance(unrotated, str):
        return unrotated
    candidates = [
        (error, order, key, norm | rotation)
        for order, (before, rotation) in enumerate(unrotated)
        for error, key, norm in _key_sources(before, name, linear, below, seen)
    ]
    if not candidates:
        return near.reason("keys", keys)
    _, _, key, fields = min(candidates, key=lambda candidate: candidate[:2])
    key_input, value_input = seen.inputs[key.module], seen.inputs[value.module]
    if key_input is not value_input and not torch.equal(key_input, value_input):
        return "its keys and its values are made from different tokens"
    key_name, key_channels, key_places = _computed_channels(model, key)
    value_name, value_channels, _ = _computed_channels(model, value)
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
        **fields,
    )


def _is_linear(model: nn.Module, name: str) -> bool:
    """Return True for a linear layer; True for the outer module of a narrow layer, which has all channels."""
    inside = isinstance(model.get_submodule(name.rpartition(".")[0]), NarrowProjection)
    module = model.get_submodule(name)
    return not inside and (isinstance(module, NarrowProjection) or not not_linear(model, name))


def _computed_channels(model: nn.Module, projection: Projection) -> tuple[str, list[int], list[int]]:
    """Return the linear layer that computes keys or values, its channels, and their places over heads."""
    channels = projection.channels.flatten().tolist()
    module = model.get_submodule(projection.module)
    if not isinstance(module, NarrowProjection):
        return projection.module, channels, list(range(len(channels)))
    narrow = {channel: own for own, channel in enumerate(channels_of(module.runs))}
    places = [place for place, channel in enumerate(channels) if channel in narrow]
    return f"{projection.module}.narrow", [narrow[channels[place]] for place in places], places


def _unrotated(
    model: nn.Module, name: str, keys: Tensor, seen: _Observed
) -> list[tuple[Tensor, dict[str, Any]]] | str:
    """Return candidates (unrotated keys, rotary fields of a `LatentLayer`), or why there are none."""
    arguments = seen.attention[name][1]
    received = arguments.get("position_embeddings")
    if received is None:
        return [(keys, {})]
    sources = [
        (module, options)
        for module, angles, options in seen.rotations
        if all(x is other or torch.equal(x, other) for x, other in zip(angles, received, strict=True))
    ]
    if not sources:
        return "no module gives the position embeddings it is given"
    rotary, options = sources[0]
    kind = getattr(model.get_submodule(rotary), "rope_type", "default")
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
            fields = {"rotary": rotary, "rotary_options": options, "rotation": layout}
            candidates.append((before, fields))
    return [*candidates, (keys, {})]


def _key_sources(
    keys: Tensor, name: str, linear: dict[str, Tensor], below: list[str], seen: _Observed
) -> list[tuple[float, Projection, dict[str, str]]]:
    """Return linear layers that unrotated keys may come from: error, projection and fields of a norm."""
    direct = _fit(keys, linear)
    sources: list[tuple[float, Projection, dict[str, str]]] = [] if direct is None else [(*direct, {})]
    batch, heads, tokens, width = keys.shape
    shapes: dict[Literal["flat", "tokens", "heads"], tuple[int, ...]] = {
        "flat": (batch, tokens, heads * width),
        "tokens": (batch, tokens, heads, width),
        "heads": (batch, heads, tokens, width),
    }
    for norm in below:
        before, after = seen.inputs[norm], seen.outputs[norm]
        axes = next((axes for axes, shape in shapes.items() if before.shape == after.shape == shape), None)
        if norm in linear or axes is None:
            continue
        if axes == "heads":
            before, after = before.transpose(1, 2), after.transpose(1, 2)
        # The keys are the output of the norm, and its input is the output of a linear layer.
        output = _fit(keys, {norm: after.reshape(shapes["flat"])})
        if output is None or output[1].factor != 1:
            continue
        source = _fit(before.reshape(shapes["tokens"]).transpose(1, 2), linear)
        if source is not None and source[1].factor == 1:
            own = norm.removeprefix(f"{name}.")
            sources.append((output[0], source[1], {"norm": own, "norm_axes": axes}))
    return sources


def _fit(heads: Tensor, outputs: dict[str, Tensor]) -> tuple[float, Projection] | None:
    """Return the error of the best fit and the projection that it found; None if no projection fits.

    The projection has a scalar factor, which is set to 1 if it differs from 1 only by rounding.
    """
    found = find_projection(heads, outputs)
    if found is None:
        return None
    if abs(found.factor - 1) < 8 * torch.finfo(heads.dtype).eps:
        found = replace(found, factor=1.0)
    output = outputs[found.module].reshape(-1, outputs[found.module].shape[-1])[:, found.channels]
    rows = heads.transpose(1, 2).reshape(output.shape)
    return float((as_float64(rows) - found.factor * as_float64(output)).norm()), found
