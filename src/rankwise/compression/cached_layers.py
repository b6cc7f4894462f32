"""The attention layers of a decoder, with the linear layers behind what their cache keeps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import device_of, first_sequences, run_model, to_device
from rankwise._internals.rotary import PAIRINGS, fits_layout, per_pair, undo_rope
from rankwise.compression.kv_modules import LatentLayer, LatentProjection
from rankwise.compression.narrow import NarrowProjection, runs_of
from rankwise.errors import CompressionError
from rankwise.tracing import RecordedCall, record_calls
from rankwise.tracing.projections import Projection, find_projection, linear_parts, names_below

LENGTHENED = ("dynamic", "longrope")
"""Rotations that turn by other angles when a text becomes long: keys would have to be rotated anew."""


@dataclass
class _Seen:
    """What one forward pass with a cache showed."""

    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keyword arguments of modules that were given a cache."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Where they keep it."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Of all modules that take a tensor and give a tensor."""
    rotations: dict[str, tuple[Any, dict[str, str]]] = field(default_factory=dict)
    """What modules that give two tensors gave, and with which options."""


def find_cached_layers(model: nn.Module, batch: Any) -> tuple[dict[int, LatentLayer], dict[str, str]]:
    """Find what makes the keys and values in the cache of each attention layer.

    Args:
        model: a decoder, in evaluation mode.
        batch: what it takes; a sequence or two of it are used.

    Returns:
        Layers at full rank, by their number in the cache; and the reason for each one that cannot be done.

    Raises:
        CompressionError: if the model keeps no cache of keys and values.
    """
    short = to_device(first_sequences(batch, 2), device_of(model))
    seen, cache = _run(model, short)
    found: dict[int, LatentLayer] = {}
    reasons: dict[str, str] = {}
    for name, at in seen.numbers.items():
        latent = _layer(model, name, at, cache, seen)
        if isinstance(latent, str):
            reasons[name] = latent
        elif at in found:
            reasons[name] = f"it reads the cache of {found[at].module}"
        else:
            found[at] = latent
    owners: dict[str, str] = {}
    for at, layer in list(found.items()):
        for own in {layer.path(layer.key), layer.path(layer.value)}:
            if owners.setdefault(own, layer.module) != layer.module:
                reasons[layer.module] = f"it shares {own!r} with {owners[own]}"
                found.pop(at, None)
    return found, reasons


def _run(model: nn.Module, batch: Any) -> tuple[_Seen, Any]:
    config, can = getattr(model, "config", None), getattr(model, "can_generate", None)
    if getattr(config, "is_encoder_decoder", False):
        raise _no_cache(model, "an encoder-decoder, whose decoder caches two kinds of keys")
    if config is None or can is None or not can() or not isinstance(batch, Mapping):
        raise _no_cache(model, "one that does not generate: a latent is won in the cache alone")
    with record_calls(model, lambda *_: True) as calls, torch.no_grad():
        out = run_model(model, {**batch, "use_cache": True})
    seen = _seen(calls)
    cache = getattr(out, "past_key_values", None)
    if not getattr(cache, "layers", None) or not seen.numbers:
        raise _no_cache(model, "one whose outputs hold no such cache")
    return seen, cache


def _no_cache(model: nn.Module, got: str) -> CompressionError:
    return CompressionError(
        f"model {type(model).__name__}",
        expected="a decoder that caches keys and values",
        got=got,
        fix="Leave `kv` out of the parts.",
    )


def _seen(calls: Iterable[RecordedCall]) -> _Seen:
    seen = _Seen()
    for call in calls:
        at, given = getattr(call.module, "layer_idx", None), (*call.kwargs.values(), *call.args)
        if isinstance(at, int) and any(hasattr(value, "get_seq_length") for value in given):
            seen.calls[call.name], seen.numbers[call.name] = call.kwargs, at
        out = call.output
        if isinstance(out, Tensor) and call.args and isinstance(call.args[0], Tensor):
            seen.inputs[call.name], seen.outputs[call.name] = call.args[0], out
        elif isinstance(out, tuple) and len(out) == 2 and all(isinstance(part, Tensor) for part in out):
            options = {key: value for key, value in call.kwargs.items() if isinstance(value, str)}
            named = [value for value in call.args if isinstance(value, str)]
            options |= {"layer_type": named[0]} if named else {}
            seen.rotations[f"{call.name}|{len(seen.rotations)}"] = (out, options)
    inner = [name for name in seen.numbers if not any(_inside(other, name) for other in seen.numbers)]
    seen.numbers = {name: seen.numbers[name] for name in inner}
    return seen


