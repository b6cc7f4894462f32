"""How alike the tokens of a sequence have become, and what a block does to them beyond scaling."""

import math

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.linalg import MATRIX, mean_distance, norm, ratio, unit_scale
from rankwise.measures.inputs import as_tokens
from rankwise.measures.rank import effective_rank
from rankwise.shapes import TokenMask, Tokens


def token_collapse(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None, normalized: bool = True
) -> Float64[Tensor, " B"]:
    """Distance of the tokens from their mean: μ, or its share of the norm.

    Formula: μ(Y) = ‖Y − 1ȳᵀ‖_F, ȳ the mean token; divided by ‖Y‖_F where ``normalized``, with 0/0 = 0.
    Range: [0, ‖Y‖_F], or [0, 1]; 0 = all tokens the same. A single token gives 0. NaN for a sequence without
    a real token, or with NaN or infinity in one. Padded tokens are never looked at.
    Cost: O(T D).
    Numerics: tokens are compared with the first real one before they are centred, so the relative error of
    μ stays near √T·1e-16 even where all tokens nearly agree, and equal tokens give exactly 0.
    Source: μ is the collapse measure of the paper on λ-skip connections, "the architectural component that
    prevents rank collapse". The share is for models whose norms move with depth.

    Args:
        tokens: token states.
        mask: True where a token is real; all are, by default.
        normalized: give μ/‖Y‖_F.

    Raises:
        ShapeError: if tokens or mask are of the wrong shape or kind.

    Examples:
        >>> import torch
        >>> states = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]], [[3.0, 4.0], [3.0, 4.0]]])
        >>> token_collapse(states).tolist()
        [1.0, 0.0]
    """
    states, valid, usable = as_tokens(tokens, mask, "`token_collapse`")
    unit = unit_scale(states, MATRIX)
    states = states / unit
    distance = mean_distance(states, valid)
    share = ratio(distance, norm(states, MATRIX)).clamp(max=1)
    return (share if normalized else distance * unit[:, 0, 0]).masked_fill(~usable, math.nan)


def token_norm(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Size of the token states together, ‖Y‖_F.

    Range: [0, ∞). NaN for a sequence without a real token, or with NaN or infinity in one.
    Cost: O(T D).

    Args:
        tokens: token states.
        mask: True where a token is real; all are, by default.

    Raises:
        ShapeError: if tokens or mask are of the wrong shape or kind.

    Examples:
        >>> import torch
        >>> token_norm(torch.tensor([[[3.0], [4.0]]])).item()
        5.0
    """
    states, _, usable = as_tokens(tokens, mask, "`token_norm`")
    return norm(states, MATRIX).masked_fill(~usable, math.nan)


def mean_cosine(tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """Mean cosine of two different tokens.

    Formula: Σ_{i≠j} ⟨u_i, u_j⟩ / (n(n − 1)) = (‖Σ u_i‖² − Σ‖u_i‖²) / (n(n − 1)), u_i = y_i/‖y_i‖. Tokens of
    norm 0 have no direction and are left out.
    Range: [−1/(n − 1), 1]; 1 = all tokens point the same way, near 0 = unrelated. Lengths do not matter. NaN
    for fewer than two such tokens, or with NaN or infinity in a real one.
    Cost: O(T D): no T×T matrix is formed.
    Numerics: the sum cancels; the error is about 1e-16 of 1, not of the cosine.

    Args:
        tokens: token states.
        mask: True where a token is real; all are, by default.

    Raises:
        ShapeError: if tokens or mask are of the wrong shape or kind.

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


def state_effective_rank(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Effective rank of the token states.

    Formula: `effective_rank` of the T×D matrix of real tokens. Padded tokens become zero rows, which leave
    singular values as they are.
    Range: [1, min(n, D)] for n real tokens, 0 if all are zero; 1 = all tokens on one line through 0. NaN for
    a sequence without a real token, or with NaN or infinity in one.
    Cost: a dense decomposition, O(T D min(T, D)).
    Numerics: not by the smaller Gram matrix, which squares the singular values and so loses those below
    1e-8·σ_1.
    Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Args:
        tokens: token states.
        mask: True where a token is real; all are, by default.

    Raises:
        ShapeError: if tokens or mask are of the wrong shape or kind.

    Examples:
        >>> import torch
        >>> state_effective_rank(torch.eye(3, 8)[None]).round(decimals=6).tolist()
        [3.0]
    """
    states, _, usable = as_tokens(tokens, mask, "`state_effective_rank`")
    return effective_rank(states).masked_fill(~usable, math.nan)


def state_turn(before: Tokens, after: Tokens, mask: TokenMask | None = None) -> Float64[Tensor, " B"]:
    """How far the states after a block point away from those before it.

    Formula: min_c ‖Z − cY‖_F/‖Z‖_F = √(1 − ⟨Y, Z⟩²/(‖Y‖²‖Z‖²)), Y before and Z after; 0 where Z is 0.
    Range: [0, 1]; 0 = the block gives back what it reads, at another scale: it is switched off, or its skip
    drowns it. Scale and sign of either do not matter. NaN where a state is not finite or no token is real.
    Cost: O(T D).
    Numerics: the remainder Z − cY itself is summed: 1 − cos² would lose all digits below 1e-8.

    Args:
        before: what the block reads.
        after: what it gives.
        mask: True where a token is real.

    Raises:
        ShapeError: if the two are not (B, T, D) alike, or the mask is not Bool (B, T).

    Examples:
        >>> import torch
        >>> y = torch.randn(1, 5, 3)
        >>> bool(state_turn(y, -2 * y) < 1e-7)
        True
        >>> state_turn(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])).item()
        1.0
    """
    if before.shape != after.shape:
        raise ShapeError(
            "`state_turn`",
            wanted="states of one shape before and after",
            got=f"{tuple(before.shape)} and {tuple(after.shape)}",
            fix="Compare states of one stack, layer by layer.",
        )
    y, valid, usable = as_tokens(before, mask, "`state_turn`")
    z, _, also = as_tokens(after, mask, "`state_turn`")
    usable = usable & also & valid.any(-1)
    y, z = (one / unit_scale(one, MATRIX) for one in (y, z))
    along = ratio((y * z).sum(MATRIX), y.square().sum(MATRIX))
    rest = norm(z - along[:, None, None] * y, MATRIX)
    turn = ratio(rest, norm(z, MATRIX)).clamp(max=1)
    return turn.masked_fill(~usable, math.nan)
