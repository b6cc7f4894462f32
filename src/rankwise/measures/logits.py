"""Measures of the queries, keys and logits of attention heads, as training engineers log them."""

import math

from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from rankwise._internals.linalg import as_float64, norm
from rankwise.measures.registry import Mixing, measure
from rankwise.measures.row_walk import RowShares, RowWalk, walk_rows

__all__ = ["largest_logit", "mean_norm"]


@measure("heads", RowShares, degree=None)
def largest_logit(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the largest logit of an attention head: the largest input of its softmax.

    Formula: max z_ij over rows i and columns j that no mask hides, where M = softmax(z). Scale, position bias
    and soft cap are included, as in z_ij = q_i·k_j/√K + b_ij.
    Range: (−∞, ∞); NaN for mixers without softmax, for a tensor, if masks hide all entries, and for a matrix
    with NaN or infinity.
    Cost: O(T S K) time per matrix; next to other measures of rows only a maximum, O(T S).
    Source: Kimi K2, arXiv 2507.20534, whose training clips the weights of heads with a logit above 100.

    Examples:
        >>> import torch
        >>> from rankwise.operators import SoftmaxMixing
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
        >>> largest_logit(SoftmaxMixing(query, key, scale=0.5)).item()
        4.0
    """
    walk = walk_rows(op, "largest_logit")
    largest = walk.finite_only(walk.largest_logit)
    return largest.masked_fill(largest.isinf(), math.nan)


def mean_norm(
    vectors: Shaped[Tensor, "*batch N K"], real: Bool[Tensor, "B N"] | None = None
) -> Float64[Tensor, "*batch"]:
    """Return the mean norm of the queries or of the keys of attention heads, (1/N) Σ_i ‖x_i‖.

    Range: [0, ∞); NaN if no vector is real.
    Cost: O(N K) time per head.

    Args:
        vectors: ``op.query`` or ``op.key`` of a `SoftmaxMixing`: the vectors that enter the product.
        real: True for real tokens, for vectors (B, H, N, K); by default all tokens are real.

    Examples:
        >>> import torch
        >>> mean_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).item()
        3.0
    """
    norms = norm(as_float64(vectors.detach()), (-1,))
    if real is None:
        return norms.mean(-1)
    real = real[:, None].to(norms.device)
    return norms.where(real, 0.0).sum(-1) / real.sum(-1)
