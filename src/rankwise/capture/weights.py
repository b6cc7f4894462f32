"""Attention weights written out by hand: follow a softmax's result to the product with the values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from rankwise.capture import einsum

Function = Callable[..., Any]
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax}
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
MOVES_AXES = {
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
    Tensor.swapaxes,
    torch.swapaxes,
    Tensor.movedim,
    torch.movedim,
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.T.__get__,  # type: ignore[attr-defined]
}
PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
}
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
"""Scores = bias + Q Kᵀ in one call."""
STARTS_ANEW = {
    F.linear,
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.batch_norm,
    F.embedding,
    torch.addmm,
    F.conv1d,
    F.conv2d,
    F.conv3d,
}
"""Layers with weights of their own: what comes out is no score, even if scores went in."""


@dataclass(frozen=True)
class Weights:
    """What is known of a tensor that came out of a softmax over its last axis."""

    probabilities: Tensor | None
    """The softmax's own result, before casts and dropout; None where it is the tensor itself."""
    scores: Tensor | None
    """What the softmax was taken of."""
    compared: bool
    """Whether the scores compare activations with activations, as Q Kᵀ does."""
    intact: bool = True
    """Whether only casts, dropout and new shapes lie between the softmax and the tensor."""


@dataclass(frozen=True)
class Mixed:
    """A product of attention weights with values."""

    matrix: Tensor
    """(..., T, S), as finely as the model knew it."""
    values: Tensor
    output: Tensor
    scores: Tensor | None
    """What the softmax was taken of, if the matrix is its result as it was."""
    compared: bool
    values_compared: bool
    """Whether the values, too, are a product of activations: Kᵀ V of linear attention."""
    values_learned: bool
    """Whether the values are weights of the model: a table that tokens are looked up in."""


class WeightsTap:
    """Watches torch functions one by one and says when attention weights meet their values."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: a new forward pass begins."""
        self._weights: Any = WeakIdKeyDictionary()
        self._compared: Any = WeakIdKeyDictionary()

    def saw(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Mixed | None:
        """Take note of one call; the mixing it completes, if it does."""
        if func is Tensor.__setitem__:
            self._written_into(args[0])
        if not isinstance(out, Tensor):
            return None
        if func in SOFTMAX:
            self._softmax(args, kwargs, out)
            return None
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if func in PRODUCTS:
            mixed = self._product(tensors, out) if self._weights else None
        elif func is torch.einsum:
            mixed = self._einsum(args, out)
        else:
            mixed = None
        self._note_comparison(func, tensors, args, out)
        if mixed is None and self._weights:
            self._follow(func, tensors, out)
        return mixed

    def _known(self, tensor: Tensor) -> Weights | None:
        return self._weights.get(tensor)

    # --- scores -------------------------------------------------------------------------------------------

    def _note_comparison(
        self, func: Function, tensors: list[Tensor], args: tuple[Any, ...], out: Tensor
    ) -> None:
        if func is torch.einsum:
            read = einsum.read(args)
            compared = read is not None and _activations(*read.tensors) and einsum.compares(read)
        elif func in PRODUCTS or func in ADDED_PRODUCTS:
            first, second = tensors[-2:] if len(tensors) > 1 else (out, out)
            compared = _activations(first, second) and _same_batch(first, second)
        elif self._compared:
            compared = func not in STARTS_ANEW and any(tensor in self._compared for tensor in tensors)
        else:
            compared = False
        if compared:
            self._compared[out] = True

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = args[0] if args else kwargs.get("input")
        if out.dim() >= 2 and dim is not None and dim % out.dim() == out.dim() - 1:
            self._weights[out] = Weights(None, scores, compared=scores in self._compared)

    # --- from the softmax to the product ------------------------------------------------------------------

    def _follow(self, func: Function, tensors: list[Tensor], out: Tensor) -> None:
        source = next((tensor for tensor in tensors if self._known(tensor) is not None), None)
        if source is None:
            return
        weights = self._known(source)
        assert weights is not None
        if func in KEEPS_VALUES and out.numel() == source.numel():
            if out is not source:
                self._weights[out] = replace(weights, probabilities=_or(weights.probabilities, source))
        elif _still_weights(func, source, out) and (weights.compared or func not in STARTS_ANEW):
            self._weights[out] = Weights(None, None, weights.compared, intact=False)

    def _written_into(self, tensor: Tensor) -> None:
        weights = self._known(tensor)
        if weights is not None:
            self._weights[tensor] = Weights(None, None, weights.compared, intact=False)

    def _product(self, tensors: list[Tensor], out: Tensor) -> Mixed | None:
        if len(tensors) != 2:
            return None
        first, second = tensors
        weights = self._known(first)
        if weights is not None:
            return self._mixed(weights, first, second, second, out)
        weights = self._known(second)
        if weights is None or min(first.dim(), second.dim(), out.dim()) < 2:
            return None
        # Channels first: Y = V Mᵀ is Yᵀ = M Vᵀ.
        changed = Weights(None, None, weights.compared, intact=False)
        return self._mixed(changed, second.mT, first, first.mT, out.mT)

    def _einsum(self, args: tuple[Any, ...], out: Tensor) -> Mixed | None:
        read = einsum.read(args) if self._weights else None
        if read is None:
            return None
        for at in (0, 1):
            operand, other = read.tensors[at], read.tensors[1 - at]
            weights, how = self._known(operand), einsum.contraction(read, at)
            if weights is None or how is None:
                continue
            values, theirs = other, read.letters[1 - at]
            if set(how.axes) <= set(theirs):
                values = torch.einsum(f"{theirs}->{how.axes}{how.source}{how.channel}", other)
            output = torch.einsum(f"{read.result}->{how.axes}{how.row}{how.channel}", out)
            return self._mixed(weights, operand, other, values, output)
        return None

    def _mixed(self, weights: Weights, operand: Tensor, given: Tensor, values: Tensor, out: Tensor) -> Mixed:
        finest = _or(weights.probabilities, operand) if weights.intact else operand
        return Mixed(
            finest if finest.shape == operand.shape else finest.reshape(operand.shape),
            values,
            out,
            scores=weights.scores if weights.intact else None,
            compared=weights.compared,
            values_compared=given in self._compared,
            values_learned=isinstance(given, nn.Parameter),
        )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _activations(first: Tensor, second: Tensor) -> bool:
    return not isinstance(first, nn.Parameter) and not isinstance(second, nn.Parameter)


def _same_batch(first: Tensor, second: Tensor) -> bool:
    if first.dim() != second.dim():
        return False
    return first.dim() == 2 or first.shape[0] == second.shape[0] or 1 in (first.shape[0], second.shape[0])


def _still_weights(func: Function, source: Tensor, out: Tensor) -> bool:
    """Head masks, renormalisation, talking heads, moved axes, columns cut off: another matrix of weights."""
    if out.dim() < 2 or not out.is_floating_point():
        return False
    if func in MOVES_AXES:
        return True
    cut = out.shape[-2] == source.shape[-2] and out.shape[-1] < source.shape[-1]
    return out.shape[-2:] == source.shape[-2:] or (func is Tensor.__getitem__ and cut)
