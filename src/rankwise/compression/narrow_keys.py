"""A cache layer of transformers that keeps some channels of the keys; imported where there is a cache."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rankwise.compression.key_cache import kept_channels, whole_keys
from rankwise.compression.narrow import Runs


class NarrowKeys(DynamicLayer):
    """Keys lie as (B, 1, S, ΣK_h) without the channels that are zero; `update` gives them in full.

    Args:
        runs: channels of the keys, counted over heads, that are not zero.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.runs = runs

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty tensors of the right dtype, device and batch."""
        super().lazy_initialization(key_states, value_states)
        self.heads, self.width = key_states.shape[1], key_states.shape[3]
        self.channels = kept_channels(self.runs, key_states.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, and give all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        flat = key_states.transpose(1, 2).flatten(2).index_select(-1, self.channels)[:, None]
        self.keys = torch.cat([self.keys, flat], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.whole(), self.values

    def whole(self) -> Float[Tensor, "B G S K"]:
        """Keys in full."""
        flat = whole_keys(self.keys[:, 0], self.channels, self.heads * self.width)
        return flat.unflatten(-1, (self.heads, self.width)).transpose(1, 2)
