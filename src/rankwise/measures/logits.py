"""Measures of the queries, keys and logits of attention heads, as training engineers log them."""

import math

from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import float64_device
from rankwise.measures.registry import Mixing, measure
from rankwise.measures.row_walk import RowShares, RowWalk, walk_rows
from rankwise.operators import SoftmaxMixing

__all__ = ["key_norm", "largest_logit", "query_norm"]


@measure("heads", RowShares, degree=None)
def largest_logit(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the largest logit of an attention head: the largest number of which its softmax is taken.

    Formula: max over rows i and columns j that no mask hides of z_ij, where M = softmax(z). Scale, position
    bias and soft cap are included, for example z_ij = q_i·k_j/√K + b_ij.
    Range: (−∞, ∞). NaN if the logits are unknown, as for a tensor and mixers without softmax, if masks hide
    all entries, or for a matrix with NaN or infinity.
    Cost: O(T S K) time per matrix; nothing in a pass over the rows that other measures of rows share.
    Source: Kimi K2, arXiv 2507.20534, whose training clips the weights of heads with a logit above 100.

    Examples:
        >>> import torch
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
        >>> largest_logit(SoftmaxMixing(query, key, scale=0.5)).item()
        4.0
    """
    walk = walk_rows(op, "largest_logit")
    largest = walk.finite_only(walk.largest_logit)
    return largest.masked_fill(largest.isinf(), math.nan)


def query_norm(op: SoftmaxMixing, rows: Bool[Tensor, "B T"] | None = None) -> Float64[Tensor, "*batch"]:
    """Return the mean norm of the queries of attention heads.

    Formula: mean over queries of ‖q_i‖. The queries are the vectors that enter the product with keys: after
    norms and rotation, before the factor ``scale`` of the operator.
    Range: [0, ∞); NaN if there is no query.
    Cost: O(T K) time per head.

    Args:
        op: softmax attention operator, (..., H, T, S); with a mask, (B, H, T, S).
        rows: True for real queries; by default all queries are real.

    Examples:
        >>> import torch
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
        >>> query_norm(SoftmaxMixing(query, key)).item()
        5.0
    """
    return _mean_norm(op.query, rows)


def key_norm(op: SoftmaxMixing, columns: Bool[Tensor, "B S"] | None = None) -> Float64[Tensor, "*batch"]:
    """Return the mean norm of the keys of attention heads; query heads that share a key head have its norm.

    Formula: mean over keys of ‖k_j‖, with the keys that enter the product with queries.
    Range: [0, ∞); NaN if there is no key.
    Cost: O(S K) time per head.

    Args:
        op: softmax attention operator, (..., H, T, S); with a mask, (B, H, T, S).
        columns: True for real keys; by default all keys are real.

    Examples:
        >>> import torch
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])
        >>> key_norm(SoftmaxMixing(query, key)).item()
        3.0
    """
    norm = _mean_norm(op.key, columns)
    return norm.repeat_interleave(op.heads_per_group, -1) if op.heads_per_group > 1 else norm


def _mean_norm(vectors: Tensor, real: Tensor | None) -> Float64[Tensor, "*batch"]:
    norms = vectors.detach().to(float64_device(vectors.device)).double().norm(dim=-1)
    if real is None:
        return norms.mean(-1)
    real = real[:, None].to(norms.device)
    return norms.where(real, 0.0).sum(-1) / real.sum(-1)