def _inside(name: str, outer: str) -> bool:
    return name != outer and name.startswith(f"{outer}.")


def _layer(model: nn.Module, name: str, at: int, cache: Any, seen: _Seen) -> LatentLayer | str:
    from transformers.cache_utils import DynamicLayer

    from rankwise.compression.narrow_keys import NarrowKeys

    kept = cache.layers[at] if at < len(cache.layers) else None
    below = [module for module in seen.outputs if _inside(module, name)]
    if any(isinstance(model.get_submodule(module), LatentProjection) for module in below):
        return "it has a latent already"
    if type(kept) not in (DynamicLayer, NarrowKeys):
        what = "a window of fixed length" if getattr(kept, "is_sliding", False) else type(kept).__name__
        return f"its cache is {what}, not all keys and values"
    keys, values = kept.keys, kept.values  # type: ignore[union-attr]
    keys = kept.whole() if isinstance(kept, NarrowKeys) else keys
    if keys is None or values is None:
        return "it keeps nothing in the cache"
    if not bool(keys.isfinite().all() and values.isfinite().all()):
        return "its keys or values hold NaN or infinity"
    if keys.shape[1] != values.shape[1]:
        return "it has not as many heads of keys as of values"
    linear = {
        module: seen.outputs[module] for module in names_below(below, name) if _is_linear(model, module)
    }
    value = find_projection(values, linear)
    if value is None:
        return "its values are the output of no linear layer"
    unrotated = _unrotated(model, name, keys, seen)
    if isinstance(unrotated, str):
        return unrotated
    fitting = [
        (off, at, fields | rotation)
        for at, (before, rotation) in enumerate(unrotated)
        for off, fields in _keys(before, name, linear, below, seen)
    ]
    if not fitting:
        return (
            "its keys are no linear layer's output, nor such an output that went through a norm and "
            "through rotation by the position embeddings the layer is given"
        )
    fields = min(fitting, key=lambda fit: fit[:2])[2]
    key = fields.pop("projection")
    if seen.inputs[key.module] is not seen.inputs[value.module] and not torch.equal(
        seen.inputs[key.module], seen.inputs[value.module]
    ):
        return "its keys and its values are made from different tokens"
    key_side, value_side = _computed(model, key), _computed(model, value)
    short = len(name) + 1 if name else 0
    whole = len(key_side.places) == keys.shape[1] * keys.shape[3]
    return LatentLayer(
        module=name,
        key=key_side.module[short:],
        value=value_side.module[short:],
        heads=keys.shape[1],
        key_channels=runs_of(key_side.channels),
        value_channels=runs_of(value_side.channels),
        rank=min(seen.inputs[key.module].shape[-1], len(key_side.channels) + len(value_side.channels)),
        key_width=0 if whole else keys.shape[3],
        key_places=[] if whole else runs_of(key_side.places),
        key_factor=key.factor,
        value_factor=value.factor,
        **fields,
    )


def _is_linear(model: nn.Module, name: str) -> bool:
    """Whether a module is linear; of a narrowed one the whole, which gives zeros, too."""
    inside = isinstance(model.get_submodule(name.rpartition(".")[0]), NarrowProjection)
    module = model.get_submodule(name)
    return not inside and (isinstance(module, NarrowProjection) or linear_parts(module) is not None)


@dataclass(frozen=True)
class _Computed:
    """The linear layer that computes keys or values."""

    module: str
    channels: list[int]
    """Its channels, head by head."""
    places: list[int]
    """Where they go, counted over heads."""


