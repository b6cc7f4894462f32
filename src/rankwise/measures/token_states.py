"""Measures of token states: spread, norm, cosine similarity, rank, update by a block, coding rate."""

import math

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from rankwise._internals.linalg import MATRIX, mean_distance, norm, ratio, unit_scale
from rankwise.errors import RankwiseError, ShapeError, in_range
from rankwise.measures.rank import effective_rank, scaled_spectrum
from rankwise.measures.registry import as_tokens, measure, to_float64
from rankwise.shapes import TokenMask, Tokens

__all__ = [
    "coding_rate",
    "mean_cosine",
    "relative_update",
    "state_effective_rank",
    "token_norm",
    "token_spread",
    "variational_rate",
]

EPS = torch.finfo(torch.float64).eps
RTOL = 1e-6
"""Largest relative error of a coding rate that rounding may cause."""


@measure("tokens", degree=0)
def token_spread(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None, normalized: bool = True
) -> Float64[Tensor, " B"]:
    """Return the distance μ of the tokens from their mean, by default divided by the norm of the tokens.

    Formula: μ(Y) = ‖Y − 1ȳᵀ‖_F, ȳ the mean token; divided by ‖Y‖_F if ``normalized``, with 0/0 = 0.
    Range: [0, ‖Y‖_F], or [0, 1] if ``normalized``; 0 = all tokens equal, or a single token. NaN for a
    sequence without a real token, or with NaN or infinity in a real token. Padding is ignored.
    Cost: O(T D).
    Numerics: the first real token is subtracted from all before they are centered. The relative error stays
    near √T·1e-16 even for nearly equal tokens, and equal tokens give exactly 0.
    Source: μ is the collapse measure of the paper on λ-skip connections, "the architectural component that
    prevents rank collapse". Normalize for models whose norms change with depth.

    Args:
        tokens: token states.
        mask: True for real tokens; by default all are real.
        normalized: True to return μ/‖Y‖_F, False to return μ.

    Raises:
        ShapeError: if tokens or mask have the wrong shape or dtype.

    Examples:
        >>> import torch
        >>> states = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]], [[3.0, 4.0], [3.0, 4.0]]])
        >>> token_spread(states).tolist()
        [1.0, 0.0]
    """
    states, valid, usable = as_tokens(tokens, mask, "`token_spread`")
    unit = unit_scale(states, MATRIX)
    states = states / unit
    distance = mean_distance(states, valid)
    share = ratio(distance, norm(states, MATRIX)).clamp(max=1)
    return (share if normalized else distance * unit[:, 0, 0]).masked_fill(~usable, math.nan)


