"""Mamba mixer: a selective state-space model per channel."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise.models.mixers.mixer import MixerState, MixingStep
from rankwise.models.mixers.recurrent import (
    RecurrentMixer,
    ShortConvolution,
    decay_to_end,
    drop_state_rows,
    initial_step_bias,
    prepend_sources,
)
from rankwise.operators import SelectiveMixing
from rankwise.operators.base import compute_dtype

TINY = 2.0**-60
"""Step Δ of source tokens that represent a state: exp(−a·TINY) rounds to 1, and b is divided by TINY. So the
step neither decays nor scales the state."""


class Mamba(RecurrentMixer):
    """Mamba mixer: values from a short convolution, and steps Δ, b and c computed from the values.

    Formula: ``M_d[t, s] = Σ_n c_t[n] exp(−a[d, n] Σ_{s < r ≤ t} Δ_r[d]) b_s[n] Δ_s[d]``, one mixing matrix
    for each of the ``expand``·D channels, which replace heads. The skip connection D·x and the gate of the
    published block are left out, because `Block` has a λ-skip and a gate. A masked token has Δ = 0: it adds
    nothing to the state, and the state does not decay.
    Cost: O(T N) time and O(T + N) memory per channel, token by token; the state has N + conv_tokens − 1
    numbers per channel, independent of T.
    Source: A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", COLM 2024,
    section 3.

    Args:
        hidden_size: D, the model width.
        expand: number of channels per model channel; there are ``expand``·D channels.
        state_dim: N, number of state features per channel.
        step_rank: rank of the linear map to the steps Δ; D / 16, rounded up, by default.
        conv_tokens: number of tokens that the short convolution reads.
        causal: must be True.

    Examples:
        >>> import torch
        >>> mixer = Mamba(16, state_dim=8)
        >>> x = torch.randn(1, 5, 16)
        >>> tuple(mixer(x).output.shape), tuple(mixer.mixing_operator(x).shape), mixer.state_size(1_000_000)
        ((1, 5, 16), (1, 32, 5, 5), 352)
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        expand: int = 2,
        state_dim: int = 16,
        step_rank: int | None = None,
        conv_tokens: int = 4,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(causal)
        self.state_dim, self.channels = state_dim, expand * hidden_size
        self.step_rank = step_rank if step_rank is not None else math.ceil(hidden_size / 16)
        self.in_proj = nn.Linear(hidden_size, self.channels, bias=bias)
        self.convolution = ShortConvolution(self.channels, conv_tokens)
        self.x_proj = nn.Linear(self.channels, self.step_rank + 2 * state_dim, bias=False)
        self.step_proj = nn.Linear(self.step_rank, self.channels)
        self.log_rate = nn.Parameter(torch.empty(self.channels, state_dim))
        self._add_output(self.channels, hidden_size, bias, dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set rates a to 1 … N, and draw steps Δ log-uniformly from [0.001, 0.1], as in the released code."""
        rates = torch.arange(1, self.state_dim + 1, dtype=self.log_rate.dtype, device=self.log_rate.device)
        init.copy_(self.log_rate, rates.log().expand_as(self.log_rate))
        init.uniform_(self.step_proj.weight, -(self.step_rank**-0.5), self.step_rank**-0.5)
        init.copy_(self.step_proj.bias, initial_step_bias(self.step_proj.bias))

    def state_size(self, tokens: int) -> int:
        """Return the number of entries in the states of scan and convolution, for any number of tokens."""
        return self.channels * (self.state_dim + self.convolution.reach)

    def _mixing(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> MixingStep:
        past, inputs = (None, None) if state is None else state
        projected, inputs = self.convolution(self.in_proj(hidden_states), mask, inputs)
        wide = compute_dtype(projected.dtype)
        low, b, c = self.x_proj(projected).split([self.step_rank, self.state_dim, self.state_dim], -1)
        b, c = b[:, None].to(wide), c[:, None].to(wide)
        step = F.softplus(self.step_proj(low).to(wide)).mT
        if mask is not None:
            step = step * mask[:, None]
        rate, value = -self.log_rate.to(wide).exp(), projected.mT[..., None]
        if past is not None:  # one source token per state feature; its step TINY causes no decay
            n = self.state_dim
            b = prepend_sources(torch.eye(n, dtype=wide, device=b.device) / TINY, b)
            c = prepend_sources(torch.zeros_like(b[..., :n, :]), c)
            step = torch.cat([torch.full_like(step[..., :1], TINY).expand(-1, -1, n), step], -1)
            value = prepend_sources(past[..., None], value.to(wide))
        operator = SelectiveMixing(c, b, rate, step)
        final = (_final_state(b, rate, step, value), inputs) if return_state else None
        states = 0 if past is None else self.state_dim
        return MixingStep(drop_state_rows(operator, states), value, final)


def _final_state(b: Tensor, rate: Tensor, step: Tensor, value: Tensor) -> Float[Tensor, "B D N"]:
    """Return the state after the last token, computed feature by feature to limit memory to B·D·T numbers."""
    time, sources = decay_to_end(step), value[..., 0].to(step.dtype) * step
    features = zip(b.unbind(-1), rate.unbind(-1), strict=True)
    return torch.stack([(sources * own_b * (a[:, None] * time).exp()).sum(-1) for own_b, a in features], -1)
