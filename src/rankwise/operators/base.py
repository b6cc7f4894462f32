"""The one interface of every mixer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import EllipsisType
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError

TensorMap = Callable[[Tensor], Tensor]
Pick = int | slice | EllipsisType | None | Tensor
Index = Pick | tuple[Pick, ...]

ROW_BLOCK = 512
"""Rows held at once wherever an operator is walked: 512 × 32,768 float32 is 64 MiB a head."""


class MixingOperator(ABC):
    """The matrix M (T×S) by which a layer mixes tokens, one for each sequence and head.

    A layer computes ``Y = M V``. The matrix is not formed unless `dense` asks for it: a kind of operator
    says how to apply M, how to give a few of its rows, and how to pick sequences and heads.
    """

    kind: ClassVar[str]
    """The field's name for the kind, as records show it."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Leading axes (sequences, heads), then T and S."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of what it was made from."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it was made."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of M, at least float32."""

    @abstractmethod
    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Which entries the mask lets be non-zero."""

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support; by default cut from all of it."""
        return self.support()[..., start:stop, :]

    @property
    def may_hide_columns(self) -> bool:
        """Whether a mask may keep a column from every row, as that of padding does.

        By default it may, and padding is looked for in the support. A kind without a mask says False, and one
        with a causal mask alone: its last row sees all.
        """
        return True

    @abstractmethod
    def __getitem__(self, index: Index) -> "MixingOperator":
        """Pick sequences and heads, as a tensor of the leading axes would."""

    @abstractmethod
    def _map(self, change: TensorMap) -> "MixingOperator":
        """The same operator with every tensor it holds changed."""

    def to(self, target: torch.device | torch.dtype | str) -> "MixingOperator":
        """Move to a device, or change the dtype its rows are computed from.

        Args:
            target: a device, its name, or a floating dtype; masks keep theirs.
        """
        if isinstance(target, torch.dtype):
            return self._map(lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor)
        return self._map(lambda tensor: tensor.to(target))

    def dense(self, dtype: torch.dtype | None = None) -> Float[Tensor, "*batch T S"]:
        """Form the matrix: O(T S) memory for each head.

        Args:
            dtype: what it is computed and given in; by default float32, or float64 if it was made so.
        """
        return self._as(dtype).rows(0, self.shape[-2])

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V, a block of rows at a time: O(T S V) time, O(T V) memory."""
        self._check(values, self.shape[-1], "M @ values")
        tokens = self.shape[-2]
        blocks = [
            self.rows(start, min(start + ROW_BLOCK, tokens)).to(values.dtype) @ values
            for start in range(0, tokens, ROW_BLOCK)
        ]
        return torch.cat(blocks, dim=-2)

    @property
    def mT(self) -> "MixingOperator":  # noqa: N802  (torch's own name for a batched transpose)
        """The transpose Mᵀ (S×T), still not formed."""
        return TransposedMixing(self)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U, a block of rows at a time: O(T S V) time, O(S V) memory."""
        self._check(values, self.shape[-2], "M.mT @ values")
        tokens, out = self.shape[-2], None
        for start in range(0, tokens, ROW_BLOCK):
            stop = min(start + ROW_BLOCK, tokens)
            part = self.rows(start, stop).to(values.dtype).mT @ values[..., start:stop, :]
            out = part if out is None else out + part
        assert out is not None  # an operator has at least one row
        return out

    def _as(self, dtype: torch.dtype | None) -> "MixingOperator":
        return self if dtype is None or dtype == self.dtype else self.to(dtype)

    def _check(self, values: Tensor, wanted: int, what: str) -> None:
        if not values.is_floating_point():
            raise ShapeError(
                f"`{what}`",
                expected="values of a floating type",
                got=str(values.dtype),
                fix="Rows of whole numbers would be cut off: cast them with .float().",
            )
        if values.ndim < 2 or values.shape[-2] != wanted or not self._takes(values.shape[:-2]):
            raise ShapeError(
                f"`{what}`",
                expected=f"values of shape (..., {wanted}, V) for an operator of shape {tuple(self.shape)}",
                got=f"{tuple(values.shape)}",
                fix="Put the tokens on the last axis but one; leading axes must broadcast.",
            )

    def _takes(self, leading_axes: torch.Size) -> bool:
        """Whether values of these leading axes fit: they broadcast."""
        pairs = zip(reversed(leading_axes), reversed(self.shape[:-2]), strict=False)
        return all(have == wanted or 1 in (have, wanted) for have, wanted in pairs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class TransposedMixing(MixingOperator):
    """Mᵀ of another operator; give it back with ``.mT``."""

    def __init__(self, operator: MixingOperator) -> None:
        self.operator = operator
        self.kind = operator.kind  # type: ignore[misc]

    @property
    def shape(self) -> torch.Size:
        """Leading axes, then S and T."""
        *batch, tokens, sources = self.operator.shape
        return torch.Size([*batch, sources, tokens])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the operator it transposes."""
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        """Device of the operator it transposes."""
        return self.operator.device

    @property
    def mT(self) -> MixingOperator:  # noqa: N802
        """The operator itself."""
        return self.operator

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Columns of the operator: forms it whole, a block of rows at a time."""
        tokens = self.operator.shape[-2]
        blocks = [
            self.operator.rows(at, min(at + ROW_BLOCK, tokens))[..., start:stop]
            for at in range(0, tokens, ROW_BLOCK)
        ]
        return torch.cat(blocks, dim=-2).mT

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """The operator's support, transposed."""
        return self.operator.support().mT

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Mᵀ U."""
        return self.operator.apply_transposed(values)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """(Mᵀ)ᵀ V = M V."""
        return self.operator @ values

    def __getitem__(self, index: Index) -> MixingOperator:
        """Pick sequences and heads."""
        return TransposedMixing(self.operator[index])

    def _map(self, change: TensorMap) -> "TransposedMixing":
        return TransposedMixing(self.operator._map(change))


def on_or_below(start: int, stop: int, sources: int, device: torch.device) -> Bool[Tensor, "R S"]:
    """Rows ``start`` to ``stop`` of a causal mask: row t sees column s where s ≤ t."""
    return torch.arange(sources, device=device) <= torch.arange(start, stop, device=device)[:, None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type rows are computed in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def leading(tensor: Tensor, index: Index) -> Tensor:
    """Index all axes of a tensor but the last two."""
    picks = index if isinstance(index, tuple) else (index,)
    rest = (slice(None), slice(None))
    return (
        tensor[(*picks, *rest)] if any(pick is Ellipsis for pick in picks) else tensor[(*picks, ..., *rest)]
    )


def checked_mask(mask: Tensor, shape: torch.Size, what: str) -> Tensor:
    """The mask with its missing axes, if it broadcasts to ``shape``: it is not expanded in memory."""
    if mask.ndim > len(shape) or any(
        have not in (1, wanted) for have, wanted in zip(reversed(mask.shape), reversed(shape), strict=False)
    ):
        raise ShapeError(
            what,
            expected=f"a shape that broadcasts to {tuple(shape)}",
            got=f"{tuple(mask.shape)}",
            fix="Give a (T, S), (B, 1, T, S) or (B, H, T, S) mask.",
        )
    return mask[(None,) * (len(shape) - mask.ndim)]
