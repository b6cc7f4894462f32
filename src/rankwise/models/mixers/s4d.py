"""S4D mixer: a diagonal state-space model, whose parameters do not depend on the token."""

import math

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise._internals.torch_private import values_known
from rankwise.models.mixers.mixer import MixerState, MixingStep
from rankwise.models.mixers.recurrent import STEPS, RecurrentMixer, prepend_sources, take_tokens
from rankwise.operators import DenseMixing, ToeplitzMixing
from rankwise.operators.base import compute_dtype


class S4D(RecurrentMixer):
    """S4D mixer: a convolution per channel over all earlier tokens, from N complex states with conjugates.

    Formula: ``M_d[t, s] = 2 Re Σ_n c_n (exp(Δ a_n) − 1)/a_n · exp((t − s) Δ a_n)`` for s ≤ t, independent of
    the input. Channel d has a step Δ, rates a_n and output weights c_n. The skip connection D·x of the
    published layer is left out, because `Block` has a λ-skip. A masked token adds nothing to the state, and
    does not count as a time step.
    Cost: O(T (N + log T)) time and O(T) memory per channel. A call with a state computes dense matrices, as
    `mixing_operator` does with padding between real tokens: O(T²) per sequence and channel. The state has 2 N
    numbers per channel, independent of T.
    Source: A. Gu, A. Gupta, K. Goel and C. Ré, "On the Parameterization and Initialization of Diagonal State
    Space Models", NeurIPS 2022, with the initialization S4D-Lin.

    Args:
        hidden_size: D, the model width and number of channels, which replace heads.
        state_dim: N, number of complex states per channel, not counting conjugates.
        causal: must be True.

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
        super().__init__(causal)
        self.state_dim, self.channels = state_dim, hidden_size
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.log_step = nn.Parameter(torch.empty(hidden_size))
        self.log_rate = nn.Parameter(torch.empty(hidden_size, state_dim))
        self.frequency = nn.Parameter(torch.empty(hidden_size, state_dim))
        self.read = nn.Parameter(torch.empty(hidden_size, state_dim, 2))
        self._add_output(hidden_size, hidden_size, bias, dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a_n to −1/2 + iπn; draw steps Δ log-uniformly from [0.001, 0.1], and c from a Gaussian."""
        init.uniform_(self.log_step, *(math.log(step) for step in STEPS))
        init.constant_(self.log_rate, math.log(0.5))
        turns = torch.arange(self.state_dim, dtype=self.frequency.dtype, device=self.frequency.device)
        init.copy_(self.frequency, (math.pi * turns).expand_as(self.frequency))
        init.normal_(self.read, std=0.5**0.5)

    def state_size(self, tokens: int) -> int:
        """Return the number of real and imaginary parts of all states, for any number of tokens."""
        return 2 * self.channels * self.state_dim

    def _mix(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Float[Tensor, "B D T 1"], MixerState | None]:
        """Return M @ values and the next state; before the convolution, padding moves to the end."""
        if mask is None or state is not None or _is_contiguous(mask):
            return super()._mix(hidden_states, mask, state, return_state)
        real_first = (~mask).long().argsort(dim=1, stable=True)
        tokens, mask_first = take_tokens(hidden_states, real_first), mask.gather(1, real_first)
        operator, values, final = self._mixing(tokens, mask_first, None, return_state, contiguous=True)
        mixed = (operator @ values).to(hidden_states.dtype)
        place = (mask.long().cumsum(1) - 1)[:, None, :, None].expand_as(mixed)
        return mixed.gather(2, place.clamp(min=0)).masked_fill(place < 0, 0.0), final

    def _mixing(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        state: MixerState | None,
        return_state: bool,
        contiguous: bool = False,
    ) -> MixingStep:
        value = self.v_proj(hidden_states).mT[..., None]
        real = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=value.device)
        if mask is not None:
            real, value = mask, value * mask[:, None, :, None]
        turn, c = self._system(compute_dtype(value.dtype))
        unit, step = torch.ones_like(c), torch.ones_like(c[:, 0].real)
        kernel = ToeplitzMixing.from_ssm(turn, unit, c, step, value.shape[-2], conjugates=True).kernel
        final = (_final_state(turn, value, real, state),) if return_state else None
        if state is None and (mask is None or contiguous or _is_contiguous(mask)):
            return MixingStep(ToeplitzMixing(kernel.expand(len(value), -1, -1)), value, final)
        count = real.long().cumsum(1)
        matrix, visible = _matrices(kernel, count, real)
        if state is not None:
            readout = 2 * (c * torch.expm1(turn) / turn)[:, None] * _decay(turn, count)
            matrix = torch.cat([readout.real, -readout.imag, matrix], -1)
            visible = F.pad(visible, (2 * self.state_dim, 0), value=True)
            value = prepend_sources(state[0].flatten(2)[..., None], value.to(kernel.dtype))
        return MixingStep(DenseMixing(matrix, visible), value, final)

    def _system(self, wide: torch.dtype) -> tuple[Complex[Tensor, "D N"], Complex[Tensor, "D N"]]:
        """Return Δ a and Δ c: exp(Δ a) multiplies the states at each token, and Δ c reads the states."""
        a = torch.complex(-self.log_rate.to(wide).exp(), self.frequency.to(wide))
        step = self.log_step.to(wide).exp()[:, None]
        return a * step, torch.view_as_complex(self.read.to(wide).contiguous()) * step


def _final_state(
    turn: Complex[Tensor, "D N"],
    value: Float[Tensor, "B D T 1"],
    real: Bool[Tensor, "B T"],
    state: MixerState | None,
) -> Float[Tensor, "B D two N"]:
    """Return the state after the last token: Σ_s exp((T − s) Δ a) v_s, plus the earlier state with decay."""
    count = real.long().cumsum(1)
    final = (_decay(turn, count[:, -1:] - count) * value).sum(-2)
    if state is not None:
        before = torch.complex(*state[0].to(final.real.dtype).unbind(2))
        final = final + _decay(turn, count[:, -1:])[..., 0, :] * before
    return torch.stack([final.real, final.imag], 2)


def _decay(turn: Complex[Tensor, "D N"], time: Int[Tensor, "B T"]) -> Complex[Tensor, "B D T N"]:
    """Return exp(time · Δ a), by which a state is multiplied after ``time`` tokens."""
    return (turn[:, None] * time[:, None, :, None]).exp()


def _is_contiguous(mask: Bool[Tensor, "B T"]) -> bool:
    """Return True if it is known that no sequence has padding between real tokens."""
    starts = mask[:, 1:] & ~mask[:, :-1]
    return values_known(mask) and bool((starts.sum(1) + mask[:, 0] <= 1).all())


def _matrices(
    kernel: Float[Tensor, "D T"], count: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B D T T"], Bool[Tensor, "B 1 T T"]]:
    """Return M for the T tokens, with lags counted in real tokens, and a mask of the allowed entries of M."""
    lag = count[:, :, None] - count[:, None, :]
    visible = (torch.ones_like(lag, dtype=torch.bool).tril() & real[:, None, :])[:, None]
    matrix = kernel[:, lag.clamp(min=0)].movedim(0, 1)
    return matrix.masked_fill(~visible, 0.0), visible
