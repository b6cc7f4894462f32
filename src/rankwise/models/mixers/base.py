"""The protocol of a mixer."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from rankwise.errors import ShapeError
from rankwise.operators import MixingOperator

MixerState = tuple[Tensor, ...]
"""What a mixer keeps for decoding: tensors whose first axis is the batch, never changed in place."""


class MixerOutput(NamedTuple):
    """What a mixer gives back.

    Args:
        output: (B, T, D), what the block adds to the skip.
        state: what the next call needs, None unless it was asked for.
    """

    output: Float[Tensor, "B T D"]
    state: MixerState | None = None


class Mixer(nn.Module, ABC):
    """The part of a block by which tokens meet: ``output = heads joined of (M V), projected``.

    All three methods below take the arguments of `forward`, so that whatever is called on the way through a
    model can be asked for its operator. To add a mixer: one file with a subclass, one line in
    `rankwise.models.mixers.MIXERS`.
    """

    causal: bool
    """Whether a token sees only itself and earlier ones; only then is there a state."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> "Mixer":
        """Build from a `rankwise.models.ToSTConfig`, and its ``mixer_options`` for this mixer."""

    @abstractmethod
    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixerOutput:
        """Mix the tokens.

        Args:
            hidden_states: the tokens of this call.
            attention_mask: true or 1 where a token of this call is real; all are, by default. A masked token
                has no influence on another, and what is put out in its place is not to be read.
            state: what an earlier call gave back, to go on from there.
            return_state: whether to give back a state.
        """

    @abstractmethod
    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixingOperator:
        """M, (B, H, T, S), as `forward` would use it."""

    @abstractmethod
    def values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """What M is applied to: their product, heads joined, is what is projected to the output."""

    @abstractmethod
    def state_size(self, tokens: int) -> int:
        """Numbers a state holds for one sequence, after that many tokens."""


def token_mask(
    attention_mask: Shaped[Tensor, "B T"] | None, hidden_states: Float[Tensor, "B T D"]
) -> Bool[Tensor, "B T"] | None:
    """The mask as booleans, checked against the tokens.

    Raises:
        ShapeError: if it is not one value for each token of this call.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            "`attention_mask`",
            wanted=f"one value for each token, {tuple(hidden_states.shape[:2])}",
            got=f"{tuple(attention_mask.shape)}",
            fix="A mixer takes the mask of the tokens of this call; its state remembers earlier ones.",
        )
    return attention_mask.bool()
