"""Detect attention written as softmax and product: follow each softmax to its product with the values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from rankwise.tracing.score_masks import (
    ADDED_PRODUCTS,
    CUTS,
    FILLS,
    MOVES_AXES,
    Entries,
    Masks,
    named_functions,
)

Function = Callable[..., Any]
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax}
LOG_SOFTMAX = {torch.log_softmax, Tensor.log_softmax, F.log_softmax, torch.special.log_softmax}
EXP = {torch.exp, Tensor.exp, Tensor.exp_}
KEEPS_VALUES = {
    F.dropout,
    *named_functions(torch, "dropout clone reshape flatten unsqueeze squeeze"),
    *named_functions(Tensor, "clone reshape flatten unsqueeze squeeze view unflatten contiguous detach"),
    *named_functions(Tensor, "to type type_as float half bfloat16 double"),
}
"""Casts, dropout and reshapes: their result still holds the weights of the softmax."""
PRODUCTS = {*named_functions(torch, "matmul bmm mm"), *named_functions(Tensor, "matmul __matmul__ bmm mm")}
TIMES = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__imul__}
STARTS_ANEW = {
    torch.addmm,
    *named_functions(F, "linear layer_norm rms_norm group_norm batch_norm embedding conv1d conv2d conv3d"),
}
"""Layers with parameters: their output no longer counts as attention scores, even if their input did."""
RECOMBINES = STARTS_ANEW | PRODUCTS | {torch.einsum}
"""Functions that sum over several entries, so that masked entries cannot be followed to their output."""


@dataclass(frozen=True)
class Weights:
    """Attention weights: a tensor computed from the result of a softmax."""

    probabilities: Tensor | None
    """Result of the softmax, before casts and dropout; None if the tensor itself is the result."""
    allowed: Entries | None
    """True at weights that no mask hides; None if unknown."""
    compared: bool
    """True if the scores are a product of two activations, as in Q Kᵀ."""
    intact: bool = True
    """True if the tensor differs from the result of the softmax only by casts, dropout and reshapes."""
    sums_down: bool = False
    """True if columns of the tensor sum to 1 instead of rows, so that only its transpose can mix tokens."""


@dataclass(frozen=True)
class SoftmaxProduct:
    """A product of attention weights with values."""

    matrix: Tensor
    """Attention weights (..., T, S), in the highest precision that the model computed."""
    values: Tensor
    output: Tensor | None
    """Product M V; None if the function also added another tensor, as `torch.baddbmm` does."""
    allowed: Entries | None
    """True at entries of the matrix that no mask has hidden; None if unknown."""
    compared: bool
    values_compared: bool
    """True if the values are themselves a product of two activations, such as Kᵀ V in linear attention."""
    values_learned: bool
    """True if the values are a parameter of the model, such as a table of vectors."""
    axes: tuple[int, ...] | None = None
    """Axis ``axes[i]`` of the function's result is axis i of ``output``; None if axes do not correspond."""


