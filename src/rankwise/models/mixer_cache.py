"""Decoding cache of a language model: the decoding state of the mixer of each layer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache

from rankwise.errors import InputError
from rankwise.models.mixers import MixerState


class MixerCache(Cache):
    """Decoding cache with the state of each layer's mixer, compatible with the class `Cache` of transformers.

    States of softmax layers grow with the number of tokens; states of all other mixers have constant size.
    Tensors are never modified in place, so a shallow copy of the list `states` is an independent copy.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[MixerState | None] = [None] * layers
        self.length = 0
        """Number of tokens so far, including padding."""
        self.counts: Tensor | None = None
        """Number of real tokens so far, per sequence. None if no call was made yet."""

    def advance(self, mask: Bool[Tensor, "B T"] | None, rows: int, tokens: int, device: torch.device) -> None:
        """Add the tokens of a call to `length`, and its real tokens to `counts`."""
        new = mask.sum(1) if mask is not None else torch.full((rows,), tokens, device=device)
        self.counts = new if self.counts is None else self.counts + new
        self.length += tokens

    def numel(self) -> int:
        """Return the total number of entries in all states of all sequences."""
        return sum(tensor.numel() for state in self.states if state is not None for tensor in state)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, including padding."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return −1, by which transformers means that the cache has no maximum length."""
        return -1

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"MixerCache(layers={len(self.states)}, length={self.length}, numel={self.numel()})"

    @property
    def is_croppable(self) -> bool:
        """False, because a token cannot be removed from a state that is a sum over tokens."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True if the cache contains at least one token."""
        return self.length > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "MixerCache":
        """Return a deep copy, detached from autograd, because torch cannot deep-copy non-leaf tensors."""
        memo[id(self)] = copied = copy.copy(self)
        copied._change(lambda tensor: tensor.detach().clone())
        return copied

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Reorder the sequences of all states, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Select the sequences ``indices`` of the batch, in the given order."""
        self._change(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch ``repeats`` times."""
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Remove all states, so that the next call begins a new text."""
        self.states = [None] * len(self.states)
        self.length, self.counts = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Raise InputError, because a token cannot be removed from a state that is a sum over tokens."""
        raise InputError(
            "`MixerCache.crop`",
            expected="no removal of tokens",
            got=str(tokens_to_remove),
            fix="A sum over tokens cannot be rolled back: keep a copy of the states instead.",
        )

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the cache by ``change(tensor)``."""
        self.states = [None if s is None else tuple(change(tensor) for tensor in s) for s in self.states]
        self.counts = None if self.counts is None else change(self.counts)
