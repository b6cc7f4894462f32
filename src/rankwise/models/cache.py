"""What a language model remembers between two calls: the state of each layer's mixer."""

import copy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from rankwise.errors import InputError
from rankwise.models.mixers import MixerState


def positions(
    x: Float[Tensor, "B T D"], mask: Bool[Tensor, "B T"] | None, counts: Int[Tensor, " B"] | None
) -> Int[Tensor, "B T"]:
    """Where the tokens of a call stand among the real ones; 0 for padding ahead of them.

    Args:
        x: the tokens.
        mask: which are real; all where None.
        counts: real tokens before this call, by row; none where None.

    Examples:
        >>> import torch
        >>> positions(torch.zeros(1, 4, 2), torch.tensor([[False, True, True, True]]), None).tolist()
        [[0, 0, 1, 2]]
    """
    steps = torch.arange(x.shape[1], device=x.device)[None] if mask is None else mask.long().cumsum(1) - 1
    moved = steps if counts is None else counts[:, None] + steps
    return moved.clamp(min=0).expand(x.shape[:2])


class MixerCache(Cache):
    """The mixers' states, a state for each layer, in transformers' interface.

    Layers of TSSA and other mixers with a fixed state hold the same number of tensors' elements after any
    number of tokens; softmax layers grow. Nothing is changed in place, so a copy of the list of states is a
    copy of the cache.

    Args:
        layers: L.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[MixerState | None] = [None] * layers
        self.length = 0
        """Tokens seen, padding included."""
        self.counts: Tensor | None = None
        """Real tokens seen, by row."""

    def advance(self, mask: Bool[Tensor, "B T"] | None, rows: int, tokens: int, device: torch.device) -> None:
        """Count the tokens of this call."""
        new = mask.sum(1) if mask is not None else torch.full((rows,), tokens, device=device)
        self.counts = new if self.counts is None else self.counts + new
        self.length += tokens

    def numel(self) -> int:
        """Numbers held for all rows by all states."""
        return sum(tensor.numel() for state in self.states if state is not None for tensor in state)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no bound."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: no bound."""
        return -1

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"MixerCache(layers={len(self.states)}, length={self.length}, numel={self.numel()})"

    @property
    def is_compileable(self) -> bool:
        """No: states are replaced, not written to."""
        return False

    @property
    def is_croppable(self) -> bool:
        """No: a sum does not give its terms back."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a token has been seen."""
        return self.length > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "MixerCache":
        """A copy cut from the graph, which a copied tensor cannot keep."""
        memo[id(self)] = copied = copy.copy(self)
        copied._rows(lambda tensor: tensor.detach().clone())
        return copied

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Put the rows in another order, as beam search asks."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Keep some rows, in the order given."""
        self._rows(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Forget all."""
        self.states = [None] * len(self.states)
        self.length, self.counts = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible.

        Raises:
            InputError: always.
        """
        raise InputError(
            "`MixerCache.crop`",
            expected="no removal of tokens",
            got=str(tokens_to_remove),
            fix="A sum over tokens cannot be rolled back: keep a copy of the states instead.",
        )

    def _rows(self, change) -> None:  # type: ignore[no-untyped-def]
        self.states = [None if s is None else tuple(change(tensor) for tensor in s) for s in self.states]
        self.counts = None if self.counts is None else change(self.counts)
