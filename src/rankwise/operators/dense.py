"""A mixing matrix that is already there."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import (
    Index,
    MixingOperator,
    TensorMap,
    checked_mask,
    compute_dtype,
    leading,
)


class DenseMixing(MixingOperator):
    """A mixing matrix kept as it is, such as an eager model's own attention weights.

    Args:
        matrix: M, with any leading axes.
        allowed: which entries the mask let be non-zero, broadcastable to it; by default those that are. Give
            it where it is known: a softmax that underflows is zero, and is not masked.

    Raises:
        ShapeError: if it has fewer than two axes or an empty one, or the two do not fit together.

    Examples:
        >>> import torch
        >>> operator = DenseMixing(torch.eye(3).expand(2, 4, 3, 3))
        >>> operator.shape, (operator @ torch.ones(2, 4, 3, 5)).shape
        (torch.Size([2, 4, 3, 3]), torch.Size([2, 4, 3, 5]))
    """

    kind = "dense"

    def __init__(self, matrix: Float[Tensor, "..."], allowed: Bool[Tensor, "..."] | None = None) -> None:
        if matrix.ndim < 2 or 0 in matrix.shape[-2:]:
            raise ShapeError(
                "`DenseMixing`",
                expected="a matrix of shape (..., T, S) with T, S ≥ 1",
                got=f"{tuple(matrix.shape)}",
                fix="Pass one T×S matrix for each sequence and head.",
            )
        self.matrix = matrix
        self.allowed = None if allowed is None else checked_mask(allowed, matrix.shape, "allowed entries")

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrix."""
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.matrix.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Rows of the matrix."""
        return self.matrix[..., start:stop, :].to(compute_dtype(self.dtype))

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Entries the mask allows, or those that are not exactly zero."""
        return self.matrix != 0 if self.allowed is None else self.allowed.expand(self.shape)

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        if self.allowed is not None:
            return self.support()[..., start:stop, :]
        return self.matrix[..., start:stop, :] != 0

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V."""
        self._check(values, self.shape[-1], "M @ values")
        wide = torch.promote_types(self.dtype, values.dtype)  # an entry may be out of the values' range
        return (self.matrix.to(wide) @ values.to(wide)).to(values.dtype)

    @property
    def may_hide_columns(self) -> bool:
        """Whether it has a mask: zeros of the weights themselves are none."""
        return self.allowed is not None

    def __getitem__(self, index: Index) -> "DenseMixing":
        """Pick sequences and heads."""
        allowed = None if self.allowed is None else leading(self.allowed.expand(self.shape), index)
        return DenseMixing(leading(self.matrix, index), allowed)

    def _map(self, change: TensorMap) -> "DenseMixing":
        return DenseMixing(change(self.matrix), None if self.allowed is None else change(self.allowed))
