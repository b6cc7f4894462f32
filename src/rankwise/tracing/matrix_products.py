"""Read products of two tensors, `matmul` and `einsum`, as matrices (…, T, S) times values (…, S, V)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankwise.tracing.score_masks import ADDED_PRODUCTS, named_functions

PRODUCTS = {*named_functions(torch, "matmul bmm mm"), *named_functions(Tensor, "matmul __matmul__ bmm mm")}


@dataclass(frozen=True)
class MatrixProduct:
    """One of the two ways to read a product of tensors: one tensor is the matrix, the other the values."""

    operand: Tensor
    """Tensor that holds the matrix."""
    matrix: Tensor
    """The matrix (…, T, S)."""
    given: Tensor
    """Tensor that holds the values."""
    values: Tensor
    """The values (…, S, V)."""
    output: Tensor | None
    """Product (…, T, V); None if the function also added another tensor, as `torch.baddbmm` does."""
    axes: tuple[int, ...] | None
    """Axis ``axes[i]`` of the function's result is axis i of ``output``; None if axes do not correspond."""
    order: tuple[int, ...] | None
    """Permutation of the axes of ``operand`` to the axes of ``matrix``; None if they have the same order."""
    summed: tuple[int, ...]
    """Axis of ``operand`` that is summed over; in `matmul`, also the other axis that may hold sources."""
    contracted: int | None
    """Axis of ``given`` that is summed over; None if the leading axes of both tensors differ."""

    def as_keys_and_values(self, axis: int | None) -> tuple[Tensor, Tensor] | None:
        """Return keys (…, F, S) and values (…, S, V) if a later product sums over an axis of the result."""
        if self.axes is None or list(self.axes[:-2]) != sorted(self.axes[:-2]):
            return None
        row, channel = self.axes[-2:]
        if axis == row:
            return self.matrix, self.values
        return (self.values.mT, self.matrix.mT) if axis == channel else None


def matrix_products(
    func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], out: Tensor
) -> list[MatrixProduct]:
    """Return the ways to read a call of a torch function as a matrix times values; [] for other functions."""
    if func is torch.einsum:
        return list(_einsum_products(args, out))
    if func in PRODUCTS:
        return _matmul_products(tensors, out)
    if func in ADDED_PRODUCTS:
        return [replace(product, output=None, axes=None) for product in _matmul_products(tensors[1:], out)]
    return []


def _matmul_products(tensors: list[Tensor], out: Tensor) -> list[MatrixProduct]:
    if len(tensors) != 2 or min(tensor.dim() for tensor in (*tensors, out)) < 2:
        return []
    first, second = tensors
    straight = tuple(range(out.dim()))
    turned = (*straight[:-2], straight[-1], straight[-2])
    swapped = (*range(second.dim() - 2), second.dim() - 1, second.dim() - 2)
    return [
        MatrixProduct(first, first, second, second, out, straight, None, (-1,), second.dim() - 2),
        # If channels come before tokens, the model computes Y = V Mᵀ, which is Yᵀ = M Vᵀ.
        MatrixProduct(second, second.mT, first, first.mT, out.mT, turned, swapped, (-1, -2), first.dim() - 1),
    ]


class Einsum(NamedTuple):
    """An einsum of two tensors, with the ellipsis of its equation replaced by letters."""

    tensors: tuple[Tensor, Tensor]
    letters: tuple[str, str]
    result: str


def _einsum_products(args: tuple[Any, ...], out: Tensor) -> Iterator[MatrixProduct]:
    read = read_einsum(args)
    if read is None:
        return
    for step in (1, -1):
        (operand, other), (mine, theirs) = read.tensors[::step], read.letters[::step]
        summed = [letter for letter in mine if letter in theirs and letter not in read.result]
        rows = [letter for letter in mine if letter in read.result and letter not in theirs]
        channels = [letter for letter in theirs if letter not in mine]
        if len(summed) != 1 or len(channels) != 1 or not rows:
            continue
        source, row, channel = summed[0], rows[-1], channels[0]
        leading = mine.replace(source, "").replace(row, "")
        wanted = leading + row + channel
        if not set(wanted) <= set(read.result):
            continue
        letters = leading + row + source
        order = None if letters == mine else tuple(map(mine.index, letters))
        whole = sorted(wanted) == sorted(read.result)
        aligned = leading == "".join(letter for letter in theirs if letter in leading)
        values = other
        if set(leading) <= set(theirs):
            values = torch.einsum(f"{theirs}->{leading}{source}{channel}", other)
        yield MatrixProduct(
            operand,
            operand if order is None else operand.permute(*order),
            other,
            values,
            torch.einsum(f"{read.result}->{wanted}", out),
            tuple(map(read.result.index, wanted)) if whole else None,
            order,
            (mine.index(source) - len(mine),),
            theirs.index(source) if aligned else None,
        )


def read_einsum(args: tuple[Any, ...]) -> Einsum | None:
    """Parse the arguments of `torch.einsum`; None unless the equation has two operands and ``->``.

    A third operand may scale another operand, as the normalization of linear attention does.
    """
    equation = args[0] if args and isinstance(args[0], str) else ""
    tensors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) not in (2, 3) or len(tensors) != len(letters) or not result:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    named = [len(mine.replace("...", "")) for mine in letters]
    # Number of axes that "..." replaces in each operand.
    hidden = [tensor.dim() - count for tensor, count in zip(tensors, named, strict=True)]
    free = "".join(letter for letter in ascii_uppercase if letter not in equation)[: max(hidden)]
    letters = [
        mine.replace("...", free[len(free) - count :]) for mine, count in zip(letters, hidden, strict=True)
    ]
    result = result.replace("...", free)
    if len(letters) == 3:
        pairs = [(at, to) for at in (2, 1, 0) for to in range(3) if set(letters[at]) < set(letters[to])]
        if not pairs:
            return None
        at, to = pairs[0]
        scaled = torch.einsum(f"{letters[to]},{letters[at]}->{letters[to]}", tensors[to], tensors[at])
        kept = [(scaled if i == to else tensors[i], letters[i]) for i in range(3) if i != at]
        tensors, letters = [tensor for tensor, _ in kept], [mine for _, mine in kept]
    return Einsum(tuple(tensors), tuple(letters), result)  # type: ignore[arg-type]


def compares(args: tuple[Any, ...]) -> bool:
    """Return True if an einsum may compute scores Q Kᵀ: its operands share a batch axis, or have none."""
    einsum = read_einsum(args)
    if einsum is None or any(isinstance(tensor, nn.Parameter) for tensor in einsum.tensors):
        return False
    first, second = einsum.letters
    shared = set(first) & set(second) & set(einsum.result)
    return bool(shared) or len(first) == len(second) == 2
