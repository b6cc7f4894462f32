"""Scans with one decay per channel and state feature: the mixing matrices (operators) of Mamba."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import ROW_BLOCK, Index, compute_dtype, index_leading
from rankwise.operators.scan import CausalScanMixing, log_weights, reversed_decays

STATES = 1 << 20
"""State entries that a selective scan keeps in memory at once, over all sequences: 4 MiB in float32."""


class SelectiveMixing(CausalScanMixing):
    r"""Mixing matrices of a selective scan with one decay per channel and state feature, as in Mamba.

    ``M_d[t, s] = Σ_n c_t[n] · exp(rate[d, n] · Σ_{s < r ≤ t} step_r[d]) · b_s[n] · step_s[d]`` for s ≤ t,
    else 0: one T×T matrix per channel d, from N state features n. The D channels are the heads; in Mamba
    a channel has one number per token, so values (..., D, T, V) have V = 1. Mamba's skip connection D·x is
    not part of M.

    `@` forms neither the matrices nor any tensor of D·N·T numbers. It runs over the tokens with a state of
    D·N·V numbers, in O(T D N V) time and O(D V (N + T)) memory per sequence. `rows` and `dense` take O(D T T)
    memory: select a few channels first. Log-decays are only added, so nothing overflows.

    Source: A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", COLM 2024,
    section 3 and algorithm 2; as a matrix, A. Ali et al., "The Hidden Attention of Mamba Models", 2024.

    Args:
        c: vectors that read the state: (..., 1, T, N) if all channels share them, as in Mamba, otherwise
            (..., D, T, N).
        b: vectors that are written to the state, of the shape of ``c``.
        rate: A, log-decay per unit of step, (D, N) or (..., D, N), in (−∞, 0].
        step: step sizes Δ, (..., D, T), finite and not negative. Δ of the first token causes no decay.

    Raises:
        ShapeError: if the shapes of the tensors do not fit together.

    Examples:
        >>> import torch
        >>> one, rate = torch.ones(1, 3, 1), torch.tensor([[0.5], [0.25]]).log()
        >>> SelectiveMixing(one, one, rate, torch.ones(2, 3)).dense()[1].tolist()
        [[1.0, 0.0, 0.0], [0.25, 1.0, 0.0], [0.0625, 0.25, 1.0]]
    """

    kind = "selective"
    held = ("c", "b", "rate", "step")

    def __init__(
        self,
        c: Float[Tensor, "*shared T N"],
        b: Float[Tensor, "*shared T N"],
        rate: Float[Tensor, "*rates N"],
        step: Float[Tensor, "*channels T"],
    ) -> None:
        channels = step.shape[:-1]
        fits = (
            c.ndim >= 2
            and c.shape == b.shape
            and 0 not in c.shape[-2:]
            and step.ndim == c.ndim - 1
            and step.shape[-1] == c.shape[-2]
            and channels[:-1] == c.shape[:-3]
            and (c.ndim == 2 or c.shape[-3] in (1, channels[-1]))
            and rate.ndim >= 1
            and rate.shape[-1] == c.shape[-1]
            and rate.shape[:-1] in (channels, channels[-1:])
        )
        if not fits:
            raise ShapeError(
                "`SelectiveMixing`",
                expected="c and b (..., 1 or D, T, N), rate (D, N) or (..., D, N), step (..., D, T), "
                "T and N ≥ 1",
                got=f"c {tuple(c.shape)}, b {tuple(b.shape)}, rate {tuple(rate.shape)}, "
                f"step {tuple(step.shape)}",
                fix="Give c and b an axis of channels before the tokens: `c.unsqueeze(-3)`.",
            )
        self.c, self.b, self.rate, self.step = c, b, rate, step

    @property
    def shape(self) -> torch.Size:
        """Shape (..., D, T, T) for D channels."""
        return torch.Size([*self.step.shape, self.step.shape[-1]])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of M as a sum over N state features: O((stop − start) T N) time per channel."""
        if stop - start > ROW_BLOCK:  # in blocks, because terms take several times the memory of rows
            edges = [*range(start, stop, ROW_BLOCK), stop]
            return torch.cat([self.rows(low, high) for low, high in pairwise(edges)], dim=-2)
        c, b, rate, step = self._tensors(compute_dtype(self.dtype))
        c, b, step = c[..., start:stop, :], b[..., :stop, :], step[..., :stop]
        # Above the diagonal, the time is ∞, and a rate of 0 would yield 0 · ∞ = NaN. So the time is clamped;
        # `tril` then sets these entries to 0.
        time = (-log_weights(-step, start)).clamp(max=torch.finfo(step.dtype).max)
        rows = torch.zeros_like(time)
        for n in range(c.shape[-1]):
            products = c[..., n, None] * b[..., None, :, n]
            rows = rows + products * (rate[..., n, None, None] * time).exp()
        return F.pad((rows * step[..., None, :]).tril(start), (0, self.shape[-1] - stop))

    def _multiply(self, values: Tensor, transposed: bool) -> Tensor:
        c, b, rate, step = self._tensors(values.dtype)
        if not transposed:
            return selective_scan(c, b, rate, step, values * step[..., None])
        c, b, values = c.flip(-2), b.flip(-2), values.flip(-2)
        return selective_scan(b, c, rate, reversed_decays(step), values).flip(-2) * step[..., None]

    def __getitem__(self, index: Index) -> "SelectiveMixing":
        """Return selected sequences and channels; c and b that channels share stay shared."""
        leading = self.shape[:-2]
        step = index_leading(self.step, index, leading)
        rate = index_leading(self.rate.expand(*leading, -1), index, leading)
        c, b = self.c, self.b
        if c.shape[:-2] == leading:
            return SelectiveMixing(
                index_leading(c, index, leading), index_leading(b, index, leading), rate, step
            )
        sequence = index_leading(torch.arange(leading.numel()).view(leading), index, leading) // leading[-1]
        if sequence.ndim and bool((sequence == sequence[..., :1]).all()):
            sequence = sequence[..., :1]
        c, b = (shared.flatten(0, -3)[sequence.to(self.device)] for shared in (c, b))
        return SelectiveMixing(c, b, rate, step)

    def _tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.c.to(dtype), self.b.to(dtype), self.rate.to(dtype), self.step.to(dtype)


