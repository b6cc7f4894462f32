"""Measures of token states: spread, norm, cosine similarity, rank, update by a block, coding rate."""

import math

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from rankwise._internals.linalg import (
    MATRIX,
    has_plain_squares,
    mean_distance,
    norm,
    ratio,
    to_range,
    unit_scale,
)
from rankwise.errors import ShapeError
from rankwise.measures.dense_spectrum import gram_or_svd, map_parts
from rankwise.measures.rank import entropy_rank
from rankwise.measures.registry import as_tokens, measure, to_float64
from rankwise.shapes import TokenMask, Tokens

STATE_RTOL = 1e-6
"""Bound on the relative error of the effective rank of token states from a Gram matrix; otherwise by SVD."""

__all__ = [
    "absolute_spread",
    "direction_spread",
    "effective_rank_without_massive",
    "largest_norm_ratio",
    "largest_norm_share",
    "massive_tokens",
    "mean_cosine",
    "relative_update",
    "spread",
    "state_effective_rank",
    "token_norm",
    "variational_rate",
]


@measure("tokens", degree=0)
def spread(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the spread μ/‖Y‖: the distance of the tokens from their mean, as a share of their norm.

    Formula: ‖Y − 1ȳᵀ‖_F/‖Y‖_F, where ȳ is the mean token; 0/0 = 0.
    Range: [0, 1]; 0 if all tokens are equal or there is only one. NaN for a sequence without a real token
    (``mask`` False), or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence.
    Numerics: see `absolute_spread`.
    Source: μ of the paper on λ-skip connections, "the architectural component that prevents rank collapse",
    divided by the norm, because norms of states change with depth.

    Examples:
        >>> import torch
        >>> states = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]], [[3.0, 4.0], [3.0, 4.0]]])
        >>> spread(states).tolist()
        [1.0, 0.0]
    """
    states, valid, usable = as_tokens(tokens, mask, "`spread`")
    states, _ = to_range(states)
    share = ratio(mean_distance(states, valid), norm(states, MATRIX)).clamp(max=1)
    return share.masked_fill(~usable, math.nan)


@measure("tokens", degree=1)
def absolute_spread(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the absolute spread μ: the distance of the tokens from their mean.

    Formula: μ(Y) = ‖Y − 1ȳᵀ‖_F, where ȳ is the mean token.
    Range: [0, ‖Y‖_F]; 0 if all tokens are equal or there is only one. NaN for a sequence without a real token
    (``mask`` False), or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence.
    Numerics: the first real token is subtracted from all tokens before the mean is subtracted. So the
    relative error is near √T·1e-16 even for nearly equal tokens, and equal tokens have the spread 0 exactly.
    Source: μ measures collapse in the paper on λ-skip connections, "the architectural component that
    prevents rank collapse".

    Examples:
        >>> import torch
        >>> absolute_spread(torch.tensor([[[3.0, 0.0], [-3.0, 0.0]]])).round(decimals=6).tolist()
        [4.242641]
    """
    states, valid, usable = as_tokens(tokens, mask, "`absolute_spread`")
    states, unit = to_range(states)
    return (mean_distance(states, valid) * unit).masked_fill(~usable, math.nan)


