"""S4D: a diagonal state space that is the same for every token."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise.models.mixers.base import MixerState, make_dropout, options_of
from rankwise.models.mixers.scanned import Mixing, OperatorMixer, in_front, only_causal
from rankwise.operators import DenseMixing, ToeplitzMixing
from rankwise.operators.base import compute_dtype

STEPS = (0.001, 0.1)
"""Between which steps start, as released."""


class S4D(OperatorMixer):
    """A long convolution for each channel, from N complex states and their conjugates.

    Formula: ``M_d[t, s] = 2 Re Σ_n c_n (exp(Δ a_n) − 1)/a_n · exp((t − s) Δ a_n)`` for s ≤ t: it does not
    depend on the input. The D-term of the published layer is not here: the block has a λ-skip of its own.
    A masked token is no source, and no time passes at it.
    Cost: O(T (N + log T)) time and O(T) memory a channel. A call that goes on from a state, or whose padding
    lies between real tokens, forms its matrices: O(T²) a sequence and channel. The state has 2 N numbers a
    channel, whatever T.
    Source: A. Gu, A. Gupta, K. Goel and C. Ré, "On the Parameterization and Initialization of Diagonal State
    Space Models", NeurIPS 2022; the start is its S4D-Lin.

    Args:
        hidden_size: D, also the number of channels, which take the place of heads.
        state_dim: N, complex states of a channel, conjugates not counted.
        causal: must be true.
        bias: biases in the projections.
        dropout: rate on the output.

    Raises:
        InputError: if it is not causal.

    Examples:
        >>> import torch
        >>> mixer = S4D(16, state_dim=4)
        >>> x = torch.randn(1, 5, 16)
        >>> tuple(mixer(x).output.shape), mixer.mixing_operator(x).kind, mixer.state_size(1_000_000)
        ((1, 5, 16), 'toeplitz', 128)
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        state_dim: int = 32,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        only_causal("s4d", causal)
        self.causal, self.state_dim, self.channels = True, state_dim, hidden_size
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.log_step = nn.Parameter(torch.empty(hidden_size))
        self.log_rate = nn.Parameter(torch.empty(hidden_size, state_dim))
        self.frequency = nn.Parameter(torch.empty(hidden_size, state_dim))
        self.read = nn.Parameter(torch.empty(hidden_size, state_dim, 2))
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.dropout = make_dropout("S4D", dropout)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any) -> "S4D":
        """Build from a `rankwise.models.ToSTConfig`; ``mixer_options["s4d"]`` has the last word."""
        return cls(config.hidden_size, **options_of(config, "s4d"))

    def reset_parameters(self) -> None:
        """a_n = −1/2 + iπn, steps in [0.001, 0.1], c Gaussian; the projections have their own."""
        init.uniform_(self.log_step, *(math.log(step) for step in STEPS))
        init.constant_(self.log_rate, math.log(0.5))
        turns = torch.arange(self.state_dim, dtype=self.frequency.dtype, device=self.frequency.device)
        init.copy_(self.frequency, (math.pi * turns).expand_as(self.frequency))
        init.normal_(self.read, std=0.5**0.5)

    def state_size(self, tokens: int) -> int:
        """Real and imaginary parts of the states: the same for any ``tokens``."""
        return 2 * self.channels * self.state_dim

    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> Mixing:
        value = self.v_proj(hidden_states).mT[..., None]
        real = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=value.device)
        if mask is not None:
            real, value = mask, value * mask[:, None, :, None]
        turn, c = self._system(compute_dtype(value.dtype))
        unit, step = torch.ones_like(c), torch.ones_like(c[:, 0].real)
        kernel = ToeplitzMixing.from_ssm(turn, unit, c, step, value.shape[-2], conjugates=True).kernel
        left = (_state(turn, value, real, state),) if return_state else None
        if state is None and (mask is None or _in_one_piece(mask)):
            return Mixing(ToeplitzMixing(kernel.expand(len(value), -1, -1)), value, left)
        count = real.long().cumsum(1)
        matrix, seen = _by_count(kernel, count, real)
        if state is not None:
            read = 2 * (c * torch.expm1(turn) / turn)[:, None] * _turned(turn, count)
            matrix = torch.cat([read.real, -read.imag, matrix], -1)
            seen = F.pad(seen, (2 * self.state_dim, 0), value=True)
            value = in_front(state[0].flatten(2)[..., None], value.to(kernel.dtype))
        return Mixing(DenseMixing(matrix, seen), value, left)

    def _system(self, wide: torch.dtype) -> tuple[Complex[Tensor, "D N"], Complex[Tensor, "D N"]]:
        """Δ a, by which the states decay and turn in one token; and Δ c, what reads them."""
        a = torch.complex(-self.log_rate.to(wide).exp(), self.frequency.to(wide))
        step = self.log_step.to(wide).exp()[:, None]
        return a * step, torch.view_as_complex(self.read.to(wide).contiguous()) * step


def _state(
    turn: Complex[Tensor, "D N"],
    value: Float[Tensor, "B D T 1"],
    real: Bool[Tensor, "B T"],
    state: MixerState | None,
) -> Float[Tensor, "B D two N"]:
    """Σ_s exp(time since s · Δ a) v_s, and the earlier state as far as it has decayed."""
    count = real.long().cumsum(1)
    left = (_turned(turn, count[:, -1:] - count) * value).sum(-2)
    if state is not None:
        before = torch.complex(*state[0].to(left.real.dtype).unbind(2))
        left = left + _turned(turn, count[:, -1:])[..., 0, :] * before
    return torch.stack([left.real, left.imag], 2)


def _turned(turn: Complex[Tensor, "D N"], time: Int[Tensor, "B T"]) -> Complex[Tensor, "B D T N"]:
    """What is left of a state after so many tokens."""
    return (turn[:, None] * time[:, None, :, None]).exp()


def _in_one_piece(mask: Bool[Tensor, "B T"]) -> bool:
    """Whether no padding lies between the real tokens of a row: then no time passes where none should."""
    starts = mask[:, 1:] & ~mask[:, :-1]
    return bool((starts.sum(1) + mask[:, 0] <= 1).all())


def _by_count(
    kernel: Float[Tensor, "D T"], count: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B D T T"], Bool[Tensor, "B 1 T T"]]:
    """The kernel at as many real tokens' distance; and which entries are sources that a row may see."""
    lag = count[:, :, None] - count[:, None, :]
    seen = (torch.ones_like(lag, dtype=torch.bool).tril() & real[:, None, :])[:, None]
    matrix = kernel[:, lag.clamp(min=0)].movedim(0, 1)
    return matrix.masked_fill(~seen, 0.0), seen