def selective_scan(
    left: Float[Tensor, "*left T N"],
    right: Float[Tensor, "*right T N"],
    rate: Float[Tensor, "*rate N"],
    step: Float[Tensor, "*step T"],
    values: Float[Tensor, "*values T V"],
    numbers: int = STATES,
) -> Float[Tensor, "*out T V"]:
    """Return Σ_{s ≤ t} Σ_n left_tn right_sn exp(rate_n Σ_{s < r ≤ t} step_r) values_s for every token t.

    The function is `scan` with one decay per feature n, computed token by token with a state of N×V numbers.

    Cost: O(T N V) time and O(T V + N V) memory per sequence and head, plus a few buffers of ``numbers``
    entries that all sequences and heads share.

    Args:
        left: N features per row t. The leading axes of all arguments broadcast with each other.
        right: N features per source s.
        rate: log-decay of each feature per unit of step, at most 0.
        step: finite factor of the log-decay at each token. The step of the first token has no effect.
        values: vectors that are summed, of width V.
        numbers: number of state entries in memory at once; the choice affects only memory and time.

    Examples:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> selective_scan(one, one, torch.tensor([0.5]).log(), torch.ones(3), one).flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    lead = torch.broadcast_shapes(left.shape[:-2], rate.shape[:-1], step.shape[:-1], values.shape[:-2])
    size = (*lead, left.shape[-1], values.shape[-1])
    state, outputs = values.new_zeros(size), []
    chunk = max(1, numbers // max(1, state.numel()))
    for start in range(0, values.shape[-2], chunk):
        span = slice(start, start + chunk)
        # The token axis comes first, so that the state of each token is contiguous in memory.
        decay = (step[..., span, None] * rate[..., None, :]).exp().movedim(-2, 0)[..., None]
        added = (right[..., span, :, None] * values[..., span, None, :]).movedim(-3, 0)
        states = []
        for a, x in zip(decay.unbind(), added.unbind(), strict=True):
            state = torch.addcmul(x, a, state)
            states.append(state)
        # Not a matrix product, because many small matrix products would take longer on a CPU.
        read = left[..., span, :, None].expand(*lead, -1, -1, 1).movedim(-3, 0)
        outputs.append((read * torch.stack(states)).sum(-2))
    return torch.cat(outputs).movedim(0, -2)
