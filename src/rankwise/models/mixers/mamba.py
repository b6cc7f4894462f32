"""Mamba: a selective state space for each channel."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise.models.mixers.base import MixerState, make_dropout, options_of
from rankwise.models.mixers.convolution import ShortConvolution
from rankwise.models.mixers.mamba2 import start_of_steps
from rankwise.models.mixers.scanned import (
    Mixing,
    OperatorMixer,
    decay_to_end,
    in_front,
    only_causal,
    rows_after,
)
from rankwise.operators import SelectiveMixing
from rankwise.operators.base import compute_dtype

TINY = 2.0**-60
"""Step of a source that stands for a state: it decays nothing, and as a factor of its source is undone
exactly."""


class Mamba(OperatorMixer):
    """The mixer of Mamba: values through a short convolution; steps, b and c from the values.

    Formula: ``M_d[t, s] = Σ_n c_t[n] exp(−a[d, n] Σ_{s < r ≤ t} Δ_r[d]) b_s[n] Δ_s[d]``, one matrix for each
    of the ``expand``·D channels, which take the place of heads. The D-term and the gate of the published
    block are not here: the block of this package has a λ-skip and a gate of its own. A masked token has
    Δ = 0: it is no source, and nothing decays.
    Cost: O(T N) time and O(T + N) memory a channel, token by token; the state has N + conv_tokens − 1 numbers
    a channel, whatever T.
    Source: A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", COLM 2024,
    section 3.

    Args:
        hidden_size: D.
        expand: channels in units of D.
        state_dim: N.
        step_rank: rank of the map to the steps; D / 16, rounded up, where None.
        conv_tokens: reach of the short convolution.
        causal: must be true.
        bias: biases in the projections.
        dropout: rate on the output.

    Raises:
        InputError: if it is not causal.

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
        super().__init__()
        only_causal("mamba", causal)
        self.causal, self.state_dim, self.channels = True, state_dim, expand * hidden_size
        self.step_rank = step_rank if step_rank is not None else math.ceil(hidden_size / 16)
        self.in_proj = nn.Linear(hidden_size, self.channels, bias=bias)
        self.convolution = ShortConvolution(self.channels, conv_tokens)
        self.x_proj = nn.Linear(self.channels, self.step_rank + 2 * state_dim, bias=False)
        self.step_proj = nn.Linear(self.step_rank, self.channels)
        self.log_rate = nn.Parameter(torch.empty(self.channels, state_dim))
        self.out_proj = nn.Linear(self.channels, hidden_size, bias=bias)
        self.dropout = make_dropout("Mamba", dropout)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any) -> "Mamba":
        """Build from a `rankwise.models.ToSTConfig`; ``mixer_options["mamba"]`` has the last word."""
        return cls(config.hidden_size, **options_of(config, "mamba"))

    def reset_parameters(self) -> None:
        """Rates 1 … N and steps in [0.001, 0.1], as released; the other projections have their own."""
        rates = torch.arange(1, self.state_dim + 1, dtype=self.log_rate.dtype, device=self.log_rate.device)
        init.copy_(self.log_rate, rates.log().expand_as(self.log_rate))
        init.uniform_(self.step_proj.weight, -(self.step_rank**-0.5), self.step_rank**-0.5)
        init.copy_(self.step_proj.bias, start_of_steps(self.step_proj.bias))

    def state_size(self, tokens: int) -> int:
        """The states of the channels, and the reach of the convolution: the same for any ``tokens``."""
        return self.channels * (self.state_dim + self.convolution.reach)

    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> Mixing:
        past, inputs = (None, None) if state is None else state
        read, inputs = self.convolution(self.in_proj(hidden_states), mask, inputs)
        wide = compute_dtype(read.dtype)
        sizes = [self.step_rank, self.state_dim, self.state_dim]
        low, b, c = self.x_proj(read).split(sizes, -1)
        b, c = b[:, None].to(wide), c[:, None].to(wide)
        step = F.softplus(self.step_proj(low).to(wide)).mT
        if mask is not None:
            step = step * mask[:, None]
        rate, value = -self.log_rate.to(wide).exp(), read.mT[..., None]
        if past is not None:  # feature n of the state is a source with b = e_n that has not decayed yet
            n = self.state_dim
            b = in_front(torch.eye(n, dtype=wide, device=b.device) / TINY, b)
            c = in_front(torch.zeros_like(b[..., :n, :]), c)
            step = torch.cat([torch.full_like(step[..., :1], TINY).expand(-1, -1, n), step], -1)
            value = in_front(past[..., None], value.to(wide))
        operator = SelectiveMixing(c, b, rate, step)
        left = (_state(b, rate, step, value), inputs) if return_state else None
        return Mixing(operator if past is None else rows_after(operator, self.state_dim), value, left)


def _state(b: Tensor, rate: Tensor, step: Tensor, value: Tensor) -> Float[Tensor, "B D N"]:
    """What a later token can read, one feature at a time: no tensor of B·D·N·T numbers is formed."""
    time, given = decay_to_end(step), value[..., 0].to(step.dtype) * step
    features = zip(b.unbind(-1), rate.unbind(-1), strict=True)
    return torch.stack([(given * source * (a[:, None] * time).exp()).sum(-1) for source, a in features], -1)
