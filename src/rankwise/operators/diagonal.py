"""Diagonal mixing matrix (an operator): scales each token by a factor and mixes no tokens."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import MixingOperator, compute_dtype


class DiagonalMixing(MixingOperator):
    """Diagonal mixing matrix ``M = diag(d)`` (T = S) of a layer that only scales tokens.

    Products with M and Mᵀ take O(T V) time for values of width V. The singular values are |d_t|.

    Args:
        diagonal: d, (..., H, T): one factor per head and token, with any leading axes.

    Raises:
        ShapeError: if the diagonal has no axis or no tokens.

    Examples:
        >>> import torch
        >>> operator = DiagonalMixing(torch.tensor([1.0, 2.0]))
        >>> operator.dense().tolist(), (operator @ torch.ones(2, 1)).flatten().tolist()
        ([[1.0, 0.0], [0.0, 2.0]], [1.0, 2.0])
    """

    kind = "diagonal"
    held = ("diagonal",)
    may_hide_columns = False

    def __init__(self, diagonal: Float[Tensor, "..."]) -> None:
        if diagonal.ndim < 1 or diagonal.shape[-1] == 0:
            raise ShapeError(
                "`DiagonalMixing`",
                expected="one number for each token, (..., T) with T ≥ 1",
                got=f"{tuple(diagonal.shape)}",
                fix="Pass the diagonal, not the matrix.",
            )
        self.diagonal = diagonal

    @property
    def shape(self) -> torch.Size:
        """Shape (..., T, T) for T tokens."""
        return torch.Size([*self.diagonal.shape, self.diagonal.shape[-1]])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of M, each with one non-zero entry."""
        picked = self.diagonal[..., start:stop].to(compute_dtype(self.dtype))
        return torch.where(self.support_rows(start, stop), picked[..., None], 0.0)

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support: True on the diagonal."""
        tokens = torch.arange(self.shape[-1], device=self.device)
        return (tokens[start:stop, None] == tokens).expand(*self.shape[:-2], -1, -1)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return M V, in which token t is scaled by d_t."""
        self._check(values)
        return self.diagonal[..., None].to(values.dtype) * values

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Return Mᵀ U = M U, because a diagonal matrix is symmetric."""
        self._check(values, transposed=True)
        return self.diagonal[..., None].to(values.dtype) * values
