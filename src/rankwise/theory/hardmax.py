"""The rank of a hardmax matrix: a count, no decomposition."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from rankwise.errors import ShapeError


def hardmax_rank(
    scores: Float[Tensor, "*batch T S"], mask: Bool[Tensor, "..."] | None = None
) -> Int64[Tensor, "*batch"]:
    """Rank of the matrix that has a single 1 in each row, where the row's largest score is.

    Formula: the number of different columns that win a row. The singular values are the square roots of how
    many rows each column wins, so for any δ ≤ 1 it is the numerical rank too.
    Range: [1, min(T, S)]; 0 where no row sees a column. Of equal scores one wins.
    Cost: O(T S).

    Args:
        scores: Q Kᵀ, at any temperature.
        mask: True where row i may see column j, broadcastable to the scores; a row that may see nothing is
            zero.

    Raises:
        ShapeError: if scores hold NaN, or the mask does not fit them.

    Examples:
        >>> import torch
        >>> hardmax_rank(torch.tensor([[3.0, 1.0], [2.0, 1.0]])).item(), hardmax_rank(torch.eye(4)).item()
        (1, 4)
    """
    _check(scores, mask)
    return (wins(scores, mask) > 0).sum(-1)


def _check(scores: Tensor, mask: Tensor | None) -> None:
    fits = scores.ndim >= 2 and scores.shape[-1] > 0 and not bool(scores.isnan().any())
    if fits and mask is not None:
        pairs = list(zip(reversed(mask.shape), reversed(scores.shape), strict=False))
        fits = mask.dtype == torch.bool and mask.ndim <= scores.ndim and all(m in (1, n) for m, n in pairs)
    if not fits:
        said = "" if mask is None else f", mask {mask.dtype} {tuple(mask.shape)}"
        raise ShapeError(
            "`hardmax_rank`",
            expected="scores (..., T, S) without NaN, S ≥ 1, and a boolean mask that broadcasts to them",
            got=f"scores {tuple(scores.shape)}{said}",
            fix="NaN has no largest; an additive mask becomes a boolean one with mask == 0.",
        )


def wins(
    scores: Float[Tensor, "*batch T S"], mask: Bool[Tensor, "..."] | None = None
) -> Int64[Tensor, "*batch S"]:
    """How many rows each column wins.

    Args:
        scores: Q Kᵀ.
        mask: True where row i may see column j, broadcastable to the scores.

    Examples:
        >>> import torch
        >>> wins(torch.tensor([[3.0, 1.0], [2.0, 1.0]])).tolist()
        [2, 0]
    """
    *batch, _, sources = scores.shape
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    winner = scores.argmax(-1)
    if mask is not None:  # rows that may see nothing vote for a column that is cut off
        winner = winner.masked_fill(~mask.expand(scores.shape).any(-1), sources)
    count = torch.zeros(*batch, sources + 1, dtype=torch.int64, device=scores.device)
    return count.scatter_add_(-1, winner, torch.ones_like(winner))[..., :sources]
