"""A mixing matrix that is already formed."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import MixingOperator, check_mask, compute_dtype


class DenseMixing(MixingOperator):
    """A mixing matrix that is stored, such as the attention weights of an eager model.

    Args:
        matrix: M, with any leading axes.
        allowed: True at the entries that the mask allows to be non-zero, broadcastable to the matrix; the
            non-zero entries by default. Pass it if it is known: an underflowed softmax entry is 0 but not
            masked.

    Raises:
        ShapeError: if the matrix has fewer than two axes or no entries, or the mask does not fit it.

    Examples:
        >>> import torch
        >>> operator = DenseMixing(torch.eye(3).expand(2, 4, 3, 3))
        >>> operator.shape, (operator @ torch.ones(2, 4, 3, 5)).shape
        (torch.Size([2, 4, 3, 3]), torch.Size([2, 4, 3, 5]))
    """

    kind = "dense"
    held = ("matrix",)
    masks = ("allowed",)

    def __init__(self, matrix: Float[Tensor, "..."], allowed: Bool[Tensor, "..."] | None = None) -> None:
        if matrix.ndim < 2 or 0 in matrix.shape[-2:]:
            raise ShapeError(
                "`DenseMixing`",
                expected="a matrix of shape (..., T, S) with T, S ≥ 1",
                got=f"{tuple(matrix.shape)}",
                fix="Pass one T×S matrix per sequence and head.",
            )
        self.matrix = matrix
        self.allowed = None if allowed is None else check_mask(allowed, matrix.shape, "allowed entries")
        self.may_hide_columns = allowed is not None  # a zero among the weights is not a mask

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.matrix.shape

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of the matrix."""
        return self.matrix[..., start:stop, :].to(compute_dtype(self.dtype))

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return the entries that the mask allows, or without a mask those that are not exactly 0."""
        if self.allowed is None:
            return self.matrix[..., start:stop, :] != 0
        return self.allowed.expand(self.shape)[..., start:stop, :]

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Compute M V."""
        self._check(values)
        # An entry may be out of the range of the values' dtype.
        wide = torch.promote_types(self.dtype, values.dtype)
        return (self.matrix.to(wide) @ values.to(wide)).to(values.dtype)
