"""Einsum equations, read: which letters of which operand become which axes."""

from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Einsum:
    """An einsum of two tensors, its ellipsis written out as letters."""

    tensors: tuple[Tensor, Tensor]
    letters: tuple[str, str]
    result: str


@dataclass(frozen=True)
class Contraction:
    """How one operand, a stack of matrices, is applied to the other."""

    axes: str
    """Leading axes of the matrices."""
    row: str
    source: str
    channel: str


def read(args: tuple[Any, ...]) -> Einsum | None:
    """The einsum that ``torch.einsum(*args)`` computes, if it has two operands and names its result."""
    equation = args[0] if args and isinstance(args[0], str) else ""
    tensors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or len(tensors) != 2 or not result:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    hidden = [
        tensor.dim() - len(mine.replace("...", ""))
        for mine, tensor in zip(letters, tensors, strict=True)
        if "..." in mine
    ]
    free = "".join(letter for letter in ascii_uppercase if letter not in equation)[: max(hidden, default=0)]
    first, second = (
        mine.replace("...", free[len(free) - (tensor.dim() - len(mine.replace("...", ""))) :])
        for mine, tensor in zip(letters, tensors, strict=True)
    )
    return Einsum((tensors[0], tensors[1]), (first, second), result.replace("...", free))


def contraction(einsum: Einsum, at: int) -> Contraction | None:
    """How operand ``at``, with sources on its last axis and rows on the one before, mixes the other."""
    mine, theirs, result = einsum.letters[at], einsum.letters[1 - at], einsum.result
    if len(mine) < 2:
        return None
    source, row = mine[-1], mine[-2]
    channels = [letter for letter in theirs if letter not in mine]
    contracts = source in theirs and source not in result and row in result and row not in theirs
    if not contracts or len(channels) != 1:
        return None
    return Contraction(mine[:-2], row, source, channels[0])


def compares(einsum: Einsum) -> bool:
    """Whether it compares two streams entry by entry: some axes shared and kept, or two plain matrices."""
    first, second = einsum.letters
    shared = set(first) & set(second) & set(einsum.result)
    return bool(shared) or len(first) == len(second) == 2
