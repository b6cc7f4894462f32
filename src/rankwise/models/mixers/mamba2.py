"""Mamba-2: state-space duality, one decay for each head and token."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise.models.mixers.base import MixerState, head_width, make_dropout, options_of
from rankwise.models.mixers.convolution import ShortConvolution
from rankwise.models.mixers.scanned import (
    Mixing,
    OperatorMixer,
    decay_to_end,
    in_front,
    only_causal,
    rows_after,
)
from rankwise.operators import SemiseparableMixing
from rankwise.operators.base import compute_dtype

STEPS = (0.001, 0.1)
"""Between which steps start, as released."""


class Mamba2(OperatorMixer):
    """The mixer of Mamba-2: values, b and c through a short convolution, steps from the token.

    Formula: ``M[t, s] = c_t·b_s (Π_{s < r ≤ t} exp(−Δ_r a)) Δ_s``, one a > 0 for each head. The D-term and
    the gate of the published block are not here: the block of this package has a λ-skip and a gate of its
    own. A masked token has Δ = 0: it is no source, and nothing decays.
    Cost: O(T N V) time and O(T (N + V)) memory a head; the state has H N V + (H V + 2 G N)·(conv_tokens − 1)
    numbers, whatever T.
    Source: T. Dao and A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality", ICML 2024, sections 3, 6 and 7.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: V, width of a head's values; D / H where None.
        state_dim: N.
        groups: G, of which H is a multiple: heads of a group share b and c.
        conv_tokens: reach of the short convolution.
        causal: must be true.
        bias: biases in the projections.
        dropout: rate on the output.

    Raises:
        InputError: if it is not causal.

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
        super().__init__()
        only_causal("mamba2", causal)
        self.num_heads, self.causal, self.groups, self.state_dim = num_heads, True, groups, state_dim
        self.head_dim = head_width("Mamba2", hidden_size, num_heads, head_dim)
        self.sizes = [num_heads * self.head_dim, groups * state_dim, groups * state_dim]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes) + num_heads, bias=bias)
        self.convolution = ShortConvolution(sum(self.sizes), conv_tokens)
        self.step_bias = nn.Parameter(torch.empty(num_heads))
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.out_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = make_dropout("Mamba2", dropout)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any) -> "Mamba2":
        """Build from a `rankwise.models.ToSTConfig`; ``mixer_options["mamba2"]`` has the last word."""
        options = options_of(config, "mamba2", head_dim=config.head_dim)
        return cls(config.hidden_size, config.num_attention_heads, **options)

    def reset_parameters(self) -> None:
        """Rates in [1, 16] and steps in [0.001, 0.1], as released; the projections have their own."""
        init.copy_(self.log_rate, torch.empty_like(self.log_rate).uniform_(1, 16).log())
        init.copy_(self.step_bias, start_of_steps(self.step_bias))

    def state_size(self, tokens: int) -> int:
        """The states of the heads, and the reach of the convolution: the same for any ``tokens``."""
        return self.num_heads * self.state_dim * self.head_dim + sum(self.sizes) * self.convolution.reach

    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> Mixing:
        past, inputs = (None, None) if state is None else state
        read, raw = self.in_proj(hidden_states).split([sum(self.sizes), self.num_heads], -1)
        read, inputs = self.convolution(read, mask, inputs)
        value, b, c = read.split(self.sizes, -1)
        value = value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        wide = compute_dtype(value.dtype)
        b, c = (x.unflatten(-1, (self.groups, -1)).transpose(1, 2).to(wide) for x in (b, c))
        step = F.softplus(raw.to(wide) + self.step_bias.to(wide)).mT
        if mask is not None:
            step = step * mask[:, None]
        decay = -self.log_rate.to(wide).exp()[:, None] * step
        if past is not None:  # feature n of the state is a source with b = e_n that has not decayed yet
            still = step.new_zeros(*step.shape[:2], self.state_dim)
            b = in_front(torch.eye(self.state_dim, dtype=wide, device=b.device), b)
            c = in_front(torch.zeros_like(b[..., : self.state_dim, :]), c)
            step, decay = torch.cat([still + 1, step], -1), torch.cat([still, decay], -1)
            value = in_front(past, value.to(wide))
        operator = SemiseparableMixing(c, b, decay, step)
        left = (self._state(b, decay, step, value), inputs) if return_state else None
        return Mixing(operator if past is None else rows_after(operator, self.state_dim), value, left)

    def _state(self, b: Tensor, decay: Tensor, step: Tensor, value: Tensor) -> Float[Tensor, "B H N V"]:
        """What a later token can read."""
        weight = (decay_to_end(decay).exp() * step)[..., None]
        b = b.repeat_interleave(self.num_heads // self.groups, 1)
        return (b * weight).mT @ value.to(b.dtype)


def start_of_steps(like: Float[Tensor, "*H"]) -> Float[Tensor, "*H"]:
    """Biases whose softplus is spread evenly, in logarithms, over `STEPS`."""
    least, most = (math.log(step) for step in STEPS)
    step = torch.empty_like(like).uniform_(least, most).exp()
    return step + torch.log(-torch.expm1(-step))
