"""A cache layer of transformers that keeps latents; imported where there is a cache."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rankwise.compression.latent import Latent
from rankwise.compression.latent_hook import LatentReader, positions_of
from rankwise.errors import CompressionError


class LatentCache(DynamicLayer):
    """Latents lie in ``keys`` as (B, 1, S, r), positions in ``values`` as (B, 1, S, 1), or (B, 1, S, 0).

    That is how beams, crops and copies of `DynamicLayer` reach both. `update` gives keys and values in full.

    Args:
        reader: of the attention layer.
        latent: of the call that is under way.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, reader: LatentReader, latent: Latent) -> None:
        super().__init__()
        self.reader, self.latent = reader, latent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty tensors of the right dtype, device and batch."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, layer = key_states.shape[0], self.reader.layer
        self.keys = key_states.new_empty(batch, 1, 0, layer.rank)
        self.values = torch.empty(batch, 1, 0, int(bool(layer.rotary)), dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "LatentCache":
        """A copy of what is kept, read by the same modules: a prompt can be cached once and gone on from."""
        other = copy.copy(self)
        memo[id(self)] = other
        if self.is_initialized:
            other.keys, other.values = self.keys.clone(), self.values.clone()
        return other

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the latents of new tokens, and give keys and values of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        new = self.latent.value
        if new is None:  # the hook of another model's layer waits for tokens
            raise CompressionError(
                "the cache",
                expected="one that this model filled",
                got="latents of another model, or of a copy of it",
                fix="Give each model a cache of its own.",
            )
        old, places = self.keys[:, 0], self.values[:, 0]
        self.keys = torch.cat([self.keys, new.to(self.dtype)[:, None]], dim=-2)
        if self.values.shape[-1]:
            positions = positions_of(self.latent, batch, tokens, self.device)
            self.values = torch.cat([self.values, positions[:, None, :, None]], dim=-2)
        else:
            self.values = self.values.new_empty(batch, 1, self.keys.shape[2], 0)
        if not old.shape[1]:
            return key_states, value_states
        keys, values = self.reader.read(old, places[..., 0] if places.shape[-1] else None)
        keys = torch.cat([keys.to(key_states.dtype), key_states], dim=-2)
        return keys, torch.cat([values.to(value_states.dtype), value_states], dim=-2)
