"""Some rows and columns of another operator, such as those that are not padding."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, TensorMap


class IndexedMixing(MixingOperator):
    """The rows and columns of M that are asked for, ``M[rows][:, columns]``, not formed.

    Cost: that of the products of M, on values padded with zeros.

    Args:
        operator: M, of shape (..., T, S).
        rows: which rows to keep.
        columns: which columns to keep.

    Raises:
        ShapeError: if they do not fit M, or keep nothing.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DenseMixing
        >>> keep = torch.tensor([True, False, True])
        >>> IndexedMixing(DenseMixing(torch.arange(9.0).reshape(3, 3)), keep, keep).dense().tolist()
        [[0.0, 2.0], [6.0, 8.0]]
    """

    def __init__(
        self, operator: MixingOperator, rows: Bool[Tensor, " T"], columns: Bool[Tensor, " S"]
    ) -> None:
        if (len(rows), len(columns)) != operator.shape[-2:] or not (rows.any() and columns.any()):
            raise ShapeError(
                "`IndexedMixing`",
                expected=f"some rows and some columns of an operator of shape {tuple(operator.shape)}",
                got=f"{int(rows.sum())} of {len(rows)} rows, {int(columns.sum())} of {len(columns)} columns",
                fix="Pass one truth value for each row and column.",
            )
        self.operator, self.row_mask, self.column_mask = operator, rows, columns
        self.kind = operator.kind  # type: ignore[misc]
        self._rows, self._columns = rows.nonzero()[:, 0], columns.nonzero()[:, 0]

    @property
    def shape(self) -> torch.Size:
        """Leading axes, then as many rows and columns as are kept."""
        return torch.Size([*self.operator.shape[:-2], len(self._rows), len(self._columns)])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the operator it is a part of."""
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        """Device of the operator it is a part of."""
        return self.operator.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """The kept ones of the rows between the first and the last."""
        return self._cut(self.operator.rows, start, stop)

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """The kept entries of the support."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        return self._cut(self.operator.support_rows, start, stop)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V: columns left out are given zeros."""
        self._check(values, self.shape[-1], "M @ values")
        whole = _padded_with_zeros(values, self._columns, self.operator.shape[-1])
        return (self.operator @ whole)[..., self._rows, :]

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U: rows left out are given zeros."""
        self._check(values, self.shape[-2], "M.mT @ values")
        whole = _padded_with_zeros(values, self._rows, self.operator.shape[-2])
        return self.operator.apply_transposed(whole)[..., self._columns, :]

    def __getitem__(self, index: Index) -> "IndexedMixing":
        """Pick sequences and heads; all keep the same rows and columns."""
        return IndexedMixing(self.operator[index], self.row_mask, self.column_mask)

    def _map(self, change: TensorMap) -> "IndexedMixing":
        return IndexedMixing(self.operator._map(change), change(self.row_mask), change(self.column_mask))

    def _cut(self, give: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        picked = self._rows[start:stop]
        if not len(picked):
            return give(0, 0)[..., self._columns]
        first, last = int(picked[0]), int(picked[-1]) + 1
        return give(first, last)[..., picked - first, :][..., self._columns]


def _padded_with_zeros(values: Tensor, kept: Tensor, size: int) -> Tensor:
    whole = values.new_zeros(*values.shape[:-2], size, values.shape[-1])
    whole[..., kept, :] = values
    return whole
