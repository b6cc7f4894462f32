"""Softmax attention as a mixing matrix (an operator), from queries, keys and a mask."""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, causal_rows, check_mask, compute_dtype

MASKED_BELOW = -9e3
"""Largest bias that masks an entry: exp(−9000) is 0. Models mask with −inf, finfo.min or −1e4."""
NO_WEIGHT = math.log(torch.finfo(torch.float32).tiny)
"""−87.3: a score 87.3 below the largest score of its row has a weight below the least normal float32."""


class SoftmaxMixing(MixingOperator):
    r"""Softmax attention ``M = softmax(Q Kᵀ · scale + mask)``.

    The arguments are the arguments of `torch.nn.functional.scaled_dot_product_attention`. With grouped-query
    attention, query head h of H uses key head ``h // (H // Hkv)`` of Hkv. A row that sees no column is zero.

    Args:
        query: queries, (..., H, T, K).
        key: keys, (..., Hkv, S, K), where H is a multiple of Hkv.
        mask: boolean mask (True = visible) or additive bias, broadcastable to (..., H, T, S).
        is_causal: True if row i sees only columns 0 … i, as in torch.
        scale: factor of the logits, 1/√K by default.

    Raises:
        ShapeError: if the shapes of queries, keys and mask do not fit together.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
        >>> operator = SoftmaxMixing(q, k, is_causal=True)
        >>> operator.shape, bool((operator.dense().sum(-1) - 1).abs().max() < 1e-6)
        (torch.Size([2, 4, 16, 16]), True)
    """

    kind = "softmax"
    held = ("query", "key")
    masks = ("mask",)
    options = ("is_causal", "scale")

    def __init__(
        self,
        query: Float[Tensor, "... T K"],
        key: Float[Tensor, "... S K"],
        mask: Shaped[Tensor, "..."] | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
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
                expected="query (..., H, T, K) and key (..., Hkv, S, K), H a multiple of Hkv and no empty "
                "axis",
                got=f"query {tuple(query.shape)} and key {tuple(key.shape)}",
                fix="Split the heads before you pass them.",
            )
        self.query, self.key, self.is_causal = query, key, is_causal
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        self.mask = None if mask is None else check_mask(mask, self.shape, "`SoftmaxMixing` mask")
        self.may_hide_columns = mask is not None

    @property
    def shape(self) -> torch.Size:
        """Shape (..., H, T, S) for H heads, T queries and S keys."""
        return torch.Size([*self.query.shape[:-1], self.key.shape[-2]])

    @property
    def heads_per_group(self) -> int:
        """Number of query heads that share one key head."""
        return self.query.shape[-3] // self.key.shape[-3] if self.query.ndim > 2 else 1

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows ``start`` to ``stop`` of M, the softmax of their logits: O((stop − start) S K) time."""
        return _softmax(self._logits(start, stop))

    def rows_with_logits(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return rows of M and their logits: scaled products of queries and keys, plus the bias."""
        logits, mask = self._logits(start, stop), self._mask_rows(start, stop)
        rows = _softmax(logits)
        if mask is not None and mask.dtype != torch.bool:
            logits = logits.masked_fill(mask <= MASKED_BELOW, -torch.inf)
        return rows, logits

    def _logits(self, start: int, stop: int) -> Tensor:
        work = compute_dtype(self.dtype)
        query, key = self.query[..., start:stop, :].to(work), self._repeat_groups(self.key.to(work))
        scores = (query * self.scale) @ key.mT
        mask = self._mask_rows(start, stop)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask.to(work)
        if self.is_causal:
            seen = causal_rows(start, stop, self.shape[-1], self.device)
            scores.masked_fill_(~seen, -torch.inf)
        return scores

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support: True where neither ``mask`` nor the causal mask hides an entry."""
        sources, mask = self.shape[-1], self._mask_rows(start, stop)
        everywhere = torch.ones(1, sources, dtype=torch.bool, device=self.device)
        allowed = causal_rows(start, stop, sources, self.device) if self.is_causal else everywhere
        if mask is not None:
            allowed = allowed & (mask if mask.dtype == torch.bool else mask > MASKED_BELOW)
        return allowed.expand(*self.shape[:-2], stop - start, sources)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return M V, by torch's fused attention if possible; values V may have H or Hkv heads."""
        self._check(values)
        if self._one_per_key_head(values.shape[:-2]):
            values = self._repeat_groups(values)
        leading = torch.broadcast_shapes(values.shape[:-2], self.shape[:-2])
        values = values.expand(*leading, *values.shape[-2:])
        if self.is_causal and self.mask is not None:  # fused attention accepts only one of these arguments
            return super().__matmul__(values)
        width = values.shape[-1]
        # If the width is not K, torch does not use its fused kernel and forms the whole matrix. So the values
        # are padded and split into parts of width K.
        whole = F.pad(values, (0, -width % self.query.shape[-1]))
        outputs = [self._attend(piece) for piece in whole.split(self.query.shape[-1], -1)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))[..., :width]

    def _attend(self, values: Tensor) -> Tensor:
        mask, dtype = self.mask, values.dtype
        if mask is not None and mask.dtype != torch.bool:
            ends = torch.finfo(dtype)  # a large finite bias must not become −inf in half precision
            mask = torch.where(mask.isinf(), mask, mask.clamp(ends.min, ends.max)).to(dtype)
        query, key = self.query.to(dtype), self._repeat_groups(self.key).to(dtype)
        return F.scaled_dot_product_attention(query, key, values, mask, 0.0, self.is_causal, scale=self.scale)

    def __getitem__(self, index: Index) -> "SoftmaxMixing":
        """Return selected sequences and heads, as in ``operator[0, 3]`` or ``operator[:, 1:2]``."""
        if self.heads_per_group == 1:
            return super().__getitem__(index)
        key = self._repeat_groups(self.key)
        return SoftmaxMixing(self.query, key, self.mask, self.is_causal, self.scale)[index]

    def _mask_rows(self, start: int, stop: int) -> Tensor | None:
        return self.mask if self.mask is None or self.mask.shape[-2] == 1 else self.mask[..., start:stop, :]

    def _accepts(self, leading: torch.Size) -> bool:
        """Return True if leading axes of values broadcast, or values have one head per key head."""
        return super()._accepts(
            torch.Size([*leading[:-1], 1]) if self._one_per_key_head(leading) else leading
        )

    def _one_per_key_head(self, leading: torch.Size) -> bool:
        return self.heads_per_group > 1 and len(leading) > 0 and leading[-1] == self.key.shape[-3]

    def _repeat_groups(self, tensor: Tensor) -> Tensor:
        """Return a tensor with H instead of Hkv heads: each key head is repeated for its query heads."""
        return tensor.repeat_interleave(self.heads_per_group, dim=-3) if self.heads_per_group > 1 else tensor


