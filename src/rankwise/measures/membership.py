"""How tokens are grouped, and what the groups cost to describe: the objective of TSSA."""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.measures._inputs import ratio, to_float64, unit_scale
from rankwise.measures.coding_rate import log1p_product


def variational_rate(
    projection: Float[Tensor, "B H T K"],
    membership: Float[Tensor, "B H T"],
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float64[Tensor, "B H"]:
    """Share of each head in the rate of the tokens grouped by their memberships, R_c^var.

    Formula: ½ (n_h/n) Σ_k log(1 + m_hk), m_hk = Σ_t Π_th w_thk² / n_h, n_h = Σ_t Π_th, n = Σ_h n_h. The sum
    over heads is R_c^var, on which a TSSA layer is derived as a gradient step.
    Range: [0, ∞) nats; low = each group lies near few axes of its head. It grows with the scale of w.
    NaN where a number is not finite, or no token is real.
    Cost: O(T K) for each head.
    Source: Wu et al., "Token Statistics Transformer", the variational form of the rate reduction objective,
    with f = log(1 + ·) and its constants left out.

    Args:
        projection: w, the tokens in the subspace of each head.
        membership: Π, at least 0; the heads of a token sum to 1.
        mask: True where a token is real.

    Raises:
        ShapeError: if they do not fit together.

    Examples:
        >>> import torch
        >>> w = torch.ones(1, 2, 5, 3)
        >>> rate = variational_rate(w, torch.full((1, 2, 5), 0.5))
        >>> round(rate.sum().item(), 4)  # ½ · 3 · log 2
        1.0397
    """
    if projection.ndim != 4 or membership.shape != projection.shape[:3]:
        raise ShapeError(
            "`variational_rate`",
            wanted="projection (B, H, T, K) and membership (B, H, T)",
            got=f"{tuple(projection.shape)} and {tuple(membership.shape)}",
            fix="Move the heads before the tokens.",
        )
    w, share = (to_float64(one, "`variational_rate`") for one in (projection, membership))
    if mask is not None:
        share = share.masked_fill(~mask[:, None].to(share.device), 0)
        w = w.masked_fill(~mask[:, None, :, None].to(w.device), 0)
    size = share.sum(-1)
    weights = share / unit_scale(share, (-1,))
    weights = ratio(weights, weights.sum(-1, keepdim=True).expand_as(weights))
    unit = unit_scale(w, (-2,))
    moment = torch.einsum("bht,bhtk->bhk", weights, (w / unit).square())
    return 0.5 * size / size.sum(1, keepdim=True) * log1p_product(moment, unit.squeeze(-2)).sum(-1)
