"""What the rows of a mixing matrix do: spread, stare at one token, agree with each other, stay at home."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from rankwise._internals.linalg import ratio
from rankwise._internals.threads import map_threads
from rankwise.errors import ShapeError
from rankwise.measures.inputs import Mixing, as_operator
from rankwise.measures.row_sums import (
    ROW_MEASURES,
    FromIdentity,
    FromMeanRow,
    HeadsApart,
    Shares,
    Walk,
    row_measure,
    walk,
    walk_over,
)
from rankwise.operators import MixingOperator

__all__ = [
    "RowSummary",
    "first_token_mass",
    "head_distance",
    "identity_distance",
    "max_token_mass",
    "row_distance",
    "row_entropy",
    "row_summary",
]

UNDER_WAY_BYTES = 2**29
"""Sequences are walked beside each other while all their heads, as float64 matrices, are less than this. One
that is more has all threads."""


class RowSummary(NamedTuple):
    """What the rows of each matrix do. NaN where a matrix is not finite."""

    row_entropy: Float64[Tensor, "*batch"]
    first_token_mass: Float64[Tensor, "*batch"]
    max_token_mass: Float64[Tensor, "*batch"]
    row_distance: Float64[Tensor, "*batch"]
    identity_distance: Float64[Tensor, "*batch"]
    head_distance: Float64[Tensor, "*batch H"]
    max_token_index: Int64[Tensor, "*batch"]
    """The column that `max_token_mass` is the mean share of, the first of equals; −1 where that is NaN."""


def row_summary(op: MixingOperator | Mixing) -> RowSummary:
    """Compute every measure of rows at once: `row_entropy`, `first_token_mass`, `max_token_mass`, distances.

    The matrix is not formed: each is a sum over rows, and rows come in blocks.

    Range: that of each measure.
    Cost: one walk over the rows, O(H² T S) time for the distances of H heads; memory of a block of rows and
    of S numbers for each matrix.

    Args:
        op: an operator, or a tensor (..., H, T, S).

    Raises:
        ShapeError: if ``op`` is not (..., H, T, S) with H, T, S ≥ 1.

    Examples:
        >>> import torch
        >>> summary = row_summary(torch.eye(4).expand(2, 4, 4))
        >>> summary.identity_distance.tolist(), summary.head_distance.tolist()
        ([0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]])
    """
    numbers = row_measures(op)
    return RowSummary(*(numbers[name] for name in RowSummary._fields))


def row_measures(op: MixingOperator | Mixing) -> dict[str, Tensor]:
    """Compute all measures of rows, `head_distance` and `max_token_index` in one walk.

    Args:
        op: as in `row_summary`.
    """
    with torch.no_grad():
        operator = _heads_of(op)
        if len(operator.shape) < 4 or operator.shape[0] < 2 or operator.device.type != "cpu":
            return _measures_of(operator)
        sequences = [operator[at : at + 1] for at in range(operator.shape[0])]
        at_once = UNDER_WAY_BYTES // (8 * math.prod(operator.shape[1:]))
        found = map_threads(_measures_of, sequences, max(1, at_once))
        return {name: torch.cat([numbers[name] for numbers in found]) for name in found[0]}


def _measures_of(operator: MixingOperator) -> dict[str, Tensor]:
    kinds = {kind for measure in ROW_MEASURES.values() for kind in measure.kinds}
    found = walk_over(operator, *kinds, HeadsApart)
    numbers = {name: measure.function(found) for name, measure in ROW_MEASURES.items()}
    return numbers | {"head_distance": _head_distance(found), "max_token_index": _peak_token(found)}


@row_measure(Shares, degree=0)
def row_entropy(op: Mixing | Walk) -> Float64[Tensor, "*batch"]:
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
    found = walk(op, "row_entropy")
    shares = found.of(Shares)
    return found.known(shares.entropy / shares.live)


@row_measure(Shares, degree=0)
def first_token_mass(op: Mixing | Walk, column: int = 0) -> Float64[Tensor, "*batch"]:
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
        >>> first_token_mass(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).item()
        0.75
    """
    found = walk(op, "first_token_mass")
    shares = found.of(Shares)
    sources = shares.mass.shape[-1]
    if not -sources <= column < sources:
        raise ShapeError(
            "`column` of `first_token_mass`",
            expected=f"an index in [−{sources}, {sources})",
            got=str(column),
            fix="Name a column of the matrix.",
        )
    return found.known(shares.mass[..., column] / shares.live)


