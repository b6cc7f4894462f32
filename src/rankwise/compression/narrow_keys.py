"""A cache layer of transformers that keeps some channels of the keys; imported where there is a cache."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rankwise.compression.key_cache import kept_channels
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
        self.channels = kept_channels(self.runs, key_states.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, and give all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        heads, width = key_states.shape[1], key_states.shape[3]
        flat = key_states.transpose(1, 2).flatten(2).index_select(-1, self.channels)[:, None]
        self.keys = torch.cat([self.keys, flat], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        whole = self.keys.new_zeros(self.keys.shape[0], self.keys.shape[2], heads * width)
        whole.index_copy_(-1, self.channels, self.keys[:, 0])
        return whole.unflatten(-1, (heads, width)).transpose(1, 2), self.values
