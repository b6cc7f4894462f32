"""Base class of recurrent mixers, and helpers that represent a decoding state by extra source tokens."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.errors import InputError
from rankwise.models.mixers.mixer import Mixer
from rankwise.operators import IndexedMixing, MixingOperator

STEPS = (0.001, 0.1)
"""Lowest and highest initial step Δ of the released state-space models."""


class RecurrentMixer(Mixer):
    """Base class of causal mixers whose state has constant size; ``causal=False`` raises InputError."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        if not causal:
            raise InputError(
                f"the mixer {type(self).__name__.lower()!r}",
                expected="causal=True",
                got="causal=False",
                fix="A recurrence runs forward only: set causal=True, or use another mixer.",
            )
        self.causal = True


def initial_step_bias(like: Float[Tensor, "*H"]) -> Float[Tensor, "*H"]:
    """Return random biases whose softplus, the initial step Δ, is log-uniform over the range `STEPS`."""
    low, high = (math.log(step) for step in STEPS)
    step = torch.empty_like(like).uniform_(low, high).exp()
    return step + torch.log(-torch.expm1(-step))


class ShortConvolution(nn.Conv1d):
    """Causal convolution per channel over a few tokens, followed by SiLU; padding tokens are skipped.

    Examples:
        >>> import torch
        >>> convolution, x = ShortConvolution(2, 4), torch.randn(1, 5, 2)
        >>> output, state = convolution(x)
        >>> tuple(output.shape), tuple(state.shape), torch.equal(state, x[:, 2:])
        ((1, 5, 2), (1, 3, 2), True)
    """

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__(channels, channels, tokens, groups=channels)
        self.reach = tokens - 1

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B T C"],
        mask: Bool[Tensor, "B T"] | None = None,
        state: Float[Tensor, "B R C"] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B R C"]]:
        """Return outputs and state: the last R real inputs (kernel size − 1), with zeros in front.

        Args:
            x: tokens of this call.
            mask: True for real tokens; None if all tokens are real.
            state: last real inputs, as returned by an earlier call.
        """
        past = x.new_zeros(len(x), self.reach, x.shape[-1]) if state is None else state.to(x.dtype)
        if mask is None:
            line = torch.cat([past, x], 1)
            return self._convolve(line), line[:, x.shape[1] :]
        real_first = (~mask).long().argsort(dim=1, stable=True)
        line = torch.cat([past, take_tokens(x, real_first)], 1)
        count = mask.long().cumsum(1)
        last = count[:, -1:] + torch.arange(self.reach, device=x.device)
        return take_tokens(self._convolve(line), (count - 1).clamp(min=0)), take_tokens(line, last)

    def _convolve(self, line: Tensor) -> Tensor:
        """Return the convolution, followed by SiLU, of inputs that already include earlier tokens."""
        return F.silu(super().forward(line.mT)).mT


def take_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """Return the tokens at the given positions of each sequence."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))


def with_state(
    c: Float[Tensor, "B G T N"],
    b: Float[Tensor, "B G T N"],
    log_decay: Float[Tensor, "B H T"],
    step: Float[Tensor, "B H T"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return c, b, log-decay and step, with a source token prepended per feature of the decoding state."""
    features = b.shape[-1]
    b = prepend_sources(torch.eye(features, dtype=b.dtype, device=b.device), b)
    c = prepend_sources(torch.zeros_like(b[..., :features, :]), c)
    return c, b, F.pad(log_decay, (features, 0)), F.pad(step, (features, 0), value=1.0)


def final_state(
    b: Float[Tensor, "B H T N"],
    log_decay: Float[Tensor, "B H T"],
    step: Float[Tensor, "B H T"],
    values: Float[Tensor, "B H T V"],
) -> Float[Tensor, "B H N V"]:
    """Return the state after the last token: the sum of step_s b_s v_sᵀ over all tokens s, with decay."""
    return (b * (decay_to_end(log_decay).exp() * step)[..., None]).mT @ values.to(b.dtype)


def prepend_sources(
    states: Float[Tensor, "*A N F"], tokens: Float[Tensor, "*B T F"]
) -> Float[Tensor, "*C S F"]:
    """Return tokens after N source tokens that represent a decoding state, in the dtype of ``tokens``."""
    lead = torch.broadcast_shapes(states.shape[:-2], tokens.shape[:-2])
    return torch.cat([states.to(tokens.dtype).expand(*lead, -1, -1), tokens], -2)


def drop_state_rows(operator: MixingOperator, states: int) -> MixingOperator:
    """Return an operator without the first ``states`` rows, which belong to source tokens of a state."""
    if not states:
        return operator
    rows, columns = (
        torch.ones(size, dtype=torch.bool, device=operator.device) for size in operator.shape[-2:]
    )
    rows[:states] = False
    return IndexedMixing(operator, rows, columns)


def decay_to_end(log_decay: Float[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Return the log-decay from each token to the last token: the sum of all later log-decays.

    Examples:
        >>> decay_to_end(torch.tensor([-9.0, -2.0, -1.0])).tolist()
        [-3.0, -1.0, 0.0]
    """
    later = F.pad(log_decay[..., 1:], (0, 1))
    return later.flip(-1).cumsum(-1).flip(-1)
