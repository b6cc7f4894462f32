"""Selective state spaces: the operators of Mamba, one for each channel."""

from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import (
    ROW_BLOCK,
    Index,
    MixingOperator,
    TensorMap,
    compute_dtype,
    leading,
    on_or_below,
)
from rankwise.operators.scan import log_weights, selective_scan, selective_scan_transposed


class SelectiveMixing(MixingOperator):
    r"""A scan with one decay for each channel and feature of the state, as in Mamba.

    ``M_d[t, s] = Σ_n c_t[n] · exp(rate[d, n] · Σ_{s < r ≤ t} step_r[d]) · b_s[n] · step_s[d]`` for s ≤ t,
    else 0: one T×T matrix for each channel d, T = S. Channels take the place of heads; what a channel holds
    is one number a token, so values are (..., D, T, V) with V = 1 in Mamba. Its D·x is a skip beside M and
    has no part in it.

    Neither the matrices nor any tensor of D·N·T·T or D·N·T numbers are formed by `@`: it walks over the
    tokens with a state of D·N·V numbers, in O(T D N V) time and O(D V (N + T)) memory for each sequence.
    `rows` and `dense` take O(D T T) memory: pick a few channels first. Decays stay logarithms and are only
    ever added, so nothing overflows.

    Source: A. Gu and T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", COLM 2024,
    section 3 and algorithm 2; as a matrix, A. Ali et al., "The Hidden Attention of Mamba Models", 2024.

    Args:
        c: what reads the state, (..., 1, T, N) where all channels share it, as in Mamba, or (..., D, T, N).
        b: what enters the state, of the same shape.
        rate: A, (D, N) or (..., D, N), in (−∞, 0].
        step: Δ, (..., D, T), finite and not negative. As a decay that of the first token has no part.

    Raises:
        ShapeError: if they do not fit together.

    Examples:
        >>> import torch
        >>> one, rate = torch.ones(1, 3, 1), torch.tensor([[0.5], [0.25]]).log()
        >>> SelectiveMixing(one, one, rate, torch.ones(2, 3)).dense()[1].tolist()
        [[1.0, 0.0, 0.0], [0.25, 1.0, 0.0], [0.0625, 0.25, 1.0]]
    """

    kind = "selective"

    def __init__(
        self,
        c: Float[Tensor, "*shared T N"],
        b: Float[Tensor, "*shared T N"],
        rate: Float[Tensor, "*rates N"],
        step: Float[Tensor, "*channels T"],
    ) -> None:
        _check(c, b, rate, step)
        self.c, self.b, self.rate, self.step = c, b, rate, step

    @property
    def shape(self) -> torch.Size:
        """Leading axes, channels, T, T."""
        return torch.Size([*self.step.shape, self.step.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the types it was made from."""
        narrow = torch.promote_types(self.c.dtype, self.rate.dtype)
        return torch.promote_types(narrow, self.step.dtype)

    @property
    def device(self) -> torch.device:
        """Device of c."""
        return self.c.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Summed over the features of the state one by one: O((stop − start) T N) for each channel."""
        if stop - start > ROW_BLOCK:  # what is summed takes several times the memory of the rows
            edges = [*range(start, stop, ROW_BLOCK), stop]
            return torch.cat([self.rows(low, high) for low, high in pairwise(edges)], dim=-2)
        c, b, rate, step = self._tensors(compute_dtype(self.dtype))
        c, b, step = c[..., start:stop, :], b[..., :stop, :], step[..., :stop]
        # 0 · ∞ above the diagonal would be no number: finite, and cut off at the end
        time = (-log_weights(-step, start)).clamp(max=torch.finfo(step.dtype).max)
        rows = torch.zeros_like(time)
        for n in range(c.shape[-1]):
            products = c[..., n, None] * b[..., None, :, n]
            rows = rows + products * (rate[..., n, None, None] * time).exp()
        return F.pad((rows * step[..., None, :]).tril(start), (0, self.shape[-1] - stop))

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Entries on and below the diagonal."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows of the support: what lies on and below the diagonal."""
        seen = on_or_below(start, stop, self.shape[-1], self.device)
        return seen.expand(*self.shape[:-2], -1, -1)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V."""
        self._check(values, self.shape[-1], "M @ values")
        c, b, rate, step = self._tensors(self._work(values))
        return selective_scan(c, b, rate, step, values.to(c.dtype) * step[..., None]).to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U, scanned from the end."""
        self._check(values, self.shape[-2], "M.mT @ values")
        c, b, rate, step = self._tensors(self._work(values))
        mixed = selective_scan_transposed(c, b, rate, step, values.to(c.dtype))
        return (mixed * step[..., None]).to(values.dtype)

    @property
    def may_hide_columns(self) -> bool:
        """It has no mask: every token is seen by itself."""
        return False

    def __getitem__(self, index: Index) -> "SelectiveMixing":
        """Pick sequences and channels; c and b stay shared by channels of one sequence."""
        channels = self.step.shape[:-1]
        place = leading(torch.arange(channels.numel()).view(*channels, 1, 1), index)[..., 0, 0]
        step = leading(self.step[..., None], index)[..., 0]
        rate = leading(self.rate.expand(*channels, -1)[..., None, :], index)[..., 0, :]
        if self.c.shape[:-2] == channels:
            return SelectiveMixing(leading(self.c, index), leading(self.b, index), rate, step)
        sequence = place // channels[-1]
        if place.ndim and bool((sequence == sequence[..., :1]).all()):
            sequence = sequence[..., :1]
        c, b = (shared.flatten(0, -3)[sequence.to(self.device)] for shared in (self.c, self.b))
        return SelectiveMixing(c, b, rate, step)

    def _map(self, change: TensorMap) -> "SelectiveMixing":
        return SelectiveMixing(change(self.c), change(self.b), change(self.rate), change(self.step))

    def _tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.c.to(dtype), self.b.to(dtype), self.rate.to(dtype), self.step.to(dtype)

    def _work(self, values: Tensor) -> torch.dtype:
        """The type to sum in."""
        return compute_dtype(torch.promote_types(self.dtype, values.dtype))


def _check(c: Tensor, b: Tensor, rate: Tensor, step: Tensor) -> None:
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
            expected="c and b (..., 1 or D, T, N), rate (D, N) or (..., D, N), step (..., D, T), T and N ≥ 1",
            got=f"c {tuple(c.shape)}, b {tuple(b.shape)}, rate {tuple(rate.shape)}, step {tuple(step.shape)}",
            fix="Give c and b an axis of channels before the tokens: `c.unsqueeze(-3)`.",
        )
