"""Attention weights written out by hand: follow a softmax's result to the product with the values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
KEEPS_VALUES = {
    F.dropout,
    torch.dropout,
    torch.clone,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.to,
    Tensor.type,
    Tensor.type_as,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.double,
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    torch.flatten,
    Tensor.unflatten,
    Tensor.unsqueeze,
    torch.unsqueeze,
    Tensor.squeeze,
    torch.squeeze,
    Tensor.detach,
}
"""Casts, dropout and new shapes: what is mixed is still the softmax (dropout's rescaling apart)."""
CHANGES_VALUES = {
    Tensor.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
    torch.mul,
    Tensor.div,
    Tensor.__truediv__,
    torch.div,
    Tensor.masked_fill,
    torch.masked_fill,
    Tensor.nan_to_num,
    torch.nan_to_num,
    torch.where,
    Tensor.where,
    Tensor.add,
    Tensor.__add__,
    torch.add,
    F.normalize,
    Tensor.__getitem__,
    torch.einsum,
    F.conv2d,
}
"""Head masks, renormalisation, talking heads …: what is mixed is the changed matrix, if its shape fits."""
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}


@dataclass(frozen=True)
class Weights:
    """A tensor that came out of a softmax over its last axis."""

    probabilities: Tensor
    """The softmax's own result, before casts and dropout."""
    intact: bool
    """Whether only casts, dropout and new shapes lie between the two."""


@dataclass(frozen=True)
class Mixed:
    """A product of attention weights with values."""

    matrix: Tensor
    """(..., T, S), as finely as the model knew it."""
    values: Tensor
    output: Tensor


class WeightsTap:
    """Watches torch functions one by one and says when attention weights meet their values."""

    def __init__(self) -> None:
        self._weights: Any = WeakIdKeyDictionary()

    def clear(self) -> None:
        """Forget everything: a new forward pass begins."""
        self._weights = WeakIdKeyDictionary()

    def saw(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Mixed | None:
        """Take note of one call; the mixing it completes, if it does."""
        if not isinstance(out, Tensor):
            return None
        if func in SOFTMAX:
            self._softmax(args, kwargs, out)
            return None
        if not self._weights:
            return None
        if func in PRODUCTS:
            mixed = self._product(args, kwargs, out)
        elif func is torch.einsum:
            mixed = self._einsum(args, out)
        else:
            mixed = None
        if mixed is None and (func in KEEPS_VALUES or func in CHANGES_VALUES):
            self._follow(func, args, out)
        return mixed

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if out.dim() >= 3 and dim is not None and dim % out.dim() == out.dim() - 1:
            self._weights[out] = Weights(out, intact=True)

    def _known(self, tensor: object) -> Weights | None:
        return self._weights.get(tensor) if isinstance(tensor, Tensor) else None

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], out: Tensor) -> None:
        source = next((arg for arg in args if self._known(arg) is not None), None)
        if source is None or out is source:
            return
        weights = self._known(source)
        assert weights is not None
        if func in KEEPS_VALUES and out.numel() == source.numel():
            self._weights[out] = weights
        elif out.dim() >= 3 and out.shape[-2:] == source.shape[-2:]:
            self._weights[out] = Weights(out, intact=False)

    def _product(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Mixed | None:
        operands = [*args, *kwargs.values()][:2]
        weights = self._known(operands[0]) if len(operands) == 2 else None
        if weights is None or not isinstance(operands[1], Tensor):
            return None
        return self._mixed(weights, operands[0], operands[1], out)

    def _einsum(self, args: tuple[Any, ...], out: Tensor) -> Mixed | None:
        equation = args[0] if args and isinstance(args[0], str) else ""
        tensors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        inputs, _, result = equation.replace(" ", "").partition("->")
        letters = inputs.split(",")
        if len(letters) != 2 or len(tensors) != 2 or not result or "." in equation:
            return None
        for at, other in ((0, 1), (1, 0)):
            weights, mine, theirs = self._known(tensors[at]), letters[at], letters[other]
            if weights is None:
                continue
            source, row = mine[-1], mine[-2]
            channel = [letter for letter in theirs if letter not in mine]
            contracts = source in theirs and source not in result and row in result and row not in theirs
            if not contracts or len(channel) != 1:
                continue
            axes, values = mine[:-2], tensors[other]
            if set(axes) <= set(theirs):
                values = torch.einsum(f"{theirs}->{axes}{source}{channel[0]}", values)
            output = torch.einsum(f"{result}->{axes}{row}{channel[0]}", out)
            return self._mixed(weights, tensors[at], values, output)
        return None

    def _mixed(self, weights: Weights, operand: Tensor, values: Tensor, output: Tensor) -> Mixed:
        finest = weights.probabilities if weights.intact else operand
        if finest.shape != operand.shape:
            finest = finest.reshape(operand.shape)
        return Mixed(finest, values, output)