@measure("tokens", degree=1)
def token_norm(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the Frobenius norm ‖Y‖_F of the token states of each sequence.

    Range: [0, ∞). NaN for a sequence without a real token, or with NaN or infinity in a real token.
    Cost: O(T D).

    Args:
        tokens: token states.
        mask: True for real tokens; by default all are real.

    Raises:
        ShapeError: if tokens or mask have the wrong shape or dtype.

    Examples:
        >>> import torch
        >>> token_norm(torch.tensor([[[3.0], [4.0]]])).item()
        5.0
    """
    states, _, usable = as_tokens(tokens, mask, "`token_norm`")
    return norm(states, MATRIX).masked_fill(~usable, math.nan)


@measure("tokens", degree=0)
def mean_cosine(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the mean cosine similarity over pairs of different tokens.

    Formula: Σ_{i≠j} ⟨u_i, u_j⟩ / (n(n − 1)) = (‖Σ u_i‖² − Σ‖u_i‖²) / (n(n − 1)), u_i = y_i/‖y_i‖. Tokens of
    norm 0 have no direction and are left out.
    Range: [−1/(n − 1), 1]; 1 = all tokens point the same way, near 0 = unrelated. Independent of the lengths
    of the tokens. NaN for fewer than two tokens with a direction, or with NaN or infinity in a real one.
    Cost: O(T D); no T×T matrix is formed.
    Numerics: the sum cancels; the absolute error is about 1e-16.

    Args:
        tokens: token states.
        mask: True for real tokens; by default all are real.

    Raises:
        ShapeError: if tokens or mask have the wrong shape or dtype.

    Examples:
        >>> import torch
        >>> states = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [3.0, 3.0]]])
        >>> mean_cosine(states).round(decimals=6).tolist()
        [0.0, 1.0]
    """
    states, _, usable = as_tokens(tokens, mask, "`mean_cosine`")
    states = states / unit_scale(states, (-1,))
    norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    units = ratio(states, norms.expand_as(states))
    count = (norms[..., 0] > 0).sum(-1)
    pairs = (count * (count - 1)).to(torch.float64)
    total = units.sum(1).square().sum(-1) - units.square().sum(MATRIX)
    return (total / pairs).clamp(-1, 1).masked_fill(~usable | (count < 2), math.nan)


@measure("tokens", degree=0)
def state_effective_rank(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Return the effective rank of the token states.

    Formula: `effective_rank` of the T×D matrix of real tokens. Padding becomes rows of zeros, which do not
    change the singular values.
    Range: [1, min(n, D)] for n real tokens, 0 if all are zero; 1 = all tokens on one line through 0. NaN for
    a sequence without a real token, or with NaN or infinity in one.
    Cost: a dense decomposition, O(T D min(T, D)).
    Numerics: the SVD, because a Gram matrix loses singular values below 1e-8·σ_1.
    Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Args:
        tokens: token states.
        mask: True for real tokens; by default all are real.

    Raises:
        ShapeError: if tokens or mask have the wrong shape or dtype.

    Examples:
        >>> import torch
        >>> state_effective_rank(torch.eye(3, 8)[None]).round(decimals=6).tolist()
        [3.0]
    """
    states, _, usable = as_tokens(tokens, mask, "`state_effective_rank`")
    return effective_rank(states).masked_fill(~usable, math.nan)


def relative_update(before: Tokens, after: Tokens, mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the relative size of the update of a block, apart from a scaling of the states.

    Formula: min_c ‖Z − cY‖_F/‖Z‖_F = √(1 − ⟨Y, Z⟩²/(‖Y‖²‖Z‖²)), Y/Z: states before/after; 0 if Z is 0.
    Range: [0, 1]; 0 = the block only scales its input: it is inactive, or its skip connection dominates.
    Independent of the scale and sign of Y and Z. NaN if a state is not finite or no token is real.
    Cost: O(T D).
    Numerics: the remainder Z − cY itself is summed: 1 − cos² would lose all digits below 1e-8.

    Args:
        before: states that the block reads.
        after: states that the block returns.
        mask: True for real tokens; by default all are real.

    Raises:
        ShapeError: if the states are not of one shape (B, T, D), or the mask is not Bool (B, T).

    Examples:
        >>> import torch
        >>> y = torch.randn(1, 5, 3)
        >>> bool(relative_update(y, -2 * y) < 1e-7)
        True
        >>> relative_update(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])).item()
        1.0
    """
    if before.shape != after.shape:
        raise ShapeError(
            "`relative_update`",
            expected="states of one shape before and after",
            got=f"{tuple(before.shape)} and {tuple(after.shape)}",
            fix="Compare states of one stack, layer by layer.",
        )
    y, _, usable = as_tokens(before, mask, "`relative_update`")
    z, _, also = as_tokens(after, mask, "`relative_update`")
    y, z = (states / unit_scale(states, MATRIX) for states in (y, z))
    along = ratio((y * z).sum(MATRIX), y.square().sum(MATRIX))
    rest = norm(z - along[:, None, None] * y, MATRIX)
    return ratio(rest, norm(z, MATRIX)).clamp(max=1).masked_fill(~(usable & also), math.nan)


@measure("tokens", degree=None)
def coding_rate(
    tokens: Shaped[Tensor, "B T D"], eps: float = 0.5, mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Return the coding rate of the tokens up to a distortion ε, which measures the volume they fill.

    Formula: R(Z) = ½ logdet(I + D/(n ε²)·Z Zᵀ) = ½ Σ_i log(1 + D/(n ε²)·σ_i²), Z the D×n matrix of the n real
    tokens, σ_i its singular values; natural logarithm. Tokens are neither centered nor normalized. To
    ignore lengths, normalize the tokens first, as the paper does.
    Range: [0, ∞); 0 = all tokens zero. Grows with the scale and, at a given ‖Z‖_F, with the number of
    directions. NaN for a sequence without a real token, or with NaN or infinity in one.
    Cost: a dense decomposition, O(T D min(T, D)).
    Numerics: singular values and log1p, because a Cholesky factor loses small directions, and fails if
    σ_1² D/(n ε²) is near 1e16. Rounding turns a singular value of 0 into 1e-16·σ_1. If 1e-16·σ_1 exceeds
    ε, as for large tokens with a direction missing, float64 cannot resolve the rate: an error is raised.
    Source: Yu et al., "Learning Diverse and Discriminative Representations via the Principle of Maximal
    Coding Rate Reduction", NeurIPS 2020, Section 2. The published code calls ε² ``eps``.

    Args:
        tokens: token states.
        eps: distortion ε.
        mask: True for real tokens; by default all are real.

    Raises:
        ShapeError: if tokens or mask have the wrong shape or dtype.
        RankwiseError: if ``eps`` is not finite and positive, or if rounding could change a rate by 1e-6 of
            it.

    Examples:
        >>> import torch
        >>> rate = coding_rate(torch.eye(2)[None], eps=1.0)  # σ = (1, 1), D/n = 1: log 2
        >>> round(rate.item(), 6)
        0.693147
    """
    in_range("`eps`", eps, "(0, inf)", fix="ε is the allowed distortion, such as 0.5.")
    states, valid, usable = as_tokens(tokens, mask, "`coding_rate`")
    count = valid.sum(1, dtype=torch.float64).clamp(min=1)
    sigma, scale = scaled_spectrum(states, "`coding_rate`")
    units = scale[:, None], ((states.shape[-1] / count).sqrt() / eps)[:, None]
    rate = _log1p_product(sigma.square(), *units).sum(-1) / 2
    off = 4 * max(states.shape[1:]) * EPS * sigma[:, :1]  # error bound of a backward stable SVD
    far, near = (
        _log1p_product(x.square(), *units).sum(-1) / 2 for x in (sigma + off, (sigma - off).clamp(min=0))
    )
    unsure = (far - near > RTOL * far).nonzero()[:, 0].tolist()
    if unsure:
        at = unsure[0]
        raise RankwiseError(
            "`coding_rate`",
            expected=f"tokens whose rate is known to {RTOL:g} of it after rounding",
            got=f"sequence {at}, whose rate is between {float(near[at]):.6g} and {float(far[at]):.6g}",
            fix="Normalize the tokens first, or pass an `eps` near their size: rounding hides directions "
            "below 1e-16 of the largest, and these are above ε.",
        )
    return rate.masked_fill(~usable, math.nan)


def variational_rate(
    projection: Float[Tensor, "B H T K"],
    membership: Float[Tensor, "B H T"],
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float64[Tensor, "B H"]:
    """Return the term of each head in R_c^var, the variational coding rate of tokens grouped by membership.

    Formula: ½ (n_h/n) Σ_k log(1 + m_hk), m_hk = Σ_t Π_th w_thk² / n_h, n_h = Σ_t Π_th, n = Σ_h n_h. The sum
    over heads is R_c^var; a TSSA layer is derived as a gradient step on R_c^var.
    Range: [0, ∞) nats; low = each group uses few axes of its head. The rate grows with the scale of w. NaN
    if a number is not finite, or no token is real.
    Cost: O(T K) per head.
    Source: Wu et al., "Token Statistics Transformer", the variational form of the rate reduction objective,
    with f = log(1 + ·) and without its constants.

    Args:
        projection: w, the tokens in the subspace of each head.
        membership: Π ≥ 0, weight of each token in the group of each head; sums to 1 over the heads.
        mask: True for real tokens; by default all are real.

    Raises:
        ShapeError: if the shapes of projection and membership do not fit together.

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
            expected="projection (B, H, T, K) and membership (B, H, T)",
            got=f"{tuple(projection.shape)} and {tuple(membership.shape)}",
            fix="Move the heads before the tokens.",
        )
    w, share = (to_float64(value, "`variational_rate`") for value in (projection, membership))
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
    """Return log(1 + x·Π units²) for x ≥ 0 of moderate size, also if the product overflows."""
    unit = math.prod(units[1:], start=units[0])
    product = x * unit * unit
    large = product > 1e200
    logarithm = torch.where(large, x, 1.0).log() + 2 * torch.stack([u.log() for u in units]).sum(0)
    return torch.where(large, logarithm, torch.where(large, 0.0, product).log1p())
