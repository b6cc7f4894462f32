"""Softmax attention, from queries, keys and a mask."""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import (
    Index,
    MixingOperator,
    TensorMap,
    checked_mask,
    compute_dtype,
    leading,
    on_or_below,
)

MASKED_BELOW = -9e3
"""A bias this low means "masked": exp(−9000) is 0 in any dtype. Seen: −inf, finfo.min, −1e4, −1e9."""


class SoftmaxMixing(MixingOperator):
    r"""Softmax attention ``M = softmax(Q Kᵀ · scale + mask)``, never formed unless asked.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`. Fewer key heads than query
    heads are grouped: query head h reads key head ``h // (H // Hkv)``. A row that may see nothing is zero.

    Args:
        query: (..., H, T, K).
        key: (..., Hkv, S, K), H a multiple of Hkv.
        mask: bool (True = may be seen) or an additive bias, broadcastable to (..., H, T, S).
        is_causal: row i sees columns 0 … i (counted from the top left, as torch does).
        scale: 1/√K by default.

    Raises:
        ShapeError: if queries, keys and mask do not fit together.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
        >>> operator = SoftmaxMixing(q, k, is_causal=True)
        >>> operator.shape, bool((operator.dense().sum(-1) - 1).abs().max() < 1e-6)
        (torch.Size([2, 4, 16, 16]), True)
    """

    kind = "softmax"

    def __init__(
        self,
        query: Float[Tensor, "... T K"],
        key: Float[Tensor, "... S K"],
        mask: Shaped[Tensor, "..."] | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        _check_query_key(query, key)
        self.query, self.key, self.is_causal = query, key, is_causal
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        self.mask = None if mask is None else checked_mask(mask, self.shape, "`SoftmaxMixing` mask")

    @property
    def shape(self) -> torch.Size:
        """Leading axes, H, T, S."""
        return torch.Size([*self.query.shape[:-1], self.key.shape[-2]])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the queries."""
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        """Device of the queries."""
        return self.query.device

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[-3] // self.key.shape[-3] if self.query.ndim > 2 else 1

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Softmax of the scores of rows ``start`` to ``stop``: O((stop − start) S K)."""
        scores = self._scores(start, stop)
        # A row of −inf alone has no softmax; torch's own attention gives zero there, and so do we.
        return torch.softmax(scores, dim=-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Entries that neither the mask nor causality removes."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        sources = self.shape[-1]
        if self.is_causal:
            allowed = on_or_below(start, stop, sources, self.device)
        else:
            allowed = torch.ones(1, sources, dtype=torch.bool, device=self.device)
        if self.mask is not None:
            mask = self._mask_rows(self.mask, start, stop)
            allowed = allowed & (mask if mask.dtype == torch.bool else mask > MASKED_BELOW)
        return allowed.expand(*self.shape[:-2], stop - start, sources)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V by torch's fused attention: the matrix is not formed; values of H or Hkv heads."""
        self._check(values, self.shape[-1], "M @ values")
        if self.is_causal and self.mask is not None:  # fused attention takes one of the two
            return super().__matmul__(self._fitted(values))
        values = self._fitted(values)
        width, given = self.query.shape[-1], values.shape[-1]
        # Values of another width than K would take the backend's way through the whole matrix.
        whole = F.pad(values, (0, -given % width))
        parts = [self._attend(part) for part in whole.split(width, -1)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1))[..., :given]

    def _attend(self, values: Tensor) -> Tensor:
        mask, dtype = self.mask, values.dtype
        if mask is not None and mask.dtype != torch.bool:
            ends = torch.finfo(dtype)  # a bias may be out of the range of half precision, and is not masked
            mask = torch.where(mask.isinf(), mask, mask.clamp(ends.min, ends.max)).to(dtype)
        query, key = self.query.to(dtype), self._ungrouped(self.key).to(dtype)
        return F.scaled_dot_product_attention(query, key, values, mask, 0.0, self.is_causal, scale=self.scale)

    @property
    def may_hide_columns(self) -> bool:
        """Whether it has a mask other than the causal one."""
        return self.mask is not None

    def __getitem__(self, index: Index) -> "SoftmaxMixing":
        """Pick sequences and heads: ``operator[0, 3]``, ``operator[:, 1:2]``."""
        key = leading(self._ungrouped(self.key), index)
        mask = self.mask
        if mask is not None:  # its last two axes may be 1, and stay so
            mask = leading(mask.expand(*self.shape[:-2], *mask.shape[-2:]), index)
        return SoftmaxMixing(leading(self.query, index), key, mask, self.is_causal, self.scale)

    def _map(self, change: TensorMap) -> "SoftmaxMixing":
        mask = None if self.mask is None else change(self.mask)
        return SoftmaxMixing(change(self.query), change(self.key), mask, self.is_causal, self.scale)

    def _scores(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        dtype = compute_dtype(self.dtype)
        query, key = self.query[..., start:stop, :].to(dtype), self._ungrouped(self.key.to(dtype))
        scores = (query * self.scale) @ key.mT
        if self.mask is not None:
            mask = self._mask_rows(self.mask, start, stop)
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = scores + mask.to(dtype)
        if self.is_causal:
            seen = on_or_below(start, stop, self.shape[-1], self.device)
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores

    @staticmethod
    def _mask_rows(mask: Tensor, start: int, stop: int) -> Tensor:
        return mask if mask.shape[-2] == 1 else mask[..., start:stop, :]

    def _takes(self, leading_axes: torch.Size) -> bool:
        """Values may come once for each key head, too."""
        if self.groups > 1 and leading_axes and leading_axes[-1] == self.key.shape[-3]:
            leading_axes = torch.Size([*leading_axes[:-1], 1])
        return super()._takes(leading_axes)

    def _ungrouped(self, tensor: Tensor) -> Tensor:
        """Key heads (or their values), one for each query head."""
        return tensor.repeat_interleave(self.groups, dim=-3) if self.groups > 1 else tensor

    def _fitted(self, values: Tensor) -> Tensor:
        """Values with all the leading axes that fused attention wants."""
        if self.groups > 1 and values.ndim > 2 and values.shape[-3] == self.key.shape[-3]:
            values = self._ungrouped(values)
        leading_axes = torch.broadcast_shapes(values.shape[:-2], self.shape[:-2])
        return values.expand(*leading_axes, *values.shape[-2:])


def _check_query_key(query: Tensor, key: Tensor) -> None:
    fits = (
        query.ndim == key.ndim >= 2
        and query.shape[-1] == key.shape[-1]
        and query.shape[:-3] == key.shape[:-3]
        and 0 not in (*query.shape, *key.shape)
        and (query.ndim == 2 or query.shape[-3] % key.shape[-3] == 0)
    )
    if not fits:
        raise ShapeError(
            "`SoftmaxMixing`",
            expected="query (..., H, T, K) and key (..., Hkv, S, K), H a multiple of Hkv and no empty axis",
            got=f"query {tuple(query.shape)} and key {tuple(key.shape)}",
            fix="Split the heads before you pass them.",
        )
