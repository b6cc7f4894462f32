"""Base class of all operators (mixing matrices), and code that several kinds of operators share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from types import EllipsisType
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.errors import ShapeError

_Pick = int | slice | EllipsisType | None | Tensor
Index = _Pick | tuple[_Pick, ...]
_Kind = TypeVar("_Kind", bound="MixingOperator")
_Composed = TypeVar("_Composed", bound="ComposedMixing")

ROW_BLOCK = 512
"""Number of rows that a pass over all rows computes at once, to limit memory: 512 rows of 32,768 float32
numbers take 64 MiB per head."""


class MixingOperator(ABC):
    """Mixing matrix M (T×S) by which a layer mixes tokens, ``Y = M V``; one matrix per sequence and head.

    The matrix itself is formed only by `dense`. A subclass declares its tensors, computes blocks of rows, and
    may override the products with faster algorithms.
    """

    kind: str
    """Name of the kind of operator in records and reports, such as "softmax"."""
    held: ClassVar[tuple[str, ...]] = ()
    """Names of the operator's tensors; each name is both an attribute and a constructor argument. The leading
    axes of these tensors are sequences and heads. The widest dtype of the tensors is the operator's dtype."""
    masks: ClassVar[tuple[str, ...]] = ()
    """Names of the operator's masks; each name is both an attribute and a constructor argument. The leading
    axes of a mask may have size 1, which is broadcast."""
    options: ClassVar[tuple[str, ...]] = ()
    """Names of all other constructor arguments, which are not tensors."""
    may_hide_columns: bool = True
    """True if a mask may hide a column from all rows, as a padding mask does.

    If True, callers search the support for hidden columns. Kinds of operators without a mask, or with only
    a causal mask, set this attribute to False."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape (..., T, S): leading axes (sequences, heads), T rows and S columns."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows ``start`` to ``stop`` of M, in float32 or float64."""

    def rows_with_logits(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return rows ``start`` to ``stop`` of M (..., R, S), and their logits before the softmax.

        Logits are −∞ where a mask hides an entry, and NaN if they are unknown.
        """
        rows = self.rows(start, stop)
        return rows, rows.new_full((), math.nan).expand(rows.shape)

    @abstractmethod
    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows ``start`` to ``stop`` of the support: True where the mask allows a non-zero entry."""

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Return the support of M, (..., T, S): True where the mask allows a non-zero entry."""
        return self.support_rows(0, self.shape[-2])

    @property
    def dtype(self) -> torch.dtype:
        """Widest dtype of the tensors of the operator, excluding masks."""
        return reduce(torch.promote_types, (tensor.dtype for tensor in self._held()))

    @property
    def device(self) -> torch.device:
        """Device of the tensors of the operator."""
        return self._held()[0].device

    def _held(self) -> list[Tensor]:
        tensors = (getattr(self, name) for name in self.held)
        return [tensor for tensor in tensors if tensor is not None]

    def map_tensors(self: _Kind, change: Callable[[Tensor], Tensor]) -> _Kind:
        """Return a copy of the operator with a function applied to all tensors and masks."""
        tensors = {name: getattr(self, name) for name in (*self.held, *self.masks)}
        changed = {name: None if tensor is None else change(tensor) for name, tensor in tensors.items()}
        return type(self)(**changed, **{name: getattr(self, name) for name in self.options})

    def __getitem__(self: _Kind, index: Index) -> _Kind:
        """Return selected sequences and heads, as in a tensor: ``operator[0, 3]``, ``operator[:, 1:2]``."""
        leading = self.shape[:-2]
        return self.map_tensors(lambda tensor: index_leading(tensor, index, leading))

    def to(self: _Kind, target: torch.device | torch.dtype | str) -> _Kind:
        """Return the operator on another device, or with tensors cast to another dtype.

        Args:
            target: a device, its name, or a floating dtype; boolean masks stay boolean.
        """
        cast = isinstance(target, torch.dtype)
        return self.map_tensors(
            lambda tensor: tensor if cast and not tensor.is_floating_point() else tensor.to(target)
        )

    def dense(self, dtype: torch.dtype | None = None) -> Float[Tensor, "*batch T S"]:
        """Return the matrix M as a tensor, which takes O(T S) memory per head.

        Args:
            dtype: dtype of the computation and the result; by default float64 for an operator in float64,
                otherwise float32.
        """
        operator = self if dtype is None or dtype == self.dtype else self.to(dtype)
        return operator.rows(0, self.shape[-2])

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return M V for values V; the default computes one block of rows at a time, in O(T S V) time."""
        self._check(values)
        tokens = self.shape[-2]
        blocks = [
            self.rows(start, min(start + ROW_BLOCK, tokens)).to(values.dtype) @ values
            for start in range(0, tokens, ROW_BLOCK)
        ]
        return torch.cat(blocks, dim=-2)

    @property
    def mT(self) -> "MixingOperator":  # noqa: N802  (the name of the batched transpose in torch)
        """Transpose Mᵀ (S×T) as an operator; no matrix is formed."""
        return TransposedMixing(self)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Return Mᵀ U for values U; the default computes one block of rows at a time, in O(T S V) time."""
        self._check(values, transposed=True)
        tokens, out = self.shape[-2], None
        for start in range(0, tokens, ROW_BLOCK):
            stop = min(start + ROW_BLOCK, tokens)
            product = self.rows(start, stop).to(values.dtype).mT @ values[..., start:stop, :]
            out = product if out is None else out + product
        assert out is not None  # an operator has at least one row
        return out

    def _check(self, values: Tensor, transposed: bool = False) -> None:
        """Raise if values are not floating-point or do not fit M, or Mᵀ if ``transposed``."""
        subject = "`M.mT @ values`" if transposed else "`M @ values`"
        tokens = self.shape[-2 if transposed else -1]
        if not values.is_floating_point():
            raise ShapeError(
                subject,
                expected="values of a floating type",
                got=str(values.dtype),
                fix="Products would be cut off to whole numbers: cast the values with .float().",
            )
        if values.ndim < 2 or values.shape[-2] != tokens or not self._accepts(values.shape[:-2]):
            raise ShapeError(
                subject,
                expected=f"values of shape (..., {tokens}, V) for an operator of shape {tuple(self.shape)}",
                got=f"{tuple(values.shape)}",
                fix="Put the tokens on the last axis but one; leading axes must broadcast.",
            )

    def _accepts(self, leading: torch.Size) -> bool:
        """Return True if leading axes of values broadcast with the leading axes of the operator."""
        pairs = zip(reversed(leading), reversed(self.shape[:-2]), strict=False)
        return all(have == wanted or 1 in (have, wanted) for have, wanted in pairs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class FastMixing(MixingOperator):
    """Base class of operators that multiply by M and Mᵀ without computing rows of M."""

    @abstractmethod
    def _multiply(self, values: Float[Tensor, "... N V"], transposed: bool) -> Float[Tensor, "... R V"]:
        """Return M V, or Mᵀ V if ``transposed``; the values V and the result are float32 or float64."""

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return M V in the dtype of V."""
        self._check(values)
        return self._multiply(values.to(compute_dtype(self.dtype, values.dtype)), False).to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Return Mᵀ U in the dtype of U."""
        self._check(values, transposed=True)
        return self._multiply(values.to(compute_dtype(self.dtype, values.dtype)), True).to(values.dtype)


class ComposedMixing(MixingOperator):
    """Base class of operators that are composed of other operators (parts) with equal leading axes."""

    def __init__(self, *parts: MixingOperator) -> None:
        self.parts = parts

    def _of(self: _Composed, *parts: MixingOperator) -> _Composed:
        """Return an operator of the same kind, composed of the given parts."""
        return type(self)(*parts)

    @property
    def dtype(self) -> torch.dtype:
        """Widest dtype of the composed operators."""
        return reduce(torch.promote_types, (operator.dtype for operator in self.parts))

    @property
    def device(self) -> torch.device:
        """Device of the first of the composed operators."""
        return self.parts[0].device

    def map_tensors(self: _Composed, change: Callable[[Tensor], Tensor]) -> _Composed:
        """Return the operator with a function applied to every tensor of every part."""
        return self._of(*(operator.map_tensors(change) for operator in self.parts))

    def __getitem__(self: _Composed, index: Index) -> _Composed:
        """Return the operator with selected sequences and heads of every part."""
        return self._of(*(operator[index] for operator in self.parts))


class TransposedMixing(ComposedMixing):
    """Transpose Mᵀ of another operator M, returned by ``.mT``."""

    def __init__(self, operator: MixingOperator) -> None:
        self.operator, self.parts, self.kind = operator, (operator,), operator.kind

    @property
    def shape(self) -> torch.Size:
        """Shape (..., S, T), if M has shape (..., T, S)."""
        *batch, tokens, sources = self.operator.shape
        return torch.Size([*batch, sources, tokens])

    @property
    def mT(self) -> MixingOperator:  # noqa: N802
        """The operator M, because (Mᵀ)ᵀ = M."""
        return self.operator

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of Mᵀ, which are columns of M; all rows of M are computed, one block at a time."""
        tokens = self.operator.shape[-2]
        blocks = [
            self.operator.rows(first, min(first + ROW_BLOCK, tokens))[..., start:stop]
            for first in range(0, tokens, ROW_BLOCK)
        ]
        return torch.cat(blocks, dim=-2).mT

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support of Mᵀ, which are columns of the support of M."""
        return self.operator.support()[..., start:stop].mT

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """Return Mᵀ U, where the values U have one row per row of M."""
        return self.operator.apply_transposed(values)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Return M V: this operator is Mᵀ, and its transpose is M."""
        return self.operator @ values


def causal_rows(start: int, stop: int, sources: int, device: torch.device) -> Bool[Tensor, "R S"]:
    """Return rows ``start`` to ``stop`` of a causal mask: True where column ≤ row."""
    return torch.arange(sources, device=device) <= torch.arange(start, stop, device=device)[:, None]


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype for computations: float64 if any argument is float64, otherwise float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def index_leading(tensor: Tensor, index: Index, leading: torch.Size) -> Tensor:
    """Return a tensor whose leading axes are expanded to the sizes ``leading`` and indexed."""
    axes = tensor.shape[len(leading) :]
    picks = index if isinstance(index, tuple) else (index,)
    picks = picks if any(pick is Ellipsis for pick in picks) else (*picks, ...)
    return tensor.expand(*leading, *axes)[(*picks, *(slice(None) for _ in axes))]


def check_mask(mask: Tensor, shape: torch.Size, subject: str) -> Tensor:
    """Return a mask with leading axes of size 1 added, so that it has as many axes as ``shape``.

    Raise ShapeError if the mask does not broadcast to ``shape``.
    """
    if mask.ndim > len(shape) or any(
        have not in (1, wanted) for have, wanted in zip(reversed(mask.shape), reversed(shape), strict=False)
    ):
        raise ShapeError(
            subject,
            expected=f"a shape that broadcasts to {tuple(shape)}",
            got=f"{tuple(mask.shape)}",
            fix="Pass a (T, S), (B, 1, T, S) or (B, H, T, S) mask.",
        )
    return mask[(None,) * (len(shape) - mask.ndim)]
