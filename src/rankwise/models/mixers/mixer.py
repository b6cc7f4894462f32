"""Base of token mixers: their interface, the mask of a call, sizes of heads."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from rankwise.errors import InputError, ShapeError, in_range, whole_number
from rankwise.operators import MixingOperator

MixerState = tuple[Tensor, ...]
"""Memory of a mixer for decoding: tensors whose first axis is the batch, never changed in place."""


class MixerOutput(NamedTuple):
    """Output of a mixer."""

    output: Float[Tensor, "B T D"]
    """Update that the block adds to its skip."""
    state: MixerState | None = None
    """Argument of the next call, None unless it was requested."""


class MixingStep(NamedTuple):
    """Operator and values of one call, and the state after it.

    Args:
        operator: M, (B, H, T, S).
        values: V, (B, H, S, V).
        state: state for the next call, None unless it was requested.
    """

    operator: MixingOperator
    values: Float[Tensor, "B H S V"]
    state: MixerState | None


class Mixer(nn.Module, ABC):
    """A token mixer: ``out_proj(joined heads of operator @ values)``, then dropout.

    `mixing_operator` and `values` take the arguments of `forward`, so that a captured call can be repeated.
    A state enters a call as sources in front of its tokens: M is then (T, N + T), and exact.
    To add a mixer: one file with a subclass, one line in `rankwise.models.mixers.MIXERS`.
    """

    causal: bool
    """Whether a token reads only itself and earlier tokens. Only causal mixers have a state."""
    output_projection = "out_proj"
    """Name of the submodule that reads the joined heads, (B, T, H V)."""
    out_proj: nn.Linear
    dropout: nn.Dropout

    @abstractmethod
    def state_size(self, tokens: int) -> int:
        """Return how many numbers the state of one sequence holds after `tokens` tokens."""

    @abstractmethod
    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> MixingStep:
        """Return operator, values and next state of one call."""

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
            hidden_states: tokens of this call.
            attention_mask: true or 1 for real tokens, all by default. A masked token does not influence
                other tokens, and its own output is meaningless.
            state: state that an earlier call returned, to continue from there.
            return_state: whether to return a state.
        """
        mask = token_mask(attention_mask, hidden_states)
        operator, values, state = self._mixing(hidden_states, mask, state, return_state and self.causal)
        return MixerOutput(self._project((operator @ values).to(hidden_states.dtype)), state)

    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixingOperator:
        """Return M, (B, H, T, S), as `forward` applies it."""
        return self._mixing(hidden_states, token_mask(attention_mask, hidden_states), state, False).operator

    def mixing_values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """Return the values that M is applied to; values of a state come first."""
        return self._mixing(hidden_states, token_mask(attention_mask, hidden_states), state, False).values

    def _add_output(self, width: int, hidden_size: int, bias: bool, dropout: float) -> None:
        """Create `out_proj` and `dropout`."""
        self.out_proj = nn.Linear(width, hidden_size, bias=bias)
        self.dropout = nn.Dropout(in_range(f"{type(self).__name__} `dropout`", dropout, "[0, 1]"))

    def _project(self, mixed: Float[Tensor, "B H T V"]) -> Float[Tensor, "B T D"]:
        """Return the output for the mixed values."""
        return self.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2)))


def split_heads(x: Float[Tensor, "B T D"], heads: int) -> Float[Tensor, "B H T K"]:
    """Return the heads that stand side by side in the last axis."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def token_mask(
    attention_mask: Shaped[Tensor, "B T"] | None, hidden_states: Float[Tensor, "B T D"]
) -> Bool[Tensor, "B T"] | None:
    """Return the mask as booleans; raise if it is not one value per token of this call."""
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
    """Return the mask as booleans; raise for values other than 0 and 1, except while compiling.

    Examples:
        >>> as_bool_mask(torch.tensor([[0.0, 1.0]])).tolist()
        [[False, True]]
    """
    real = attention_mask.bool()
    unchecked = attention_mask.dtype == torch.bool or torch.compiler.is_compiling()
    if not unchecked and not torch.equal(real.to(attention_mask.dtype), attention_mask):
        other = attention_mask[real.to(attention_mask.dtype) != attention_mask]
        raise InputError(
            "`attention_mask`",
            expected="1 (or true) for real tokens and 0 for padding",
            got=f"{other[0].item()}",
            fix="A mask that is added to scores, 0 and -inf, is the other way round: pass (mask == 0).",
        )
    return real


def head_dim_of(subject: str, hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    """Return the width of a head: `head_dim`, or `hidden_size` / `num_heads` if it is None."""
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
