"""What a replaced attention layer keeps in a cache of transformers: its mixer's state, no keys."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rankwise.errors import ReplacementError


class StateLayer(DynamicLayer):
    """A layer of a cache whose size does not grow with the tokens."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple[Tensor, ...] | None = None
        self.length = 0

    def count(self, tokens: Tensor) -> None:
        """Tokens that were read, padding included."""
        self.length += tokens.shape[1]
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """How many."""
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse keys: the model that fills a cache is the model that reads it."""
        raise _wrong("keys of softmax attention", "Read the text again with this model.")

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget: sums over tokens do not know their parts."""
        if tokens_to_remove:
            raise _wrong(f"a wish to forget {abs(tokens_to_remove)} tokens", "Read the text again.")

    def reset(self) -> None:
        """Empty."""
        self.state, self.length, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, for beam search."""
        self._rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row several times."""
        self._rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows."""
        self._rows(lambda tensor: tensor[indices])

    def offload(self) -> None:
        """Stay where it is: it is small."""

    def prefetch(self) -> None:
        """Stay where it is."""

    def _rows(self, change: Any) -> None:
        if self.state is not None:
            self.state = tuple(change(tensor) for tensor in self.state)


def _wrong(got: str, fix: str) -> ReplacementError:
    return ReplacementError(
        "the state of a replaced layer", expected="tokens in their order", got=got, fix=fix
    )