def _softmax(logits: Tensor) -> Tensor:
    """Return the softmax of rows. A row of −inf, whose softmax is NaN, is set to 0, as in torch."""
    rows, empty = torch.softmax(logits, dim=-1), logits.amax(-1, keepdim=True).isneginf()
    return rows.masked_fill(empty, 0) if bool(empty.any()) else rows


def hidden_by(bias: Tensor) -> Tensor:
    """Return booleans, True at entries of a bias that hide the scores to which the bias is added.

    Rule 1: an entry of at most −9000 hides its score. Rule 2: an entry hides its score if it is more than
    87.3 below the largest entry of its row (`NO_WEIGHT`), provided that a gap of more than 43.7 separates
    all such entries from the rest of the row. Thus −100 in shifted windows hides scores, but the evenly
    decreasing bias of ALiBi does not. Rule 2 never hides a column from all rows, because a column that no row
    sees counts as padding.
    """
    bias = bias.detach()
    bias = bias[None] if bias.dim() < 2 else bias
    low = bias < bias.amax(-1, keepdim=True) + NO_WEIGHT
    least_kept = bias.masked_fill(low, math.inf).amin(-1, keepdim=True)
    most_hidden = bias.masked_fill(~low, -math.inf).amax(-1, keepdim=True)
    apart = low & (least_kept - most_hidden > -NO_WEIGHT / 2)
    return (bias <= MASKED_BELOW) | (apart & ~apart.all(-2, keepdim=True))
