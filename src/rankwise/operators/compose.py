"""Operators made of operators: products and sums, such as the whole path through a gated layer."""

from abc import abstractmethod
from functools import reduce
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, TensorMap, compute_dtype
from rankwise.operators.diagonal import DiagonalMixing


class _Composed(MixingOperator):
    """What products and sums have in common.

    Args:
        parts: the operators, at least one, of the same leading axes.
    """

    def __init__(self, *parts: MixingOperator) -> None:
        if (
            not parts
            or any(part.shape[:-2] != parts[0].shape[:-2] for part in parts)
            or not self._fits(parts)
        ):
            raise ShapeError(
                f"`{type(self).__name__}`",
                expected=f"operators of the same leading axes {self._wanted}",
                got=", ".join(str(tuple(part.shape)) for part in parts) or "none",
                fix="Give each of them every sequence and head; `DiagonalMixing` scales tokens.",
            )
        self.parts = parts

    _wanted: str

    @staticmethod
    @abstractmethod
    def _fits(parts: tuple[MixingOperator, ...]) -> bool:
        """Whether the shapes of the parts go together."""

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the types of its parts."""
        return reduce(torch.promote_types, (part.dtype for part in self.parts))

    @property
    def device(self) -> torch.device:
        """Device of the first part."""
        return self.parts[0].device

    def __getitem__(self, index: Index) -> "MixingOperator":
        """Pick sequences and heads of every part."""
        return type(self)(*(part[index] for part in self.parts))

    def _map(self, change: TensorMap) -> "MixingOperator":
        return type(self)(*(part._map(change) for part in self.parts))

    def _wide(self, values: Tensor) -> Tensor:
        """Values in the type to sum in."""
        return values.to(compute_dtype(torch.promote_types(self.dtype, values.dtype)))


class ProductMixing(_Composed):
    """One operator after another: ``M = M_1 M_2 … M_n``, the last applied first.

    Cost: that of its parts, one after the other.

    Raises:
        ShapeError: if they do not fit together.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DiagonalMixing, ToeplitzMixing
        >>> gate, kernel = DiagonalMixing(torch.tensor([2.0, 3.0])), ToeplitzMixing(torch.tensor([1.0, 0.5]))
        >>> ProductMixing(gate, kernel).dense().tolist()
        [[2.0, 0.0], [1.5, 3.0]]
    """

    kind = "product"
    _wanted = "where each has as many columns as the next has rows"

    @staticmethod
    def _fits(parts: tuple[MixingOperator, ...]) -> bool:
        return all(left.shape[-1] == right.shape[-2] for left, right in pairwise(parts))

    @property
    def shape(self) -> torch.Size:
        """Leading axes, rows of the first part, columns of the last."""
        return torch.Size([*self.parts[0].shape[:-1], self.parts[-1].shape[-1]])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Rows of the first part, through the transposes of the others."""
        rows = self.parts[0].rows(start, stop).mT
        for part in self.parts[1:]:
            rows = part.apply_transposed(rows)
        return rows.mT

    @property
    def may_hide_columns(self) -> bool:
        """A column that no row sees, one of its factors must hide."""
        return any(part.may_hide_columns for part in self.parts)

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Entries that some chain of entries of its parts leads to."""
        return reduce(
            lambda left, right: (left.float() @ right.float()) > 0, (p.support() for p in self.parts)
        )

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        seen = self.parts[0].support_rows(start, stop)
        for part in self.parts[1:]:
            if not isinstance(part, DiagonalMixing):  # which moves nothing
                seen = (seen.float() @ part.support().float()) > 0
        return seen.expand(*self.shape[:-2], *seen.shape[-2:])

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V, part by part."""
        self._check(values, self.shape[-1], "M @ values")
        return reduce(lambda v, part: part @ v, reversed(self.parts), self._wide(values)).to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U, part by part."""
        self._check(values, self.shape[-2], "M.mT @ values")
        wide = self._wide(values)
        return reduce(lambda u, part: part.apply_transposed(u), self.parts, wide).to(values.dtype)


class SumMixing(_Composed):
    """Operators side by side: ``M = M_1 + M_2 + …``, as a layer with its D-term is.

    Cost: that of its parts.

    Raises:
        ShapeError: if they do not fit together.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DiagonalMixing, ToeplitzMixing
        >>> skip, kernel = DiagonalMixing(torch.ones(2)), ToeplitzMixing(torch.tensor([1.0, 0.5]))
        >>> SumMixing(kernel, skip).dense().tolist()
        [[2.0, 0.0], [0.5, 2.0]]
    """

    kind = "sum"
    _wanted = "and the same size"

    @staticmethod
    def _fits(parts: tuple[MixingOperator, ...]) -> bool:
        return all(part.shape == parts[0].shape for part in parts)

    @property
    def shape(self) -> torch.Size:
        """That of each part."""
        return self.parts[0].shape

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Rows of the parts, added."""
        first, *rest = (part.rows(start, stop) for part in self.parts)
        return sum(rest, start=first)

    @property
    def may_hide_columns(self) -> bool:
        """A column that no row sees, all of its terms must hide."""
        return all(part.may_hide_columns for part in self.parts)

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Entries of any part."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        return reduce(torch.logical_or, (part.support_rows(start, stop) for part in self.parts))

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V."""
        self._check(values, self.shape[-1], "M @ values")
        wide = self._wide(values)
        return reduce(torch.add, (part @ wide for part in self.parts)).to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U."""
        self._check(values, self.shape[-2], "M.mT @ values")
        wide = self._wide(values)
        return reduce(torch.add, (part.apply_transposed(wide) for part in self.parts)).to(values.dtype)
