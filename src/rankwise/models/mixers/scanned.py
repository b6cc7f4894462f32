"""What mixers share that apply their operator as it is, and how a state is a few sources more."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from rankwise.errors import InputError
from rankwise.models.mixers.base import Mixer, MixerOutput, MixerState, token_mask
from rankwise.operators import IndexedMixing, MixingOperator


class Mixing(NamedTuple):
    """What a call mixes with, what it mixes, and what it leaves behind.

    Args:
        operator: M, (B, H, T, S).
        values: V, (B, H, S, V).
        state: for the next call; None unless it was asked for.
    """

    operator: MixingOperator
    values: Tensor
    state: MixerState | None


class OperatorMixer(Mixer):
    """A mixer that forms its operator and applies it: ``out_proj(heads joined of operator @ values)``.

    A state goes in front of the tokens of a call as further sources, so that M and V of a call that goes on
    from a state are as exact as those of a first one: M is then (T, N + T), N the size of a state's feature
    axis.
    """

    out_proj: nn.Linear
    dropout: nn.Dropout

    @abstractmethod
    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> Mixing:
        """Operator, values and next state of one call."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixerOutput:
        """Mix; see `Mixer.forward`."""
        mask = token_mask(attention_mask, hidden_states)
        parts = self._mixing(hidden_states, mask, state, return_state and self.causal)
        mixed = (parts.operator @ parts.values).to(hidden_states.dtype)
        return MixerOutput(self.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2))), parts.state)

    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixingOperator:
        """M, not formed."""
        return self._mixing(hidden_states, token_mask(attention_mask, hidden_states), state, False).operator

    def values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """The values of a state, if there is one, and of the tokens of this call."""
        return self._mixing(hidden_states, token_mask(attention_mask, hidden_states), state, False).values


def only_causal(name: str, causal: bool) -> None:
    """Refuse a recurrence that is asked to look ahead.

    Raises:
        InputError: if it is.
    """
    if not causal:
        raise InputError(
            f"the mixer {name!r}",
            expected="causal=True",
            got="causal=False",
            fix="A recurrence runs forward only: set causal=True, or take linear, softmax or tssa.",
        )


def in_front(states: Float[Tensor, "*A N F"], tokens: Float[Tensor, "*B T F"]) -> Float[Tensor, "*C S F"]:
    """The tokens, after one source for each feature of a state."""
    lead = torch.broadcast_shapes(states.shape[:-2], tokens.shape[:-2])
    return torch.cat([states.to(tokens.dtype).expand(*lead, -1, -1), tokens], -2)


def rows_after(operator: MixingOperator, states: int) -> MixingOperator:
    """The rows of the tokens, without those of the state in front of them; every column."""
    rows, columns = (
        torch.ones(size, dtype=torch.bool, device=operator.device) for size in operator.shape[-2:]
    )
    rows[:states] = False
    return IndexedMixing(operator, rows, columns)


def decay_to_end(log_decay: Float[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Σ_{r > s} log a_r for every s: summed from the end, so that it is exact where decays are strong.

    Examples:
        >>> decay_to_end(torch.tensor([-9.0, -2.0, -1.0])).tolist()
        [-3.0, -1.0, 0.0]
    """
    later = torch.nn.functional.pad(log_decay[..., 1:], (0, 1))
    return later.flip(-1).cumsum(-1).flip(-1)
