"""Base class of token mixers (layers that mix tokens by a matrix M), and helpers for masks and heads."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from rankwise._internals.torch_private import values_known
from rankwise.errors import InputError, ShapeError, in_range, whole_number
from rankwise.operators import MixingOperator

MixerState = tuple[Tensor, ...]
"""Decoding state of a mixer: tensors with the batch as first axis, which are never modified in place."""


class MixerOutput(NamedTuple):
    """Output of a mixer, and the decoding state for the next call."""

    output: Float[Tensor, "B T D"]
    """Mixed tokens, which the block adds to its skip connection."""
    state: MixerState | None = None
    """Decoding state for the next call. None if it was not requested, or the mixer has no state."""


class MixingStep(NamedTuple):
    """Mixing operator, values and next decoding state of one call of a mixer.

    Args:
        operator: mixing matrix M, (B, H, T, S).
        values: values that M multiplies, (B, H, S, V).
        state: decoding state for the next call. None if it was not requested, or the mixer has no state.
    """

    operator: MixingOperator
    values: Float[Tensor, "B H S V"]
    state: MixerState | None


class Mixer(nn.Module, ABC):
    """Base class of token mixers, which compute ``dropout(out_proj(concatenated heads of M @ values))``.

    `mixing_operator` and `mixing_values` take the arguments of `forward`, so that a recorded call can be
    repeated. If a decoding state is passed, N more source tokens before the T tokens represent the state
    exactly, and M has the shape (T, N + T).
    All mixers take ``bias``, True for biases in projections, and ``dropout``, the dropout rate of the output.
    CONTRIBUTING says how to add a mixer.
    """

    causal: bool
    """True if a token reads only itself and earlier tokens. Only causal mixers have a decoding state."""
    output_projection = "out_proj"
    """Name of the submodule that maps the concatenated heads, (B, T, H V), to the output."""
    out_proj: nn.Linear
    dropout: nn.Dropout

    @abstractmethod
    def state_size(self, tokens: int) -> int:
        """Return the number of entries in the state of one sequence after ``tokens`` tokens."""

    @abstractmethod
    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> MixingStep:
        """Return the mixing operator, the values and the next decoding state of one call."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixerOutput:
        """Return the mixed tokens, (B, T, D), and the next decoding state if ``return_state`` is True.

        Args:
            hidden_states: tokens of this call.
            attention_mask: 1 (or true) for real tokens; by default all tokens are real. A masked token does
                not influence other tokens, and its own output has no meaning.
            state: decoding state that a call on the previous tokens returned.
            return_state: True to return the decoding state after the tokens of this call.
        """
        mask = token_mask(attention_mask, hidden_states)
        mixed, final = self._mix(hidden_states, mask, state, return_state)
        return MixerOutput(self.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2))), final)

    def _mix(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Float[Tensor, "B H T V"], MixerState | None]:
        """Return M @ values and the next state; mixers with a faster algorithm override this method."""
        operator, values, final = self._mixing(hidden_states, mask, state, return_state and self.causal)
        return (operator @ values).to(hidden_states.dtype), final

    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixingOperator:
        """Return the mixing matrix M that `forward` applies, (B, H, T, S), as an operator."""
        return self._mixing(hidden_states, token_mask(attention_mask, hidden_states), state, False).operator

    def mixing_values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """Return the values that M multiplies, (B, H, S, V); source tokens of a decoding state come first."""
        return self._mixing(hidden_states, token_mask(attention_mask, hidden_states), state, False).values

    def _add_output(self, width: int, hidden_size: int, bias: bool, dropout: float) -> None:
        """Create the output projection ``out_proj`` and ``dropout``."""
        self.out_proj = nn.Linear(width, hidden_size, bias=bias)
        self.dropout = nn.Dropout(in_range(f"{type(self).__name__} `dropout`", dropout, "[0, 1]"))


def split_heads(x: Float[Tensor, "B T D"], heads: int) -> Float[Tensor, "B H T K"]:
    """Return (B, T, H·K) as (B, H, T, K): the last axis is split into H heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def token_mask(
    attention_mask: Shaped[Tensor, "B T"] | None, hidden_states: Float[Tensor, "B T D"]
) -> Bool[Tensor, "B T"] | None:
    """Return the mask as booleans, or None without a mask; raise if it does not fit the tokens."""
    if attention_mask is None:
        return None
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            "`attention_mask`",
            expected=f"one value for each token, {tuple(hidden_states.shape[:2])}",
            got=f"{tuple(attention_mask.shape)}",
            fix="A mixer takes the mask of the tokens of this call; its state remembers earlier tokens.",
        )
    return as_bool_mask(attention_mask)


def as_bool_mask(attention_mask: Shaped[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return the mask as booleans; raise if a value is known (see `values_known`) and neither 0 nor 1.

    Examples:
        >>> as_bool_mask(torch.tensor([[0.0, 1.0]])).tolist()
        [[False, True]]
    """
    real = attention_mask.bool()
    checked = attention_mask.dtype != torch.bool and values_known(attention_mask)
    if checked and not torch.equal(real.to(attention_mask.dtype), attention_mask):
        other = attention_mask[real.to(attention_mask.dtype) != attention_mask]
        raise InputError(
            "`attention_mask`",
            expected="1 (or true) for real tokens and 0 for padding",
            got=f"{other[0].item()}",
            fix="A mask that is added to scores, 0 and -inf, is the other way round: pass (mask == 0).",
        )
    return real


def head_dim_of(subject: str, hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    """Return ``head_dim``; if it is None, return D / H, and raise if H does not divide D."""
    for name, size in {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}.items():
        if size is not None:
            whole_number(f"{subject} `{name}`", size)
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise InputError(
            f"{subject} heads",
            expected=f"a number that divides the width {hidden_size}",
            got=f"{num_heads}",
            fix="Choose other sizes, or pass head_dim.",
        )
    return hidden_size // num_heads