class SoftmaxFollower:
    """Observes torch functions and detects products of attention weights with their values."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all tensors, before a new forward pass."""
        self._weights: Any = WeakIdKeyDictionary()
        self._logarithms: Any = WeakIdKeyDictionary()
        self._compared: Any = WeakIdKeyDictionary()
        self._masks = Masks()

    def observe(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> SoftmaxProduct | None:
        """Register a call of a torch function; return a `SoftmaxProduct` if it multiplies weights by V."""
        if func is Tensor.__setitem__:
            self._assigned(*args[:3])
        if not isinstance(out, Tensor):
            return None
        if func in SOFTMAX or func in LOG_SOFTMAX:
            self._softmax(args, kwargs, out, self._weights if func in SOFTMAX else self._logarithms)
            return None
        if func in EXP and args[0] in self._logarithms:
            self._weights[out] = self._logarithms[args[0]]
            return None
        tensors = _tensors(args, kwargs)
        if func in PRODUCTS:
            mixed = self._product(tensors, out) if self._weights else None
        elif func in ADDED_PRODUCTS and kwargs.get("alpha", 1) == 1:
            mixed = self._product(tensors[1:], out) if self._weights else None
            mixed = None if mixed is None else replace(mixed, output=None, axes=None)
        elif func is torch.einsum:
            mixed = self._einsum(args, out)
        else:
            mixed = None
        self._note_comparison(func, tensors, args, out)
        if out in self._compared:
            self._masks.observe(func, args, kwargs, out, self._compared)
        if mixed is None and self._weights:
            self._follow(func, args, kwargs, out)
        return mixed

    def replace_product(self, out: Tensor, changed: Tensor) -> None:
        """Register that the model continues with ``changed`` in place of the output ``out``."""
        if out in self._compared:
            self._compared[changed] = True

    # --- scores -------------------------------------------------------------------------------------------

    def _note_comparison(
        self, func: Function, tensors: list[Tensor], args: tuple[Any, ...], out: Tensor
    ) -> None:
        if func is torch.einsum:
            read = read_einsum(args)
            compared = read is not None and _activations(*read.tensors) and compares(read)
        elif func in PRODUCTS or func in ADDED_PRODUCTS:
            first, second = tensors[-2:] if len(tensors) > 1 else (out, out)
            compared = _activations(first, second) and _same_batch(first, second)
        elif self._compared:
            compared = func not in STARTS_ANEW and any(tensor in self._compared for tensor in tensors)
        else:
            compared = False
        if compared:
            self._compared[out] = True

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, known: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = args[0] if args else kwargs.get("input")
        if out.dim() < 2 or dim is None or not isinstance(scores, Tensor):
            return
        compared, axis = scores in self._compared, dim % out.dim() - out.dim()
        if axis == -1 or (axis == -2 and compared):
            allowed = self._masks.allowed(scores, compared)
            known[out] = Weights(None, allowed, compared, sums_down=axis == -2)

    # --- from the softmax to the product ------------------------------------------------------------------

    def _follow(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        source = next((tensor for tensor in tensors if tensor in self._weights), None)
        if source is None:
            return
        weights: Weights = self._weights[source]
        if func in KEEPS_VALUES and out.numel() == source.numel():
            if out is not source:
                self._weights[out] = replace(weights, probabilities=_or(weights.probabilities, source))
        elif _still_weights(func, source, out) and (weights.compared or func not in STARTS_ANEW):
            allowed = None
            if weights.allowed is not None and func not in RECOMBINES:
                allowed = weights.allowed.through(func, args, kwargs, source, out)
                allowed = _zeroed(allowed, func, args, out)
            down = weights.sums_down and not _turns(func, args, kwargs, source)
            self._weights[out] = Weights(None, allowed, weights.compared, intact=False, sums_down=down)

    def _assigned(self, tensor: Tensor, where: object, value: object) -> None:
        weights = self._weights.get(tensor)
        if weights is not None:
            self._weights[tensor] = replace(weights, probabilities=None, intact=False)
        elif tensor in self._compared:
            self._masks.assigned(tensor, where, value)

    def _product(self, tensors: list[Tensor], out: Tensor) -> SoftmaxProduct | None:
        if len(tensors) != 2:
            return None
        first, second = tensors
        weights = self._weights.get(first)
        straight = tuple(range(out.dim()))
        if weights is not None and not weights.sums_down:
            return replace(self._mixed(weights, first, second, second, out), axes=straight)
        weights = self._weights.get(second)
        if weights is None or min(first.dim(), second.dim(), out.dim()) < 2:
            return None
        # If channels come before tokens, the model computes Y = V Mᵀ, which is Yᵀ = M Vᵀ.
        changed = replace(weights, probabilities=None, intact=False)
        if weights.allowed is not None:
            swapped = weights.allowed.through(Tensor.transpose, (second, -2, -1), {}, second, second.mT)
            changed = replace(changed, allowed=swapped)
        turned = (*straight[:-2], straight[-1], straight[-2])
        return replace(self._mixed(changed, second.mT, first, first.mT, out.mT), axes=turned)

    def _einsum(self, args: tuple[Any, ...], out: Tensor) -> SoftmaxProduct | None:
        read = read_einsum(args) if self._weights else None
        if read is None:
            return None
        for at in (0, 1):
            operand, other, theirs = read.tensors[at], read.tensors[1 - at], read.letters[1 - at]
            weights, how = self._weights.get(operand), contraction(read, at)
            if weights is None or how is None or weights.sums_down:
                continue
            values = other
            if set(how.axes) <= set(theirs):
                values = torch.einsum(f"{theirs}->{how.axes}{how.source}{how.channel}", other)
            wanted = f"{how.axes}{how.row}{how.channel}"
            output = torch.einsum(f"{read.result}->{wanted}", out)
            whole = sorted(wanted) == sorted(read.result)
            axes = tuple(read.result.index(letter) for letter in wanted) if whole else None
            return replace(self._mixed(weights, operand, other, values, output), axes=axes)
        return None

    def _mixed(
        self, weights: Weights, operand: Tensor, given: Tensor, values: Tensor, out: Tensor
    ) -> SoftmaxProduct:
        finest = _or(weights.probabilities, operand) if weights.intact else operand
        return SoftmaxProduct(
            finest if finest.shape == operand.shape else finest.reshape(operand.shape),
            values,
            out,
            allowed=weights.allowed,
            compared=weights.compared,
            values_compared=given in self._compared,
            values_learned=isinstance(given, nn.Parameter),
        )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments, including tensors in lists, as in `torch.cat`."""
    given = (*args, *kwargs.values())
    listed = (value if isinstance(value, list | tuple) else (value,) for value in given)
    return [value for values in listed for value in values if isinstance(value, Tensor)]


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _activations(first: Tensor, second: Tensor) -> bool:
    return not isinstance(first, nn.Parameter) and not isinstance(second, nn.Parameter)


def _same_batch(first: Tensor, second: Tensor) -> bool:
    if first.dim() != second.dim():
        return False
    return first.dim() == 2 or first.shape[0] == second.shape[0] or 1 in (first.shape[0], second.shape[0])


def _zeroed(allowed: Entries | None, func: Function, args: tuple[Any, ...], out: Tensor) -> Entries | None:
    """Return ``allowed`` without the entries that a boolean mask sets to zero after the softmax."""
    masks = [arg for arg in args[1:2] if isinstance(arg, Tensor) and arg.dtype == torch.bool]
    if allowed is None or not masks:
        return allowed
    if func in FILLS and len(args) > 2 and not isinstance(args[2], Tensor) and args[2] == 0:
        return Entries(out.shape, lambda: allowed.of(out.shape) & ~masks[0])
    if func in TIMES:
        return Entries(out.shape, lambda: allowed.of(out.shape) & masks[0])
    return allowed


def _turns(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor) -> bool:
    """Return True if a call swaps the last two axes, which the strides of a small test tensor show."""
    empty = torch.empty([2] * source.dim(), device="meta")
    return func in MOVES_AXES and func(empty, *args[1:], **kwargs).stride()[-1] == 2


def _still_weights(func: Function, source: Tensor, out: Tensor) -> bool:
    """Return True if a tensor computed from attention weights has the shape of attention weights too."""
    if out.dim() < 2 or not out.is_floating_point():
        return False
    if func in MOVES_AXES:
        return True
    cut = out.shape[-2] == source.shape[-2] and out.shape[-1] < source.shape[-1]
    return out.shape[-2:] == source.shape[-2:] or (func in CUTS and cut)


@dataclass(frozen=True)
class Einsum:
    """An einsum of two tensors, with the ellipsis of its equation replaced by letters."""

    tensors: tuple[Tensor, Tensor]
    letters: tuple[str, str]
    result: str


@dataclass(frozen=True)
class Contraction:
    """Letters of an einsum that multiplies matrices (…, T, S) by values."""

    axes: str
    """Letters of the leading axes; ``row``, ``source`` and ``channel`` are the letters of T, S and V."""
    row: str
    source: str
    channel: str


def read_einsum(args: tuple[Any, ...]) -> Einsum | None:
    """Parse the arguments of `torch.einsum`; None unless the equation has two operands and ``->``."""
    equation = args[0] if args and isinstance(args[0], str) else ""
    tensors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or len(tensors) != 2 or not result:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    named = [len(mine.replace("...", "")) for mine in letters]
    # Number of axes that "..." replaces in each operand.
    hidden = [tensor.dim() - count for tensor, count in zip(tensors, named, strict=True)]
    free = "".join(letter for letter in ascii_uppercase if letter not in equation)[: max(hidden)]
    first, second = (
        mine.replace("...", free[len(free) - count :]) for mine, count in zip(letters, hidden, strict=True)
    )
    return Einsum((tensors[0], tensors[1]), (first, second), result.replace("...", free))


def contraction(einsum: Einsum, at: int) -> Contraction | None:
    """Return the axis letters if operand ``at`` is a matrix (…, T, S) times the other operand; else None."""
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
    """Return True if an einsum may compute scores Q Kᵀ: its operands share a batch axis, or have none."""
    first, second = einsum.letters
    shared = set(first) & set(second) & set(einsum.result)
    return bool(shared) or len(first) == len(second) == 2
