"""Operators (mixing matrices) made of other operators: sums, and selected rows and columns."""

from collections.abc import Callable
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import ComposedMixing, FastMixing, MixingOperator


class SumMixing(ComposedMixing, FastMixing):
    """Sum of operators, such as a state-space layer and its skip connection D·x: ``M = M_1 + M_2 + …``.

    The cost is the sum of the costs of the parts.

    Raises:
        ShapeError: if the parts have different shapes.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DiagonalMixing, ToeplitzMixing
        >>> skip, kernel = DiagonalMixing(torch.ones(2)), ToeplitzMixing(torch.tensor([1.0, 0.5]))
        >>> SumMixing(kernel, skip).dense().tolist()
        [[2.0, 0.0], [0.5, 2.0]]
    """

    kind = "sum"

    def __init__(self, *parts: MixingOperator) -> None:
        super().__init__(*parts)
        if len({operator.shape for operator in parts}) != 1:
            raise ShapeError(
                "`SumMixing`",
                expected="operators of the same shape",
                got=", ".join(str(tuple(operator.shape)) for operator in parts) or "none",
                fix="Give each operator every sequence and head; `DiagonalMixing` scales tokens.",
            )
        # A column is hidden from all rows only if every term hides it.
        self.may_hide_columns = all(operator.may_hide_columns for operator in parts)

    @property
    def shape(self) -> torch.Size:
        """Shape (..., T, S), which all parts have."""
        return self.parts[0].shape

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return the sum of the rows of the parts."""
        return reduce(torch.add, (operator.rows(start, stop) for operator in self.parts))

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support: True where an entry is in the support of any part."""
        return reduce(torch.logical_or, (operator.support_rows(start, stop) for operator in self.parts))

    def _multiply(self, values: Tensor, transposed: bool) -> Tensor:
        products = (
            operator.apply_transposed(values) if transposed else operator @ values for operator in self.parts
        )
        return reduce(torch.add, products)


class IndexedMixing(ComposedMixing):
    """Part ``M[rows][:, columns]`` of an operator M, where masks are True, for example M without padding.

    Products cost as much as products with the whole M, because values are padded with zeros.

    Raises:
        ShapeError: if the masks do not have the sizes of M, or keep no row or no column.

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
        self.operator, self.parts, self.kind = operator, (operator,), operator.kind
        self.row_mask, self.column_mask = rows.to(operator.device), columns.to(operator.device)
        self._rows, self._columns = self.row_mask.nonzero()[:, 0], self.column_mask.nonzero()[:, 0]

    def _of(self, *parts: MixingOperator) -> "IndexedMixing":
        return IndexedMixing(parts[0], self.row_mask, self.column_mask)

    @property
    def shape(self) -> torch.Size:
        """Shape (..., number of kept rows, number of kept columns)."""
        return torch.Size([*self.operator.shape[:-2], len(self._rows), len(self._columns)])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return kept rows ``start`` to ``stop`` of M, restricted to the kept columns."""
        return self._cut(self.operator.rows, start, stop)

    def rows_with_logits(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return kept rows ``start`` to ``stop`` of M and their logits, restricted to the kept columns."""
        logits: list[Tensor] = []

        def rows(first: int, last: int) -> Tensor:
            both = self.operator.rows_with_logits(first, last)
            logits.append(both[1])
            return both[0]

        return self._cut(rows, start, stop), self._cut(lambda *_: logits[0], start, stop)

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return kept rows ``start`` to ``stop`` of the support of M, restricted to the kept columns."""
        return self._cut(self.operator.support_rows, start, stop)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return the kept rows of M V, where V is padded with zeros at the dropped columns."""
        self._check(values)
        whole = _pad_with_zeros(values, self._columns, self.operator.shape[-1])
        return (self.operator @ whole)[..., self._rows, :]

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Return rows of Mᵀ U for the kept columns of M; U is padded with zeros at the dropped rows."""
        self._check(values, transposed=True)
        whole = _pad_with_zeros(values, self._rows, self.operator.shape[-2])
        return self.operator.apply_transposed(whole)[..., self._columns, :]

    def _cut(self, block: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        picked = self._rows[start:stop]
        if not len(picked):
            return block(0, 0)[..., self._columns]
        first, last = int(picked[0]), int(picked[-1]) + 1
        return block(first, last)[..., picked - first, :][..., self._columns]


def _pad_with_zeros(values: Tensor, kept: Tensor, size: int) -> Tensor:
    whole = values.new_zeros(*values.shape[:-2], size, values.shape[-1])
    whole[..., kept, :] = values
    return whole