@measure("tokens", degree=1)
def token_norm(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the Frobenius norm ‖Y‖_F of the token states of each sequence.

    Range: [0, ∞). NaN for a sequence without a real token, or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence.

    Examples:
        >>> import torch
        >>> token_norm(torch.tensor([[[3.0], [4.0]]])).item()
        5.0
    """
    states, _, usable = as_tokens(tokens, mask, "`token_norm`")
    return norm(states, MATRIX).masked_fill(~usable, math.nan)


@measure("tokens", degree=0)
def mean_cosine(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the mean cosine similarity over all pairs of different tokens.

    Formula: Σ_{i≠j} ⟨u_i, u_j⟩ / (n(n − 1)) = (‖Σ u_i‖² − Σ‖u_i‖²) / (n(n − 1)) over n tokens y_i with
    directions u_i = y_i/‖y_i‖. Tokens of norm 0 have no direction and are left out.
    Range: [−1/(n − 1), 1]; 1 if all tokens have the same direction, near 0 for random directions. Independent
    of the norms of the tokens. NaN if fewer than two tokens are nonzero, or a real token is not finite.
    Cost: O(T D) time per sequence; no T×T matrix is formed.
    Numerics: cancellation in the sum limits the absolute error to about 1e-16.

    Examples:
        >>> import torch
        >>> states = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [3.0, 3.0]]])
        >>> mean_cosine(states).round(decimals=6).tolist()
        [0.0, 1.0]
    """
    states, _, usable = as_tokens(tokens, mask, "`mean_cosine`")
    units, nonzero = _directions(states)
    count = nonzero.sum(-1)
    pairs = (count * (count - 1)).to(torch.float64)
    total = units.sum(1).square().sum(-1) - units.square().sum(MATRIX)
    return (total / pairs).clamp(-1, 1).masked_fill(~usable | (count < 2), math.nan)


@measure("tokens", degree=0)
def direction_spread(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the direction spread: how far the middle token points away from the direction of most tokens.

    Formula: median over tokens of sin ∠(y_i, c), where angles above 90° count as 90°. The direction c is the
    mean of u_i = y_i/‖y_i‖ over the half of the tokens that is nearest to the mean of all u_i. Medians of an
    even number of values are the lower of the two in the middle. Tokens of norm 0 are left out.
    Range: [0, 1]; 0 if more than half of the tokens have one direction and the others point elsewhere, near
    √(1 − 2/T) for T random directions. Like `spread` for tokens of equal norm at equal angles to their mean,
    but norms do not count, and a minority of the tokens cannot hide that the others are equal: in most
    large decoders one token has more than 10 times the norm of the others. 0 without a token of nonzero norm.
    NaN for a sequence without a real token, or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence; no T×T matrix is formed.
    Numerics: the sine is the norm of u_i − ⟨u_i, c⟩c, so nearly equal tokens have an absolute error near
    1e-16. If two directions have half of the tokens each, the value is the sine between
    them, and 0 with one more token of either.

    Examples:
        >>> import torch
        >>> states = torch.tensor([[1.0, 1.0]] * 9 + [[500.0, -900.0]])
        >>> round(direction_spread(states[None]).item(), 6), round(spread(states[None]).item(), 2)
        (0.0, 0.95)
    """
    states, _, usable = as_tokens(tokens, mask, "`direction_spread`")
    units, nonzero = _directions(states)
    cosines = (units @ units.sum(1)[..., None])[..., 0].where(nonzero, math.nan)
    near = cosines >= _lower_median(cosines)
    center = (near.double()[:, None] @ units)[:, 0]
    center = ratio(center, torch.linalg.vector_norm(center, dim=-1, keepdim=True))
    along = units @ center[..., None]
    sines = torch.linalg.vector_norm(units - along * center[:, None], dim=-1)
    sines = torch.where(along[..., 0] > 0, sines, 1.0).clamp(max=1).where(nonzero, math.nan)
    return _lower_median(sines)[:, 0].nan_to_num(0.0).masked_fill(~usable, math.nan)


@measure("tokens", degree=0)
def state_effective_rank(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Return the effective rank of the token states: a smooth count of the directions that they fill.

    Formula: `effective_rank` of the T×D matrix of real tokens. Padding becomes rows of zeros, which do not
    change the singular values.
    Range: [1, min(n, D)] for n real tokens; 1 if they are multiples of one vector, 0 if all are zero.
    NaN for a sequence without a real token, or with NaN or infinity in a real token.
    Cost: a dense decomposition, O(T D min(T, D)) time.
    Numerics: from the Gram matrix if its rounding changes the value by at most 1e-6, otherwise by the SVD.
    Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Examples:
        >>> import torch
        >>> state_effective_rank(torch.eye(3, 8)[None]).round(decimals=6).tolist()
        [3.0]
    """
    states, _, usable = as_tokens(tokens, mask, "`state_effective_rank`")
    (rank,) = map_parts(
        states, "`state_effective_rank`", lambda part: (entropy_rank(gram_or_svd(part, rtol=STATE_RTOL)[0]),)
    )
    return rank.masked_fill(~usable, math.nan)


def _directions(states: Float64[Tensor, "B T D"]) -> tuple[Float64[Tensor, "B T D"], Bool[Tensor, "B T"]]:
    """Return y/‖y‖ for each token y, 0 for a token of norm 0, and True for tokens of nonzero norm."""
    norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    if not has_plain_squares(norms):
        states = states / unit_scale(states, (-1,))
        norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return ratio(states, norms), norms[..., 0] > 0


MASSIVE = 10.0
"""Multiple of the median norm above which a token is massive."""


def _norms(tokens: Tensor, mask: Tensor | None, subject: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return token norms with NaN for padding and norm 0, their median, and the flags of `as_tokens`.

    The median is NaN without a token of nonzero norm.
    """
    states, _, usable = as_tokens(tokens, mask, subject)
    norms = norm(to_range(states)[0], (-1,))
    norms = norms.masked_fill(norms == 0, math.nan)
    return norms, _lower_median(norms), usable


def _lower_median(values: Float64[Tensor, "B T"]) -> Float64[Tensor, "B 1"]:
    """Return the lower median of each row without NaN values; NaN if there are none.

    Sorting is deterministic on GPUs, where ``nanmedian`` refuses to run with deterministic algorithms.
    """
    place = (values.isfinite().sum(1, keepdim=True) - 1).clamp(min=0) // 2
    return values.sort(1).values.gather(1, place)


@measure("tokens", degree=0)
def massive_tokens(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return the number of massive tokens: tokens whose norm is above ten times the median norm.

    Formula: #{i: ‖y_i‖ > 10 · median_j ‖y_j‖}. Tokens of norm 0 are left out. The median of an even number of
    norms is the lower of the two in the middle.
    Range: 0 to half of the tokens; 0 if most tokens are equally large. NaN for a sequence without a real
    token (``mask`` False), or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence.
    Source: Sun et al., "Massive Activations in Large Language Models", COLM 2024, describe such tokens by
    single channels; here the norm counts.

    Examples:
        >>> import torch
        >>> massive_tokens(torch.tensor([[[1.0], [-1.0], [2.0], [30.0]]])).item()
        1.0
    """
    norms, median, usable = _norms(tokens, mask, "`massive_tokens`")
    return (norms > MASSIVE * median).sum(1).double().masked_fill(~usable, math.nan)


@measure("tokens", degree=0)
def largest_norm_ratio(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Return the largest token norm divided by the median token norm.

    Formula: max_i ‖y_i‖ / median_j ‖y_j‖ over tokens of nonzero norm; 1 if there is none. The median of an
    even number of norms is the lower of the two in the middle.
    Range: [1, ∞); 1 if all norms are equal. In trained decoders it is often above 10. NaN for a sequence
    without a real token (``mask`` False), or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence.

    Examples:
        >>> import torch
        >>> largest_norm_ratio(torch.tensor([[[1.0], [-2.0], [30.0]]])).item()
        15.0
    """
    norms, median, usable = _norms(tokens, mask, "`largest_norm_ratio`")
    return (norms / median).nan_to_num(1.0).amax(1).masked_fill(~usable, math.nan)


@measure("tokens", degree=0)
def largest_norm_share(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Return the share of the largest token in the squared norm of all tokens.

    Formula: max_i ‖y_i‖²/‖Y‖_F²; 0/0 = 0.
    Range: [1/n, 1] for n real tokens, 0 if all tokens are zero. Above one half, `spread` and
    `state_effective_rank` describe this token rather than all tokens. NaN for a sequence without a real token
    (``mask`` False), or with NaN or infinity in a real token.
    Cost: O(T D) time per sequence.

    Examples:
        >>> import torch
        >>> largest_norm_share(torch.tensor([[[1.0], [1.0], [2.0]]])).round(decimals=3).item()
        0.667
    """
    norms, _, usable = _norms(tokens, mask, "`largest_norm_share`")
    norms = norms.nan_to_num(0.0)
    whole = ratio(norms, norms.amax(1, keepdim=True)).square().sum(1)
    return ratio(torch.ones_like(whole), whole).masked_fill(~usable, math.nan)


@measure("tokens", degree=0)
def effective_rank_without_massive(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Return the effective rank of the token states without massive tokens.

    Formula: `state_effective_rank` of the tokens with ‖y_i‖ ≤ 10 · median_j ‖y_j‖; see `massive_tokens`.
    Range: [1, min(n, D)] for n such tokens; 0 if all tokens are zero. Equal to `state_effective_rank` if no
    token is massive. One massive token holds most of ‖Y‖² and hides the directions of the others. NaN for a
    sequence without a real token (``mask`` False), or with NaN or infinity in a real token.
    Cost: a dense decomposition, O(T D min(T, D)) time.

    Examples:
        >>> import torch
        >>> states = torch.cat([torch.eye(8), torch.full((1, 8), 1e3)])[None]
        >>> [round(rank(states).item(), 1) for rank in (state_effective_rank, effective_rank_without_massive)]
        [1.0, 8.0]
    """
    return state_effective_rank(tokens, without_massive(tokens, mask))


def without_massive(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> TokenMask:
    """Return True for real tokens that are not massive; see `massive_tokens`."""
    norms, median, _ = _norms(tokens, mask, "`effective_rank_without_massive`")
    real = torch.ones_like(norms, dtype=torch.bool) if mask is None else mask.to(norms.device)
    return real & ~(norms > MASSIVE * median)


def relative_update(before: Tokens, after: Tokens, mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Return how much a block changes the states, relative to their norm; a mere rescaling counts as 0.

    Formula: min_c ‖Z − cY‖_F/‖Z‖_F = √(1 − ⟨Y, Z⟩²/(‖Y‖²‖Z‖²)) for states Y before and Z after the block; 0
    if Z is 0. ``mask`` is True for real tokens; by default all tokens are real.
    Range: [0, 1]; 0 if the block only rescales its input (is inactive, or its skip connection dominates).
    Independent of scale and sign of Y and Z. NaN if a state is not finite or no token is real.
    Cost: O(T D) time per sequence.
    Numerics: Z − cY is computed and summed, because 1 − cos² would lose all digits of results below 1e-8.

    Raises:
        ShapeError: if the states have different shapes or no shape (B, T, D), or the mask is not bool (B, T).

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
    y, z = (to_range(states)[0] for states in (y, z))
    along = ratio((y * z).sum(MATRIX), torch.linalg.vector_norm(y, dim=MATRIX).square())
    rest = norm(z - along[:, None, None] * y, MATRIX)
    return ratio(rest, norm(z, MATRIX)).clamp(max=1).masked_fill(~(usable & also), math.nan)


def variational_rate(
    projection: Float[Tensor, "B H T K"],
    membership: Float[Tensor, "B H T"],
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float64[Tensor, "B H"]:
    """Return each head's term of R_c^var, the variational coding rate of tokens grouped by membership.

    Formula: ½ (n_h/n) Σ_k log(1 + m_hk) for head h, where m_hk = Σ_t Π_th w_thk² / n_h is the mean square of
    feature k, n_h = Σ_t Π_th and n = Σ_h n_h. The sum over heads is R_c^var. A TSSA (token statistics
    self-attention) layer is derived as a gradient step on R_c^var.
    Range: [0, ∞) nats; low if the tokens of a group use few features of its head. The rate grows with the
    scale of w. NaN if a number is not finite, or no token is real.
    Cost: O(T K) time per head.
    Source: Wu et al., "Token Statistics Transformer", the variational form of the rate reduction objective,
    with f = log(1 + ·) and without constant factors.

    Args:
        projection: w, the tokens projected to the K-dimensional subspace of each head.
        membership: Π ≥ 0, share of each token in the group of each head; the shares sum to 1 over the heads.
        mask: True for real tokens, False for padding; by default all tokens are real.

    Raises:
        ShapeError: if projection is not (B, H, T, K), or membership is not (B, H, T).

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
    """Return log(1 + x·Π units²) for moderate x ≥ 0. The result is finite even if the product overflows."""
    unit = math.prod(units[1:], start=units[0])
    product = x * unit * unit
    large = product > 1e200
    logarithm = torch.where(large, x, 1.0).log() + 2 * torch.stack([u.log() for u in units]).sum(0)
    return torch.where(large, logarithm, torch.where(large, 0.0, product).log1p())