def _computed(model: nn.Module, projection: Projection) -> _Computed:
    channels = projection.channels.flatten().tolist()
    module = model.get_submodule(projection.module)
    if not isinstance(module, NarrowProjection):
        return _Computed(projection.module, channels, list(range(len(channels))))
    at = {channel: own for own, channel in enumerate(module.channels.tolist())}
    places = [place for place, channel in enumerate(channels) if channel in at]
    return _Computed(f"{projection.module}.narrow", [at[channels[place]] for place in places], places)


def _unrotated(
    model: nn.Module, name: str, keys: Tensor, seen: _Seen
) -> list[tuple[Tensor, dict[str, Any]]] | str:
    """Keys as they may have been before rotation, each with how a `LatentLayer` says so."""
    given = seen.calls[name].get("position_embeddings")
    if given is None:
        return [(keys, {})]
    tables = [
        (module.partition("|")[0], options)
        for module, (gave, options) in seen.rotations.items()
        if all(x is other or torch.equal(x, other) for x, other in zip(gave, given, strict=True))
    ]
    if not tables:
        return "no module gives the position embeddings it is given"
    rotary, options = tables[0]
    kind = getattr(model.get_submodule(rotary), "rope_type", "default")
    kind = kind.get(options.get("layer_type")) if isinstance(kind, dict) else kind
    if kind in LENGTHENED:
        return f"its rotation ({kind}) changes with the length of the text, and old keys keep theirs"
    positions = seen.calls[name].get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return "it is not given the positions of its tokens, one number each"
    shape = given[0].shape
    if len(shape) != 3 or shape[-1] % 2 or shape[-1] > keys.shape[-1]:
        return f"its position embeddings have the unknown shape {tuple(shape)}"
    noted = {"rotary": rotary, "rotary_options": options}
    turned = []
    for way, pairing in PAIRINGS.items():
        if all(fits_layout(angles, way, keys.shape[-1]) for angles in given):
            cos, sin = (per_pair(angles, way)[:, None] for angles in given)
            before = undo_rope(keys, cos, sin, pairing).to(keys.dtype)
            turned.append((before, {**noted, "rotation": way}))
    return [*turned, (keys, {})]


def _keys(
    keys: Tensor, name: str, linear: dict[str, Tensor], below: list[str], seen: _Seen
) -> list[tuple[float, dict[str, Any]]]:
    """Where unrotated keys may come from: a linear layer, or one and a norm; with how far off each is."""
    direct = _fit(keys, linear)
    found: list[tuple[float, dict[str, Any]]] = []
    if direct is not None:
        found.append((direct[0], {"projection": direct[1]}))
    batch, heads, tokens, width = keys.shape
    shapes = {
        "flat": (batch, tokens, heads * width),
        "tokens": (batch, tokens, heads, width),
        "heads": (batch, heads, tokens, width),
    }
    for norm in below:
        given, gave = seen.inputs[norm], seen.outputs[norm]
        axes = next((order for order, shape in shapes.items() if given.shape == gave.shape == shape), None)
        if norm in linear or axes is None:
            continue
        if axes == "heads":
            given, gave = given.transpose(1, 2), gave.transpose(1, 2)
        # The norm is known by what it gives, the linear layer by what the norm is given.
        gives = _fit(keys, {norm: gave.reshape(shapes["flat"])})
        went = given.reshape(shapes["tokens"]).transpose(1, 2)
        before = None if gives is None or gives[1].factor != 1 else _fit(went, linear)
        if gives is not None and before is not None and before[1].factor == 1:
            short = len(name) + 1 if name else 0
            found.append((gives[0], {"projection": before[1], "norm": norm[short:], "norm_axes": axes}))
    return found


def _fit(heads: Tensor, outputs: dict[str, Tensor]) -> tuple[float, Projection] | None:
    """What `find_projection` finds, and how far off it is; a factor within rounding of 1 is 1."""
    found = find_projection(heads, outputs)
    if found is None:
        return None
    if abs(found.factor - 1) < 8 * torch.finfo(heads.dtype).eps:
        found = replace(found, factor=1.0)
    given = outputs[found.module].reshape(-1, outputs[found.module].shape[-1])[:, found.channels]
    rows = heads.transpose(1, 2).reshape(given.shape)
    return float((rows.double() - found.factor * given.double()).norm()), found
