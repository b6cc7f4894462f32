"""Token Statistics Self-Attention as a module."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rankwise.errors import InputError, did_you_mean
from rankwise.models.mixers.base import (
    Mixer,
    MixerOutput,
    MixerState,
    head_width,
    make_dropout,
    options_of,
    token_mask,
)
from rankwise.operators import DiagonalMixing
from rankwise.ops import TSSAOutput, TSSAState, tssa
from rankwise.ops.token_statistics.checks import MEMBERSHIPS
from rankwise.ops.token_statistics.dispatch import IMPLEMENTATIONS


class TokenStatisticsAttention(Mixer):
    """Self-attention without pairs of tokens: a token is scaled by its membership in each head.

    Formula: ``w = in_proj(x)`` in H heads of K channels; Π and m from `rankwise.ops.tssa`;
    ``output = out_proj(-Π w / (1 + m))``. As a mixing operator, M = diag(Π_h) and V = -w / (1 + m): tokens
    meet in the sums Π and m alone, so there is no map of token pairs to show.
    Cost: O(T D) beyond the two projections; the decoding state has 2 K + 1 numbers a head, whatever T.
    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction";
    the causal variant is the released language model's.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; D / H where None.
        causal: whether a token sees only itself and earlier ones: another function, not a masked one.
        bias: biases in the projections.
        max_positions: causal: tokens a learned bias by position is kept for, as released; 0: none.
        membership: ``softmax`` over the heads, or ``uniform``: 1 / H, and no temperature.
        half_life: causal: tokens after which a token counts half, for each head; None: no decay, None or
            `math.inf` in the place of one head: that head forgets nothing.
        dropout: rate on the output.
        impl: implementation of the operation, as for `rankwise.ops.tssa`.

    Raises:
        InputError: if a size, a rate or a name cannot be, or options contradict each other.

    Examples:
        >>> import torch
        >>> attention = TokenStatisticsAttention(16, 4, causal=True)
        >>> x = torch.randn(1, 5, 16)
        >>> whole = attention(x).output
        >>> first = attention(x[:, :3], return_state=True)
        >>> rest = attention(x[:, 3:], state=first.state)
        >>> torch.allclose(whole[:, 3:], rest.output, atol=1e-6), attention.state_size(1_000_000)
        (True, 37)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        causal: bool = False,
        bias: bool = True,
        max_positions: int = 0,
        membership: str = "softmax",
        half_life: Sequence[int | float | None] | None = None,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        _check_name("membership", membership, MEMBERSHIPS)
        _check_name("impl", impl, ("auto", *IMPLEMENTATIONS))
        self.num_heads, self.causal, self.membership, self.impl = num_heads, causal, membership, impl
        self.head_dim = head_width("TokenStatisticsAttention", hidden_size, num_heads, head_dim)
        self.half_life = None if half_life is None else _half_lives(half_life, num_heads, causal)
        _check_positions(max_positions, causal, membership)
        self.in_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = make_dropout("TokenStatisticsAttention", dropout)
        shared = membership == "uniform"  # then no temperature changes anything
        self.temperature = None if shared else nn.Parameter(torch.empty(num_heads))
        positions = torch.empty(num_heads, max_positions) if max_positions else None
        self.position_bias = None if positions is None else nn.Parameter(positions)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any) -> "TokenStatisticsAttention":
        """Build from a `rankwise.models.ToSTConfig`; ``mixer_options["tssa"]`` has the last word."""
        options = options_of(
            config,
            "tssa",
            head_dim=config.head_dim,
            max_positions=config.max_position_embeddings if config.position_bias else 0,
            membership=config.membership,
            half_life=config.half_life,
        )
        return cls(config.hidden_size, config.num_attention_heads, **options)

    def reset_parameters(self) -> None:
        """Temperatures of 1 and biases of 0, as released; the projections have their own."""
        if self.temperature is not None:
            nn.init.ones_(self.temperature)
        if self.position_bias is not None:
            nn.init.zeros_(self.position_bias)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixerOutput:
        """Attend; see `Mixer.forward`."""
        mixed = self._mix(hidden_states, attention_mask, state)
        output = self.dropout(self.out_proj(mixed.output.flatten(2)))
        return MixerOutput(output, tuple(mixed.state) if return_state and mixed.state is not None else None)

    def projected(self, hidden_states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """The tokens w in the subspaces of the heads."""
        return self.in_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))

    def membership_of(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
    ) -> Float[Tensor, "B T H"]:
        """Π: how far each token belongs to each head; a token's memberships sum to 1, a masked one's to 0."""
        return self._mix(hidden_states, attention_mask, state).membership

    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> DiagonalMixing:
        """diag(Π_h), one for each head."""
        return DiagonalMixing(self.membership_of(hidden_states, attention_mask, state).transpose(1, 2))

    def values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """-w / (1 + m); 0 where Π is."""
        mixed = self._mix(hidden_states, attention_mask, state)
        share = mixed.membership[..., None]
        return torch.where(share > 0, mixed.output / share, 0.0).transpose(1, 2)

    def state_size(self, tokens: int) -> int:
        """Two numbers a channel, one a head, and the count of tokens: the same for any ``tokens``."""
        return self.num_heads * (2 * self.head_dim + 1) + 1

    def _mix(
        self, hidden_states: Tensor, attention_mask: Tensor | None, state: MixerState | None
    ) -> TSSAOutput:
        mask = token_mask(attention_mask, hidden_states)
        past = None if state is None else TSSAState(*state)
        w = self.projected(hidden_states)
        temperature = w.new_ones(self.num_heads) if self.temperature is None else self.temperature
        decay = None
        if self.half_life is not None:
            decay = torch.tensor(self.half_life, dtype=torch.float64, device=w.device)
        return tssa(
            w, temperature, causal=self.causal, bias=self.position_bias, mask=mask, state=past,
            impl=self.impl, membership=self.membership, half_life=decay,
        )  # fmt: skip


def _check_name(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(
            f"TokenStatisticsAttention `{argument}`",
            wanted=f"one of {', '.join(known)}",
            got=repr(value),
            fix=did_you_mean(str(value), known),
        )


def _half_lives(half_life: Sequence[int | float | None], heads: int, causal: bool) -> tuple[float, ...]:
    """One for each head, None as infinity."""
    lives = tuple(math.inf if life is None else float(life) for life in half_life)
    if not causal or len(lives) != heads or not all(life > 0 for life in lives):
        raise InputError(
            "TokenStatisticsAttention `half_life`",
            wanted=f"causal=True and numbers of tokens above 0, one for each of {heads} heads",
            got=f"causal={causal}, {list(half_life)}",
            fix="Make them with rankwise.ops.half_lives(heads), or leave half_life out.",
        )
    return lives


def _check_positions(max_positions: int, causal: bool, membership: str) -> None:
    if max_positions < 0 or (max_positions and not (causal and membership == "softmax")):
        raise InputError(
            "TokenStatisticsAttention `max_positions`",
            wanted="0, or more with causal=True and softmax memberships",
            got=f"{max_positions}, causal={causal}, membership={membership!r}",
            fix="Leave max_positions out: there is no bias by position here.",
        )
