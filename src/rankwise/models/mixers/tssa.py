"""Token Statistics Self-Attention (TSSA) as a mixer, and an optional state-space scan added to it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise._internals.linalg import float64_device
from rankwise.errors import InputError, one_of
from rankwise.models.mixers.mixer import (
    Mixer,
    MixerState,
    MixingStep,
    head_dim_of,
    split_heads,
    token_mask,
)
from rankwise.models.mixers.recurrent import (
    ShortConvolution,
    drop_state_rows,
    final_state,
    prepend_sources,
    with_state,
)
from rankwise.operators import DiagonalMixing, MixingOperator, SemiseparableMixing, SumMixing
from rankwise.operators.base import compute_dtype
from rankwise.ops import TSSAOutput, TSSAState, half_lives, tssa
from rankwise.ops.dispatch import IMPLEMENTATIONS

HalfLife = int | float | Sequence[int | float | None] | Float64[Tensor, " H"]
"""Half-life in tokens, one for all heads or one per head; None for a head whose sums do not decay."""


class TokenStatisticsAttention(Mixer):
    """Attention without token pairs: each token is scaled by its membership Π (weight) in each head.

    Formula: ``w = in_proj(x)`` in H heads of K channels; memberships Π and moments m from
    `rankwise.ops.tssa`; ``output = out_proj(-Π w / (1 + m))``. The mixing matrix is M = diag(Π_h), the values
    are -w / (1 + m). Tokens influence each other only through sums in Π and m, so there is no attention map.
    Two options that the released models do not have let tokens read other tokens directly: a short
    convolution of w, and a scan added to diag(Π_h), see `MembershipScan`.
    Cost: O(T D) in addition to the two projections. The size of the decoding state does not depend on T: per
    head 2 K + 1 numbers, and F K more with a scan; with a convolution, also ``conv_tokens - 1`` numbers for
    each of H (K + 2 F) channels.
    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction";
    the causal variant follows the released language models.

    Args:
        hidden_size: D, the model width.
        num_heads: H, the number of heads.
        head_dim: K, the head width; D / H by default.
        causal: True if each token reads only itself and earlier tokens; this changes the formula of TSSA.
        max_positions: number of positions with a learned bias, if causal; 0 for no bias.
        half_life: number of tokens after which a token counts half in the sums, per head, if causal. A head
            with None or `math.inf` does not decay. None for the whole argument means that no head decays.
        conv_tokens: number of tokens that a convolution of w, c and b reads, if causal; 0 for no
            convolution, as released.
        features: F, number of features of a `MembershipScan`, if causal; 0 for no scan, as released.
        impl: implementation of TSSA, as for `rankwise.ops.tssa`.

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
        half_life: HalfLife | None = None,
        conv_tokens: int = 0,
        features: int = 0,
        dropout: float = 0.0,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        one_of("TokenStatisticsAttention `impl`", impl, ("auto", *IMPLEMENTATIONS))
        self.num_heads, self.causal, self.impl = num_heads, causal, impl
        self.head_dim = head_dim_of("TokenStatisticsAttention", hidden_size, num_heads, head_dim)
        # Half-lives are a tuple and not a buffer, because `model.half()` would round a buffer.
        self.half_life = (
            None if half_life is None else check_half_life(type(self).__name__, half_life, num_heads, causal)
        )
        options = {"max_positions": max_positions, "conv_tokens": conv_tokens, "features": features}
        for option, value in options.items():
            if value < 0 or (value and not causal):
                raise InputError(
                    f"TokenStatisticsAttention `{option}`",
                    expected="0, or more with causal=True",
                    got=f"{value}, causal={causal}",
                    fix=f"Leave {option} out.",
                )
        self.in_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self._add_output(num_heads * self.head_dim, hidden_size, bias, dropout)
        self.temperature = nn.Parameter(torch.empty(num_heads))
        self.position_bias = nn.Parameter(torch.empty(num_heads, max_positions)) if max_positions else None
        self.features_proj = (
            nn.Linear(hidden_size, 2 * num_heads * features, bias=False) if features else None
        )
        self.scan = MembershipScan(num_heads, features, self.half_life) if features else None
        self.channels = num_heads * (self.head_dim + 2 * features)
        self.convolution = ShortConvolution(self.channels, conv_tokens) if conv_tokens else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set temperatures to 1 and position biases to 0, as in the released code."""
        nn.init.ones_(self.temperature)
        if self.position_bias is not None:
            nn.init.zeros_(self.position_bias)

    def state_size(self, tokens: int) -> int:
        """Return the number of entries in sums, token count, convolution state and scan state."""
        statistics = self.num_heads * (2 * self.head_dim + 1) + 1
        reach = 0 if self.convolution is None else self.convolution.reach
        features = 0 if self.scan is None else self.scan.features
        return statistics + self.channels * reach + self.num_heads * features * self.head_dim

    def _mix(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Float[Tensor, "B H T V"], MixerState | None]:
        """Return M @ values, computed by `rankwise.ops.tssa`, and the next decoding state."""
        call = self._run(hidden_states, mask, state)
        mixed, final = call.statistics.output.transpose(1, 2), [*(call.statistics.state or ()), *call.inputs]
        if self.scan is not None:
            mixed, scanned = self.scan(mixed, call.features, call.statistics.membership, call.past)
            final.append(scanned)
        return mixed, tuple(final) if return_state and final else None

    def mixing_projection(self, hidden_states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H K"]:
        """Return w, the projections of the tokens to the subspaces of the heads, before any convolution."""
        return self.in_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))

    def memberships(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
    ) -> Float[Tensor, "B T H"]:
        """Return memberships Π: weights of the heads at each token that sum to 1, or zeros at padding."""
        call = self._run(hidden_states, token_mask(attention_mask, hidden_states), state)
        return call.statistics.membership

    def _mixing(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> MixingStep:
        call = self._run(hidden_states, mask, state)
        share = call.statistics.membership[..., None]
        values = torch.where(share > 0, call.statistics.output / share, 0.0).transpose(1, 2)
        if self.scan is None:
            return MixingStep(DiagonalMixing(call.statistics.membership.transpose(1, 2)), values, None)
        operator = self.scan.operator(call.features, call.statistics.membership, call.past)
        return MixingStep(operator, values if call.past is None else prepend_sources(call.past, values), None)

    def _run(self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None) -> "_Call":
        sums, rest = (None, []) if state is None else (TSSAState(*state[:4]), list(state[4:]))
        projected, inputs = self.in_proj(hidden_states), []
        if self.features_proj is not None:
            projected = torch.cat([projected, self.features_proj(hidden_states)], -1)
        if self.convolution is not None:
            projected, last = self.convolution(projected, mask, rest.pop(0) if rest else None)
            inputs.append(last)
        width = self.num_heads * self.head_dim
        w, features = projected[..., :width].unflatten(-1, (self.num_heads, -1)), projected[..., width:]
        if mask is not None:
            features = features.masked_fill(~mask[..., None], 0.0)  # not a product, because 0 · NaN = NaN
        decay = None
        if self.half_life is not None:
            decay = torch.tensor(self.half_life, dtype=torch.float64, device=float64_device(w.device))
        statistics = tssa(
            w, self.temperature, self.causal, self.position_bias, mask, sums, self.impl, half_life=decay
        )
        return _Call(statistics, features, rest[0] if rest else None, inputs)


class _Call(NamedTuple):
    """Intermediate results of one forward pass of `TokenStatisticsAttention`.

    Args:
        statistics: result of `rankwise.ops.tssa`.
        features: c and b of the scan, (B, T, 2 H F); empty if there is no scan.
        past: state of the scan before this call; None on the first call and without a scan.
        inputs: last inputs of the convolution; empty if there is no convolution.
    """

    statistics: TSSAOutput
    features: Tensor
    past: Tensor | None
    inputs: list[Tensor]


class MembershipScan(nn.Module):
    """State-space scan that adds a semiseparable matrix to TSSA's diagonal mixing matrix of memberships Π.

    Formula: ``M_h[t, u] = δ_tu Π_u + c_t·b_u exp(-a_h Σ_{u < r ≤ t} Π_r) Π_u`` for u ≤ t, applied to the
    values ``-w_u / (1 + m_u)``. c and b are unit vectors of F features per head, so c_t·b_u is a cosine. The
    added matrix is Mamba-2's with steps Π_r, so the state of a head decays only at tokens of that head. A
    masked token has Π = 0: it adds nothing, and the state does not decay. The rate a_h > 0 is learned.
    Cost: O(T F K) per head; the state has F K numbers per head, independent of T.
    Source: this package; the scan algorithm follows T. Dao and A. Gu, "Transformers are SSMs", ICML 2024,
    section 6.

    Args:
        heads: H, the number of heads.
        features: F, the number of features per head.
        half_life: initial half-life of each head, in tokens with membership 1 / H. None in the list and
            values above 1,024 become 1,024. By default, 4 to 256 tokens on a logarithmic scale.
    """

    def __init__(
        self, heads: int, features: int, half_life: Sequence[int | float | None] | None = None
    ) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        lives = half_lives(heads, 4, 256).tolist() if half_life is None else half_life
        self.start = [1024.0 if life is None else min(float(life), 1024.0) for life in lives]
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the rates a_h so that the heads have their initial half-lives."""
        rate = math.log(2) * self.heads / torch.tensor(self.start, dtype=torch.float64)
        init.copy_(self.log_rate, rate.log().to(self.log_rate.dtype))

    def forward(
        self,
        mixed: Float[Tensor, "B H T K"],
        features: Float[Tensor, "B T E"],
        membership: Float[Tensor, "B T H"],
        past: Float[Tensor, "B H F K"] | None,
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H F K"]]:
        """Return TSSA's output ``mixed`` plus the output of the scan, and the state after the last token.

        ``features`` are c and b, concatenated, E = 2 H F; ``past`` is the state before these tokens.
        """
        c, b, log_decay = self._scan(features, membership)
        values = mixed.to(b.dtype)
        # The step is 1, because `mixed` already has the factor Π.
        sources, step = values, torch.ones_like(log_decay)
        if past is not None:
            c, b, log_decay, step = with_state(c, b, log_decay, step)
            sources = prepend_sources(past, values)
        scanned = (SemiseparableMixing(c, b, log_decay) @ sources)[..., -values.shape[-2] :, :]
        return (values + scanned).to(mixed.dtype), final_state(b, log_decay, step, sources)

    def operator(
        self,
        features: Float[Tensor, "B T E"],
        membership: Float[Tensor, "B T H"],
        past: Float[Tensor, "B H F K"] | None,
    ) -> MixingOperator:
        """Return the mixing matrix M for values without the factor Π; columns of a state come first."""
        (c, b, log_decay), step = self._scan(features, membership), membership.mT
        if past is None:
            return SumMixing(DiagonalMixing(step), SemiseparableMixing(c, b, log_decay, step))
        diagonal = F.pad(step, (self.features, 0))
        c, b, log_decay, step = with_state(c, b, log_decay, step)
        operator = SumMixing(DiagonalMixing(diagonal), SemiseparableMixing(c, b, log_decay, step))
        return drop_state_rows(operator, self.features)

    def _scan(self, features: Tensor, membership: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return c, b and the log-decays -a_h Π, in the dtype of the scan."""
        wide = compute_dtype(membership.dtype)
        c, b = (F.normalize(split_heads(x, self.heads).to(wide), dim=-1) for x in features.chunk(2, -1))
        return c, b, -self.log_rate.to(wide).exp()[:, None] * membership.mT.to(wide)


def check_half_life(owner: str, half_life: HalfLife, heads: int, causal: bool) -> tuple[float, ...]:
    """Return one half-life per head, with infinity instead of None; raise InputError if one is invalid."""
    half_life = half_life.tolist() if isinstance(half_life, Tensor) else half_life
    listed = isinstance(half_life, Sequence) and not isinstance(half_life, str)
    lives: Any = half_life if listed else [half_life] * heads
    numbers = [math.inf if life is None else life for life in lives]
    positive = all(isinstance(life, int | float) and life > 0 for life in numbers)
    if not causal or not positive or len(numbers) != heads:
        raise InputError(
            f"{owner} `half_life`",
            expected=f"causal=True and numbers of tokens above 0, one for each of {heads} heads",
            got=f"causal={causal}, {half_life!r}",
            fix="Make them with rankwise.ops.half_lives(heads), or leave half_life out.",
        )
    return tuple(map(float, numbers))
