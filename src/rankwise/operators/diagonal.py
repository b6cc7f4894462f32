"""Scaling every token by a number of its own."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, TensorMap, compute_dtype, leading


class DiagonalMixing(MixingOperator):
    """A layer that mixes no tokens: ``M = diag(d)``, T = S.

    Cost: `@` and its transpose are O(T V); the singular values are the |d_t|.

    Args:
        diagonal: d, with any leading axes: (..., H, T).

    Raises:
        ShapeError: if it has no axis, or an empty last axis.

    Examples:
        >>> import torch
        >>> operator = DiagonalMixing(torch.tensor([1.0, 2.0]))
        >>> operator.dense().tolist(), (operator @ torch.ones(2, 1)).flatten().tolist()
        ([[1.0, 0.0], [0.0, 2.0]], [1.0, 2.0])
    """

    kind = "diagonal"

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
        """Leading axes, T, T."""
        return torch.Size([*self.diagonal.shape, self.diagonal.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the diagonal."""
        return self.diagonal.dtype

    @property
    def device(self) -> torch.device:
        """Device of the diagonal."""
        return self.diagonal.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Rows that are zero but for one entry."""
        picked = self.diagonal[..., start:stop].to(compute_dtype(self.dtype))
        return torch.where(self._own(start, stop), picked[..., None], 0.0)

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """The diagonal."""
        return self._own(0, self.shape[-2]).expand(self.shape)

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        return self._own(start, stop).expand(*self.shape[:-2], -1, -1)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Scale each token."""
        self._check(values, self.shape[-1], "M @ values")
        return self.diagonal[..., None].to(values.dtype) * values

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """The same: Mᵀ = M."""
        self._check(values, self.shape[-2], "M.mT @ values")
        return self.diagonal[..., None].to(values.dtype) * values

    @property
    def may_hide_columns(self) -> bool:
        """It has no mask: every token is seen by itself."""
        return False

    def __getitem__(self, index: Index) -> "DiagonalMixing":
        """Pick sequences and heads."""
        diagonal = self.diagonal[..., None]  # `leading` keeps the last two axes: T, and one of length 1
        return DiagonalMixing(leading(diagonal, index)[..., 0])

    def _map(self, change: TensorMap) -> "DiagonalMixing":
        return DiagonalMixing(change(self.diagonal))

    def _own(self, start: int, stop: int) -> Bool[Tensor, "R S"]:
        tokens = torch.arange(self.shape[-1], device=self.device)
        return tokens[start:stop, None] == tokens
