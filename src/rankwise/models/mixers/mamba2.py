"""Mamba-2 mixer: a state-space model with one decay factor per head and token."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise.models.mixers.mixer import MixerState, MixingStep, head_dim_of, split_heads
from rankwise.models.mixers.recurrent import (
    RecurrentMixer,
    ShortConvolution,
    drop_state_rows,
    final_state,
    initial_step_bias,
    prepend_sources,
    with_state,
)
from rankwise.operators import SemiseparableMixing
from rankwise.operators.base import compute_dtype


class Mamba2(RecurrentMixer):
    """Mamba-2 mixer: values, b and c from a short convolution, and steps Δ from a linear map of the token.

    Formula: ``M[t, s] = c_t·b_s (Π_{s < r ≤ t} exp(−Δ_r a)) Δ_s`` with a rate a > 0 per head. The skip
    connection D·x and the gate of the published block are left out, because `Block` has a λ-skip and a gate.
    A masked token has Δ = 0: it adds nothing to the state, and the state does not decay.
    Cost: O(T N V) time and O(T (N + V)) memory per head; the state has
    H N V + (H V + 2 G N)·(conv_tokens − 1) numbers, independent of T.
    Source: T. Dao and A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality", ICML 2024, sections 3, 6 and 7.

    Args:
        hidden_size: D, the model width.
        num_heads: H, the number of heads.
        head_dim: V, the width of each head's values; D / H by default.
        state_dim: N, number of state features per head.
        groups: G, number of groups of heads, a divisor of H; the heads of a group share b and c.
        conv_tokens: number of tokens that the short convolution reads.
        causal: must be True.

    Examples:
        >>> import torch
        >>> mixer = Mamba2(16, 4, state_dim=8)
        >>> x = torch.randn(1, 5, 16)
        >>> tuple(mixer(x).output.shape), mixer.mixing_operator(x).kind, mixer.state_size(1_000_000)
        ((1, 5, 16), 'semiseparable', 224)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 64,
        groups: int = 1,
        conv_tokens: int = 4,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(causal)
        self.num_heads, self.groups, self.state_dim = num_heads, groups, state_dim
        self.head_dim = head_dim_of("Mamba2", hidden_size, num_heads, head_dim)
        self.sizes = [num_heads * self.head_dim, groups * state_dim, groups * state_dim]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes) + num_heads, bias=bias)
        self.convolution = ShortConvolution(sum(self.sizes), conv_tokens)
        self.step_bias = nn.Parameter(torch.empty(num_heads))
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self._add_output(num_heads * self.head_dim, hidden_size, bias, dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates a uniformly from [1, 16], and steps Δ log-uniformly from [0.001, 0.1], as released."""
        init.copy_(self.log_rate, torch.empty_like(self.log_rate).uniform_(1, 16).log())
        init.copy_(self.step_bias, initial_step_bias(self.step_bias))

    def state_size(self, tokens: int) -> int:
        """Return the number of entries in the states of scan and convolution, for any number of tokens."""
        return self.num_heads * self.state_dim * self.head_dim + sum(self.sizes) * self.convolution.reach

    def _mixing(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> MixingStep:
        past, inputs = (None, None) if state is None else state
        projected, raw_step = self.in_proj(hidden_states).split([sum(self.sizes), self.num_heads], -1)
        projected, inputs = self.convolution(projected, mask, inputs)
        value, b, c = projected.split(self.sizes, -1)
        value = split_heads(value, self.num_heads)
        wide = compute_dtype(value.dtype)
        b, c = (split_heads(x, self.groups).to(wide) for x in (b, c))
        step = F.softplus(raw_step.to(wide) + self.step_bias.to(wide)).mT
        if mask is not None:
            step = step * mask[:, None]
        decay = -self.log_rate.to(wide).exp()[:, None] * step
        if past is not None:
            c, b, decay, step = with_state(c, b, decay, step)
            value = prepend_sources(past, value.to(wide))
        operator = SemiseparableMixing(c, b, decay, step)
        final = None
        if return_state:
            b = b.repeat_interleave(self.num_heads // self.groups, 1)
            final = (final_state(b, decay, step, value), inputs)
        states = 0 if past is None else self.state_dim
        return MixingStep(drop_state_rows(operator, states), value, final)
