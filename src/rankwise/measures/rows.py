"""What the rows of a mixing matrix do: spread, stare at one token, agree with each other, stay at home."""

import math

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.measures._inputs import Mixing, all_finite, as_matrices, measured, ratio, unit_scale
from rankwise.operators import MixingOperator

MATRIX = (-2, -1)
"""The two axes of a matrix."""


def row_entropy(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Mean entropy of a row, in nats.

    Formula: mean over rows of −Σ_j p_ij log p_ij with p_ij = |m_ij|/Σ_j|m_ij| and 0 log 0 = 0. For a
    row-stochastic matrix p is the matrix; otherwise it is the share of each token in the weight of the row.
    Zero rows (tokens that may see nothing) are left out of the mean.
    Range: [0, log S]; 0 = every row picks one token, log S = every row is uniform. NaN where a matrix has
    only zero rows, or holds NaN or infinity.
    Cost: O(T S).

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if it is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> uniform, one_each = torch.full((3, 4), 0.25), torch.eye(3)
        >>> round(row_entropy(uniform).exp().item(), 6), row_entropy(one_each).abs().item()
        (4.0, 0.0)
    """
    return measured(op, "`row_entropy`", lambda m: _live_mean(torch.special.entr(_row_shares(m)).sum(-1), m))


def sink_mass(op: Mixing, column: int = 0) -> Float64[Tensor, "*batch"]:
    """Mean share of a row spent on one token, by default the first.

    Formula: mean over rows of |m_ij|/Σ_k|m_ik| for j = ``column``. Zero rows are left out of the mean.
    Range: [0, 1]; 1 = every row looks at that token alone (an attention sink), 1/S under uniform rows. NaN
    where a matrix has only zero rows, or holds NaN or infinity.
    Cost: O(T S).

    Args:
        op: an operator, or a tensor (..., T, S).
        column: which token; negative counts from the end.

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1, or has no such column.

    Examples:
        >>> import torch
        >>> sink_mass(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).item()
        0.75
    """

    def mass(m: Tensor) -> Tensor:
        if not -m.shape[-1] <= column < m.shape[-1]:
            raise ShapeError(
                "`column` of `sink_mass`",
                wanted=f"an index in [−{m.shape[-1]}, {m.shape[-1]})",
                got=str(column),
                fix="Name a column of the matrix.",
            )
        return _live_mean(_row_shares(m)[..., column], m)

    return measured(op, "`sink_mass`", mass)


def peak_mass(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Largest mean share of a row that any one token gets.

    Formula: max_j of the mean over rows of |m_ij|/Σ_k|m_ik|. Zero rows are left out of the mean.
    Range: [1/S, 1], at least the sink mass of any column; 1 = every row looks at the same token alone. NaN
    where a matrix has only zero rows, or holds NaN or infinity.
    Cost: O(T S).

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> peak_mass(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).item()
        0.75
    """
    return measured(op, "`peak_mass`", lambda m: _live_mean(_row_shares(m).mT, m.unsqueeze(-3)).amax(-1))


def row_distance(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Distance to the nearest matrix with equal rows, as a share of the norm.

    Formula: ‖M − 1m̄ᵀ‖_F/‖M‖_F, m̄ the mean row; 0 for the zero matrix. It is `token_collapse` of the rows.
    Range: [0, 1] for any real matrix; 0 = all rows equal, so that every token receives the same mixture.
    NaN where a matrix holds NaN or infinity.
    Cost: O(T S).
    Numerics: rows are compared with the first one before they are centred, so nearly equal rows lose no
    digits.

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if it is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> row_distance(torch.full((3, 3), 1 / 3)).item(), round(row_distance(torch.eye(4)).item() ** 2, 6)
        (0.0, 0.75)
    """

    def distance(m: Tensor) -> Tensor:
        m = m / unit_scale(m, MATRIX)
        shifted = m - m[..., :1, :]
        centred = shifted - shifted.mean(-2, keepdim=True)
        return ratio(_frobenius(centred), _frobenius(m)).clamp(max=1)

    return measured(op, "`row_distance`", distance)


def identity_distance(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Distance to the identity.

    Formula: ‖M − I‖_F/√(‖M‖_F² + T).
    Range: [0, 1] where the trace is not negative, as for every matrix without negative entries, else up to
    √2; 0 = every token keeps to itself, 1 = no token looks at itself. NaN where T ≠ S, or where a matrix
    holds NaN or infinity.
    Cost: O(T S).

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if it is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> identity_distance(torch.eye(3)).item(), identity_distance(torch.eye(3).roll(1, 0)).item()
        (0.0, 1.0)
    """

    def distance(m: Tensor) -> Tensor:
        tokens, sources = m.shape[-2:]
        if tokens != sources:
            return m.new_full(m.shape[:-2], math.nan)
        scale = unit_scale(m, MATRIX).clamp(min=1)
        eye = torch.eye(tokens, dtype=m.dtype, device=m.device) / scale
        whole = torch.hypot(_frobenius(m / scale), math.sqrt(tokens) / scale[..., 0, 0])
        return _frobenius(m / scale - eye) / whole

    return measured(op, "`identity_distance`", distance)


def head_distance(op: MixingOperator | Shaped[Tensor, "*batch H T S"]) -> Float64[Tensor, "*batch H H"]:
    """How differently each two heads of a layer mix.

    Formula: ‖A − B‖_F/√(‖A‖_F² + ‖B‖_F²) for heads A and B; 0 for two zero heads.
    Range: [0, 1] for matrices without negative entries, else up to √2; 0 = the same matrix, 1 = no shared
    token. Symmetric, with a zero diagonal. NaN in the row and column of a head that holds NaN or infinity.
    Cost: O(H² T S) time, O(H T S) memory.
    Numerics: differences are summed directly. ‖A‖² + ‖B‖² − 2⟨A, B⟩ would be one matrix product, but its
    rounding error of 1e-16·‖A‖² turns every distance below about 1e-8 into noise, just where heads are
    redundant.

    Args:
        op: an operator, or a tensor (..., H, T, S).

    Raises:
        ShapeError: if it is not (..., H, T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> heads = torch.stack([torch.eye(2), torch.eye(2), torch.eye(2).flip(0)])
        >>> head_distance(heads).tolist()
        [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    m = as_matrices(op, "`head_distance`")
    if m.ndim < 3:
        raise ShapeError(
            "`head_distance`",
            wanted="shape (..., H, T, S)",
            got=str(tuple(m.shape)),
            fix="Stack the heads of a layer on the axis before T.",
        )
    finite = all_finite(m)
    flat = m.masked_fill(~finite[..., None, None], 0).flatten(-2)
    flat = flat / unit_scale(flat, MATRIX)
    norm = torch.linalg.vector_norm(flat, dim=-1)
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    distance = ratio(apart, torch.hypot(norm[..., :, None], norm[..., None, :]))
    return distance.masked_fill(~(finite[..., :, None] & finite[..., None, :]), math.nan)


def _row_shares(m: Tensor) -> Tensor:
    """|m_ij|/Σ_j|m_ij|, zero for a zero row."""
    weights = m.abs() / unit_scale(m, (-1,))
    return ratio(weights, weights.sum(-1, keepdim=True).expand_as(weights))


def _live_mean(numbers: Tensor, m: Tensor) -> Tensor:
    """Mean over rows that are not all zero (where ``numbers`` is 0); NaN without any."""
    return numbers.sum(-1) / (m != 0).any(-1).sum(-1)


def _frobenius(m: Tensor) -> Tensor:
    return torch.linalg.vector_norm(m, dim=MATRIX)
