"""What lets a cache keep the latent of an attention layer: hooks around it, and how keys are read again."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rankwise._internals.rotary import apply_rope
from rankwise._internals.torch_private import forward_pre_hooks
from rankwise.compression.key_cache import keep_in_cache, kept_channels, whole_keys
from rankwise.compression.latent import Latent, LatentLayer, LatentProjection, latent_modules
from rankwise.compression.narrow import put
from rankwise.compression.rotation import PAIRINGS, per_pair


class LatentReader:
    """Keys and values out of a latent, with the model's own norms and rotations.

    Args:
        layer: what the attention layer looks like.
        key: its projection of keys, or of keys and values.
        value: its projection of values; the same where they are fused.
        norm: what keys pass before rotation.
        rotary: what gives cosines and sines.
    """

    def __init__(
        self,
        layer: LatentLayer,
        key: LatentProjection,
        value: LatentProjection,
        norm: nn.Module | None,
        rotary: nn.Module | None,
    ) -> None:
        self.layer, self.key, self.value, self.norm, self.rotary = layer, key, value, norm, rotary
        self.places = kept_channels(layer.key_places, torch.device("cpu"))

    def read(
        self, latent: Float[Tensor, "B S r"], positions: Int[Tensor, "B S"] | None
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"]]:
        """Keys, rotated to their positions, and values.

        Args:
            latent: of tokens.
            positions: of the same tokens; None where positions are not rotated in.
        """
        layer = self.layer
        flat = self.key.up(latent)
        if layer.fused:
            count = sum(count for _, count in layer.key_channels)
            flat, values = flat[..., :count], flat[..., count:]
        else:
            values = self.value.up(latent)
        if layer.key_width:
            flat = whole_keys(flat, self.places.to(flat.device), layer.heads * layer.key_width)
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


class LatentHook:
    """Before an attention layer runs: an empty cache gets a layer that keeps latents.

    Args:
        reader: of the attention layer.
        latent: shared with its projections.
    """

    def __init__(self, reader: LatentReader, latent: Latent) -> None:
        self.reader, self.latent = reader, latent

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for a cache and positions among the arguments."""
        self.latent.open(kwargs.get("position_ids"))
        keep_in_cache(module, args, kwargs, self._cache_layer)

    def _cache_layer(self) -> Any:
        from rankwise.compression.latent_cache import LatentCache

        return LatentCache(self.reader, self.latent)


class CloseLatent:
    """After an attention layer ran: the latent of the call is let go.

    Args:
        latent: shared with its projections.
    """

    def __init__(self, latent: Latent) -> None:
        self.latent = latent

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Let it go."""
        self.latent.close()


def add_latent(model: nn.Module, layer: LatentLayer, modules: dict[str, nn.Module]) -> Callable[[], None]:
    """Put projections through a latent, and hooks for caches, into a model.

    The hook runs before any other: one that keeps narrow keys then finds its place in the cache taken.

    Args:
        model: the model.
        layer: what they were built for.
        modules: what `latent_modules` gave.

    Returns:
        What takes them out again.
    """
    before = {name: put(model, name, module) for name, module in modules.items()}
    projections = [module for module in modules.values() if isinstance(module, LatentProjection)]
    key, value = projections[0], projections[-1]
    norm = model.get_submodule(layer.below(layer.norm)) if layer.norm else None
    rotary = model.get_submodule(layer.rotary) if layer.rotary else None
    attention = model.get_submodule(layer.module)
    reader = LatentReader(layer, key, value, norm, rotary)
    handles = [
        attention.register_forward_pre_hook(LatentHook(reader, key.latent), prepend=True, with_kwargs=True),
        attention.register_forward_hook(CloseLatent(key.latent)),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for name, module in before.items():
            put(model, name, module)

    return remove


def build_latent(model: nn.Module, layer: LatentLayer) -> None:
    """Change a model whose weights are still to come.

    Args:
        model: the model.
        layer: what to build.
    """
    add_latent(model, layer, latent_modules(model, layer))


def latent_layers(model: nn.Module) -> list[LatentLayer]:
    """The attention layers of a model that have a latent.

    Args:
        model: the model.
    """
    found = []
    for name, module in model.named_modules():
        for hook in forward_pre_hooks(module):
            if isinstance(hook, LatentHook):
                found.append(hook.reader.layer.model_copy(update={"module": name}))
    return found


def positions_of(latent: Latent, batch: int, tokens: int, device: torch.device) -> Int[Tensor, "B S"]:
    """Positions of the tokens of the call that is under way, for each sequence.

    Args:
        latent: of the attention layer.
        batch: sequences.
        tokens: of each.
        device: where to.
    """
    assert latent.positions is not None, "the layer was found to be given positions"
    return latent.positions.to(device, torch.int32).expand(batch, tokens)
