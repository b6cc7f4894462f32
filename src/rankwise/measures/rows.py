"""Measures of the rows of mixing matrices (operators): entropy, weight on single tokens, distances."""

import math

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from rankwise._internals.linalg import ratio
from rankwise.measures.registry import Mixing, measure
from rankwise.measures.row_walk import (
    DistanceToIdentity,
    DistanceToMeanRow,
    PairwiseDistances,
    RowShares,
    RowWalk,
    walk_rows,
)
from rankwise.operators import MixingOperator

__all__ = [
    "first_token_mass",
    "head_distance",
    "identity_distance",
    "max_token_index",
    "max_token_mass",
    "row_entropy",
    "row_spread",
]


@measure("matrices", RowShares, degree=0)
def row_entropy(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the mean entropy of the rows of a mixing matrix M, in nats.

    Formula: mean over rows of −Σ_j p_ij log p_ij with p_ij = |m_ij|/Σ_j|m_ij| and 0 log 0 = 0. If the entries
    are nonnegative and rows sum to 1, p is M itself. Rows of zeros (tokens that attend to no token) are left
    out of the mean.
    Range: [0, log S]; 0 if every row selects one token, log S if every row is uniform. NaN for a matrix with
    only rows of zeros, or with NaN or infinity.
    Cost: O(T S) time per matrix.

    Examples:
        >>> import torch
        >>> uniform, one_each = torch.full((3, 4), 0.25), torch.eye(3)
        >>> round(row_entropy(uniform).exp().item(), 6), row_entropy(one_each).abs().item()
        (4.0, 0.0)
    """
    walk = walk_rows(op, "row_entropy")
    shares = walk.get(RowShares)
    return walk.finite_only(shares.entropy / shares.nonzero_rows)


@measure("matrices", RowShares, degree=0)
def first_token_mass(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the mean weight that the rows of a mixing matrix M put on the first token.

    Formula: mean over rows i of |m_i0|/Σ_k|m_ik|. Rows of zeros are left out of the mean.
    Range: [0, 1]; 1 if all weight is on the first token (an attention sink), 1/S if rows are uniform. NaN for
    a matrix with only rows of zeros, or with NaN or infinity.
    Cost: O(T S) time per matrix.

    Examples:
        >>> import torch
        >>> first_token_mass(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).item()
        0.75
    """
    walk = walk_rows(op, "first_token_mass")
    shares = walk.get(RowShares)
    return walk.finite_only(shares.mass[..., 0] / shares.nonzero_rows)


@measure("matrices", RowShares, degree=0)
def max_token_mass(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the largest mean weight that the rows of a mixing matrix put on any one token.

    Formula: max_j of the mean over rows i of |m_ij|/Σ_k|m_ik|. Rows of zeros are left out of the mean.
    Range: [1/S, 1], at least `first_token_mass`; 1 if every row puts all weight on one token.
    NaN for a matrix with only rows of zeros, or with NaN or infinity.
    Cost: O(T S) time per matrix.

    Examples:
        >>> import torch
        >>> max_token_mass(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).item()
        0.75
    """
    walk = walk_rows(op, "max_token_mass")
    shares = walk.get(RowShares)
    return walk.finite_only(shares.mass.amax(-1) / shares.nonzero_rows)


@measure("heads", RowShares, degree=0)
def max_token_index(op: Mixing | RowWalk) -> Int64[Tensor, "*batch"]:
    """Return the index of the token that receives the largest mean weight, as in `max_token_mass`.

    Range: [0, S − 1], the lowest index if several tokens tie; −1 if `max_token_mass` is NaN.
    Cost: O(T S) time per matrix.

    Examples:
        >>> import torch
        >>> max_token_index(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).item()
        1
    """
    walk = walk_rows(op, "max_token_index")
    return walk.get(RowShares).mass.argmax(-1).masked_fill(max_token_mass(walk).isnan(), -1)


@measure("matrices", DistanceToMeanRow, degree=0)
def row_spread(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the distance of a mixing matrix M to the nearest matrix with equal rows, divided by its norm.

    Formula: ‖M − 1m̄ᵀ‖_F/‖M‖_F, where m̄ is the mean row; 0 for the zero matrix. Equals `spread` of the rows.
    Range: [0, 1]; 0 if all rows are equal, so that every token receives the same mixture of values. NaN
    for a matrix with NaN or infinity.
    Cost: O(T S) time per matrix.
    Numerics: the first row is subtracted from all rows before the mean row is subtracted, so that nearly
    equal rows lose no digits.

    Examples:
        >>> import torch
        >>> row_spread(torch.full((3, 3), 1 / 3)).item(), round(row_spread(torch.eye(4)).item() ** 2, 6)
        (0.0, 0.75)
    """
    walk = walk_rows(op, "row_spread")
    return walk.finite_only(ratio(walk.get(DistanceToMeanRow).distance, walk.size).clamp(max=1))


@measure("matrices", DistanceToIdentity, degree=None)
def identity_distance(op: Mixing | RowWalk) -> Float64[Tensor, "*batch"]:
    """Return the normalized distance of a mixing matrix M to the identity, which mixes no tokens.

    Formula: ‖M − I‖_F/√(‖M‖_F² + T).
    Range: [0, 1] if the trace is not negative, as without negative entries; otherwise up to √2. 0 if no
    tokens are mixed, 1 if no token attends to itself. NaN if T ≠ S, or for a matrix with NaN or infinity.
    Cost: O(T S) time per matrix.

    Examples:
        >>> import torch
        >>> identity_distance(torch.eye(3)).item(), identity_distance(torch.eye(3).roll(1, 0)).item()
        (0.0, 1.0)
    """
    walk = walk_rows(op, "identity_distance")
    distance = walk.get(DistanceToIdentity).distance
    both = torch.hypot(walk.size, torch.full_like(walk.size, math.sqrt(walk.tokens)))
    return walk.finite_only(distance / both)


@measure("heads", PairwiseDistances, degree=0)
def head_distance(
    op: MixingOperator | Shaped[Tensor, "*batch H T S"] | RowWalk,
) -> Float64[Tensor, "*batch H H"]:
    """Return the normalized distance between the mixing matrices of each pair of heads in a layer.

    Formula: ‖A − B‖_F/√(‖A‖_F² + ‖B‖_F²) for heads A and B; 0 for two zero heads.
    Range: [0, 1] for matrices without negative entries, else up to √2. 0 if A = B, 1 if no entry is nonzero
    in both. Symmetric, with a zero diagonal. NaN in the row and column of a head with NaN or infinity.
    Cost: O(H² T S) time; memory for a block of rows.
    Numerics: differences of entries are summed directly, so nearly equal heads lose no digits.

    Examples:
        >>> import torch
        >>> heads = torch.stack([torch.eye(2), torch.eye(2), torch.eye(2).flip(0)])
        >>> head_distance(heads).tolist()
        [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    walk = walk_rows(op, "head_distance")
    pairs = walk.get(PairwiseDistances)
    size = torch.hypot(walk.size[..., :, None], walk.size[..., None, :])
    distance = ratio(pairs.distance + pairs.distance.mT, size)
    return distance.masked_fill(~(walk.finite[..., :, None] & walk.finite[..., None, :]), math.nan)