@row_measure(Shares, degree=0)
def max_token_mass(op: Mixing | Walk) -> Float64[Tensor, "*batch"]:
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
        >>> max_token_mass(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).item()
        0.75
    """
    found = walk(op, "max_token_mass")
    shares = found.of(Shares)
    return found.known(shares.mass.amax(-1) / shares.live)


@row_measure(FromMeanRow, degree=0)
def row_distance(op: Mixing | Walk) -> Float64[Tensor, "*batch"]:
    """Distance to the nearest matrix with equal rows, as a share of the norm.

    Formula: ‖M − 1m̄ᵀ‖_F/‖M‖_F, m̄ the mean row; 0 for the zero matrix. It is `token_spread` of the rows.
    Range: [0, 1] for any real matrix; 0 = all rows equal, so that every token receives the same mixture.
    NaN where a matrix holds NaN or infinity.
    Cost: O(T S).
    Numerics: rows are compared with the first row before they are centred, so nearly equal rows lose no
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
    found = walk(op, "row_distance")
    return found.known(ratio(found.of(FromMeanRow).distance, found.size).clamp(max=1))


@row_measure(FromIdentity, degree=None)
def identity_distance(op: Mixing | Walk) -> Float64[Tensor, "*batch"]:
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
    found = walk(op, "identity_distance")
    distance = found.of(FromIdentity).distance
    both = torch.hypot(found.size, math.sqrt(found.tokens) / found.unit[..., 0, 0])
    return found.known(distance / both)


def head_distance(op: MixingOperator | Shaped[Tensor, "*batch H T S"]) -> Float64[Tensor, "*batch H H"]:
    """How differently each two heads of a layer mix.

    Formula: ‖A − B‖_F/√(‖A‖_F² + ‖B‖_F²) for heads A and B; 0 for two zero heads.
    Range: [0, 1] for matrices without negative entries, else up to √2; 0 = the same matrix, 1 = no shared
    token. Symmetric, with a zero diagonal. NaN in the row and column of a head that holds NaN or infinity.
    Cost: O(H² T S) time; memory of a block of rows.
    Numerics: differences are summed directly, so nearly equal heads lose no digits.

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
    operator = as_operator(op, "`head_distance`")
    if len(operator.shape) < 3:
        raise ShapeError(
            "`head_distance`",
            expected="shape (..., H, T, S)",
            got=str(tuple(operator.shape)),
            fix="Stack the heads of a layer on the axis before T.",
        )
    return _head_distance(walk_over(operator, HeadsApart))


def _peak_token(found: Walk) -> Int64[Tensor, "*batch"]:
    return found.of(Shares).mass.argmax(-1).masked_fill(max_token_mass(found).isnan(), -1)


def _head_distance(found: Walk) -> Float64[Tensor, "*batch H H"]:
    heads = found.of(HeadsApart)
    size = found.size[..., None] * (found.unit[..., 0] / heads.unit)
    distance = ratio(heads.apart + heads.apart.mT, torch.hypot(size, size.mT))
    return distance.masked_fill(~(found.finite[..., :, None] & found.finite[..., None, :]), math.nan)


def _heads_of(op: MixingOperator | Mixing) -> MixingOperator:
    """The operator as it is, in float64: its matrices are not formed."""
    shape = op.shape if isinstance(op, MixingOperator | Tensor) else None
    if shape is None or len(shape) < 3 or 0 in shape[-3:]:
        raise ShapeError(
            "`row_summary`",
            expected="a MixingOperator or a tensor of shape (..., H, T, S) with H, T, S ≥ 1",
            got=type(op).__name__ if shape is None else str(tuple(shape)),
            fix="Stack the heads of a layer on the axis before T.",
        )
    return as_operator(op, "`row_summary`")
