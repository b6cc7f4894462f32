"""Mixing matrix (an operator) that is stored as a tensor."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import MixingOperator, check_mask, compute_dtype


class DenseMixing(MixingOperator):
    """Mixing matrix M stored as a tensor, such as the attention weights of an eager model.

    Args:
        matrix: M, (..., T, S) with any leading axes.
        allowed: True at the entries that the mask allows to be non-zero, broadcastable to the matrix; by
            default, True at the non-zero entries. Pass a known mask, because a softmax entry that underflows
            is 0 although it is not masked.
        largest_logits: largest logit of each row that the mask allows, (..., T, 1); by default unknown.

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
    masks = ("allowed", "largest_logits")

    def __init__(
        self,
        matrix: Float[Tensor, "..."],
        allowed: Bool[Tensor, "..."] | None = None,
        largest_logits: Float[Tensor, "..."] | None = None,
    ) -> None:
        if matrix.ndim < 2 or 0 in matrix.shape[-2:]:
            raise ShapeError(
                "`DenseMixing`",
                expected="a matrix of shape (..., T, S) with T, S ≥ 1",
                got=f"{tuple(matrix.shape)}",
                fix="Pass one T×S matrix per sequence and head.",
            )
        self.matrix = matrix
        self.allowed = None if allowed is None else check_mask(allowed, matrix.shape, "allowed entries")
        self.largest_logits = (
            None if largest_logits is None else check_mask(largest_logits, matrix.shape, "largest logits")
        )
        self.may_hide_columns = allowed is not None  # without a mask, zeros may be underflows

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.matrix.shape

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of the matrix."""
        return self.matrix[..., start:stop, :].to(compute_dtype(self.dtype))

    def rows_with_logits(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return rows of the matrix, and for each entry the largest logit of its row."""
        rows, logits = super().rows_with_logits(start, stop)
        if self.largest_logits is not None:
            logits = self.largest_logits.expand(self.shape)[..., start:stop, :]
        return rows, logits

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return True where the mask allows an entry; without a mask, where an entry is not exactly 0."""
        if self.allowed is None:
            return self.matrix[..., start:stop, :] != 0
        return self.allowed.expand(self.shape)[..., start:stop, :]

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return M V, computed in the wider dtype of M and V."""
        self._check(values)
        # Entries of M may overflow in the dtype of the values, so the product uses the wider dtype.
        wide = torch.promote_types(self.dtype, values.dtype)
        return (self.matrix.to(wide) @ values.to(wide)).to(values.dtype)
