"""Token Statistics Self-Attention as a module."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from rankwise.models.mixers.convolution import ShortConvolution
from rankwise.models.mixers.membership_scan import MembershipScan
from rankwise.models.mixers.scanned import in_front
from rankwise.operators import DiagonalMixing, MixingOperator
from rankwise.ops import TSSAOutput, TSSAState, tssa
from rankwise.ops.arguments import MEMBERSHIPS
from rankwise.ops.dispatch import IMPLEMENTATIONS


class Call(NamedTuple):
    """What a call comes to.

    Args:
        statistics: what TSSA gave.
        features: c and b of the scan, (B, T, H, F) each; None without a scan.
        past: its state before this call.
        inputs: the last inputs of the convolution; None without one.
    """

    statistics: TSSAOutput
    features: tuple[Tensor, Tensor] | None = None
    past: Tensor | None = None
    inputs: Tensor | None = None


class TokenStatisticsAttention(Mixer):
    """Self-attention without pairs of tokens: a token is scaled by its membership in each head.

    Formula: ``w = in_proj(x)`` in H heads of K channels; Π and m from `rankwise.ops.tssa`;
    ``output = out_proj(-Π w / (1 + m))``. As a mixing operator, M = diag(Π_h) and V = -w / (1 + m): tokens
    meet in the sums Π and m alone, so there is no map of token pairs to show. Two options that the release
    does not have move content: a short convolution of w, and a scan beside diag(Π_h), see `MembershipScan`.
    Cost: O(T D) beyond the two projections; the decoding state has 2 K + 1 numbers a head, whatever T, and
    F K more with a scan, and ``conv_tokens - 1`` for each of H (K + 2 F) channels with a convolution.
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
        conv_tokens: causal: reach of a convolution of w, of c and of b, each channel by itself, and SiLU; 0:
            none, as released.
        features: causal: F of a scan with memberships as steps, see `MembershipScan`; 0: none, as released.
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
        conv_tokens: int = 0,
        features: int = 0,
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
        _check_causal("conv_tokens", conv_tokens, causal)
        _check_causal("features", features, causal)
        self.in_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = make_dropout("TokenStatisticsAttention", dropout)
        shared = membership == "uniform"  # then no temperature changes anything
        self.temperature = None if shared else nn.Parameter(torch.empty(num_heads))
        positions = torch.empty(num_heads, max_positions) if max_positions else None
        self.position_bias = None if positions is None else nn.Parameter(positions)
        self.features_proj = (
            nn.Linear(hidden_size, 2 * num_heads * features, bias=False) if features else None
        )
        self.scan = MembershipScan(num_heads, features, half_life) if features else None
        self.channels = num_heads * (self.head_dim + 2 * features)
        self.convolution = ShortConvolution(self.channels, conv_tokens) if conv_tokens else None
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
        call = self._call(hidden_states, attention_mask, state)
        mixed, left = call.statistics.output, list(call.statistics.state or ())
        if call.inputs is not None:
            left.append(call.inputs)
        if self.scan is not None and call.features is not None:
            mixed, scanned = self.scan(mixed, *call.features, call.statistics.membership, call.past)
            left.append(scanned)
        output = self.dropout(self.out_proj(mixed.flatten(2)))
        return MixerOutput(output, tuple(left) if return_state and left else None)

    def projected(self, hidden_states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """The tokens w in the subspaces of the heads, before a convolution."""
        return self.in_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))

    def membership_of(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
    ) -> Float[Tensor, "B T H"]:
        """Π: how far each token belongs to each head; a token's memberships sum to 1, a masked one's to 0."""
        return self._call(hidden_states, attention_mask, state).statistics.membership

    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixingOperator:
        """diag(Π_h), one for each head; with a scan the sum of the two."""
        call = self._call(hidden_states, attention_mask, state)
        membership = call.statistics.membership
        if self.scan is None or call.features is None:
            return DiagonalMixing(membership.transpose(1, 2))
        return self.scan.operator(*call.features, membership, call.past)

    def values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """-w / (1 + m); 0 where Π is; the scan's state, if there is one, goes in front."""
        call = self._call(hidden_states, attention_mask, state)
        share = call.statistics.membership[..., None]
        values = torch.where(share > 0, call.statistics.output / share, 0.0).transpose(1, 2)
        return values if call.past is None else in_front(call.past, values)

    def state_size(self, tokens: int) -> int:
        """Sums of TSSA, the count of tokens, then of the options: the same for any ``tokens``."""
        statistics = self.num_heads * (2 * self.head_dim + 1) + 1
        reach = 0 if self.convolution is None else self.convolution.reach
        features = 0 if self.scan is None else self.scan.features
        return statistics + self.channels * reach + self.num_heads * features * self.head_dim

    def _call(self, hidden_states: Tensor, attention_mask: Tensor | None, state: MixerState | None) -> Call:
        mask = token_mask(attention_mask, hidden_states)
        sums, rest = (None, []) if state is None else (TSSAState(*state[:4]), list(state[4:]))
        read, inputs = self.in_proj(hidden_states), None
        if self.features_proj is not None:
            read = torch.cat([read, self.features_proj(hidden_states)], -1)
        if self.convolution is not None:
            read, inputs = self.convolution(read, mask, rest.pop(0) if rest else None)
        width = self.num_heads * self.head_dim
        w, features = read[..., :width].unflatten(-1, (self.num_heads, -1)), None
        if self.scan is not None:
            hidden = read[..., width:]
            hidden = hidden if mask is None else hidden.masked_fill(~mask[..., None], 0.0)  # NaN · 0 is NaN
            c, b = hidden.chunk(2, -1)
            features = (c.unflatten(-1, (self.num_heads, -1)), b.unflatten(-1, (self.num_heads, -1)))
        statistics = self._statistics(w, mask, sums)
        return Call(statistics, features, rest[0] if rest else None, inputs)

    def _statistics(self, w: Tensor, mask: Tensor | None, past: TSSAState | None) -> TSSAOutput:
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
            expected=f"one of {', '.join(known)}",
            got=repr(value),
            fix=did_you_mean(str(value), known),
        )


def _half_lives(half_life: Sequence[int | float | None], heads: int, causal: bool) -> tuple[float, ...]:
    """One for each head, None as infinity."""
    lives = tuple(math.inf if life is None else float(life) for life in half_life)
    if not causal or len(lives) != heads or not all(life > 0 for life in lives):
        raise InputError(
            "TokenStatisticsAttention `half_life`",
            expected=f"causal=True and numbers of tokens above 0, one for each of {heads} heads",
            got=f"causal={causal}, {list(half_life)}",
            fix="Make them with rankwise.ops.half_lives(heads), or leave half_life out.",
        )
    return lives


def _check_positions(max_positions: int, causal: bool, membership: str) -> None:
    if max_positions < 0 or (max_positions and not (causal and membership == "softmax")):
        raise InputError(
            "TokenStatisticsAttention `max_positions`",
            expected="0, or more with causal=True and softmax memberships",
            got=f"{max_positions}, causal={causal}, membership={membership!r}",
            fix="Leave max_positions out: there is no bias by position here.",
        )


def _check_causal(option: str, value: int, causal: bool) -> None:
    if value < 0 or (value and not causal):
        raise InputError(
            f"TokenStatisticsAttention `{option}`",
            expected="0, or more with causal=True",
            got=f"{value}, causal={causal}",
            fix=f"Leave {option} out: it reads tokens in their order.",
        )
