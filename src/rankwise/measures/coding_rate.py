"""How many nats a sequence of tokens takes, whole or in groups: the objective of TSSA."""

import math

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from rankwise.errors import RankwiseError, ShapeError
from rankwise.linalg import ratio, unit_scale
from rankwise.measures.inputs import as_tokens, to_float64
from rankwise.measures.rank import scaled_spectrum
from rankwise.shapes import TokenMask

EPS = torch.finfo(torch.float64).eps
RTOL = 1e-6
"""How far rounding may move a rate, as a share of it."""


def coding_rate(
    tokens: Shaped[Tensor, "B T D"], eps: float = 0.5, mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Rate needed to code the tokens up to a distortion ε: the volume they fill.

    Formula: R(Z) = ½ logdet(I + D/(n ε²)·Z Zᵀ) = ½ Σ_i log(1 + D/(n ε²)·σ_i²), Z the D×n matrix of the n real
    tokens, σ_i its singular values; natural logarithm. Tokens are neither centred nor normalised: do so
    before, if lengths should not count (the paper puts each on the unit sphere).
    Range: [0, ∞); 0 = all tokens zero. Grows with the scale and, at a given ‖Z‖_F, with the number of
    directions used. NaN for a sequence without a real token, or with NaN or infinity in one.
    Cost: a dense decomposition, O(T D min(T, D)).
    Numerics: singular values and log1p instead of a Cholesky factor, which loses the small directions, and at
    last fails, once σ_1² D/(n ε²) nears 1e16. Rounding leaves 1e-16·σ_1 of a singular value of 0, so large
    tokens without a small direction of their own have no rate in float64: refused.
    Source: Yu et al., "Learning Diverse and Discriminative Representations via the Principle of Maximal
    Coding Rate Reduction", NeurIPS 2020, Section 2. Code published with it calls ε² ``eps``.

    Args:
        tokens: token states.
        eps: distortion ε.
        mask: True where a token is real; all are, by default.

    Raises:
        ShapeError: if tokens or mask are of the wrong shape or kind.
        RankwiseError: if ``eps`` is not finite and positive, or where rounding may move a rate by 1e-6 of it.

    Examples:
        >>> import torch
        >>> rate = coding_rate(torch.eye(2)[None], eps=1.0)  # σ = (1, 1), D/n = 1: log 2
        >>> round(rate.item(), 6)
        0.693147
    """
    if not (math.isfinite(eps) and eps > 0):
        raise RankwiseError(
            "`eps`",
            wanted="a finite number above 0",
            got=str(eps),
            fix="It is the distortion allowed, such as 0.5.",
        )
    states, valid, usable = as_tokens(tokens, mask, "`coding_rate`")
    count = valid.sum(1, dtype=torch.float64).clamp(min=1)
    sigma, scale = scaled_spectrum(states, "`coding_rate`")
    units = scale[:, None], ((states.shape[-1] / count).sqrt() / eps)[:, None]
    rate = _log1p_product(sigma.square(), *units).sum(-1) / 2
    off = 4 * max(states.shape[1:]) * EPS * sigma[:, :1]  # what a backward stable SVD may be off by
    far, near = (
        _log1p_product(x.square(), *units).sum(-1) / 2 for x in (sigma + off, (sigma - off).clamp(min=0))
    )
    _check_rounding(near, far)
    return rate.masked_fill(~usable, math.nan)


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
    return 0.5 * size / size.sum(1, keepdim=True) * _log1p_product(moment, unit.squeeze(-2)).sum(-1)


def _log1p_product(x: Float64[Tensor, "..."], *units: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """log(1 + x·Π units²) for x ≥ 0 of moderate size, also where the product overflows."""
    unit = math.prod(units[1:], start=units[0])
    product = x * unit * unit
    large = product > 1e200
    logarithm = torch.where(large, x, 1.0).log() + 2 * torch.stack([u.log() for u in units]).sum(0)
    return torch.where(large, logarithm, torch.where(large, 0.0, product).log1p())


def _check_rounding(low: Float64[Tensor, " B"], high: Float64[Tensor, " B"]) -> None:
    unsure = (high - low > RTOL * high).nonzero()[:, 0].tolist()
    if unsure:
        at = unsure[0]
        raise RankwiseError(
            "`coding_rate`",
            wanted=f"tokens whose rate rounding leaves right to {RTOL:g} of it",
            got=f"sequence {at}, whose rate is anything from {float(low[at]):.6g} to {float(high[at]):.6g}",
            fix="Normalise the tokens first, or give an `eps` near their size: rounding hides directions "
            "below 1e-16 of the largest, and these lie above ε.",
        )
