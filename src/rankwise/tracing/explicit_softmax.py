"""Detect attention written as softmax and product: follow each softmax to its product with the values."""

from collections import Counter
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rankwise._internals.batches import tensors_in
from rankwise.tracing.axes import same_for_all
from rankwise.tracing.score_masks import Entries, Masks
from rankwise.tracing.torch_functions import (
    ADDED_PRODUCTS,
    CUTS,
    DIFFERENCES,
    KEEPS_VALUES,
    LAST_AXIS,
    MOVES_AXES,
    PRODUCTS,
    SOFTMAX,
    STARTS_ANEW,
    Function,
)


@dataclass(frozen=True)
class Weights:
    """Attention weights: a tensor computed from the result of a softmax along its last axis."""

    probabilities: Tensor | None
    """Weights before casts, dropout and reshapes, in higher precision. None for the weights themselves."""
    allowed: Entries | None
    """True at weights that no mask hides. None if the masks are unknown."""
    logits: Entries | None
    """Inputs of the softmax. None if unknown, or if weights are mixed after the softmax."""
    compared: bool
    """True if the scores are a product of two activations, as in Q Kᵀ."""


class MatrixProduct(NamedTuple):
    """A product of attention weights with values, as a torch function computes it."""

    weights: Tensor
    """Tensor that holds the matrix."""
    order: tuple[int, ...]
    """Permutation of the axes of ``weights`` to the axes of the matrix (…, T, S)."""
    given: Tensor
    """Tensor that holds the values."""
    values: Tensor
    """The values (…, S, V)."""
    output: Tensor
    """The product (…, T, V)."""
    axes: tuple[int, ...]
    """Axis ``axes[i]`` of the function's result is axis i of ``output``."""


@dataclass(frozen=True)
class SoftmaxProduct:
    """Product of attention weights with values. The matrix is the most precise that the model computed."""

    matrix: Tensor
    """The matrix (…, T, S)."""
    values: Tensor
    """The values (…, S, V)."""
    output: Tensor
    """The product (…, T, V)."""
    axes: tuple[int, ...]
    """Axis ``axes[i]`` of the function's result is axis i of ``output``."""
    allowed: Entries | None
    """True at entries of the matrix that no mask has hidden. None if the masks are unknown."""
    logits: Entries | None
    """Logits of the entries of the matrix. None if unknown."""
    compared: bool
    """True if the scores are a product of two activations, as in Q Kᵀ."""
    values_compared: bool
    """True if the values are themselves a product of two activations, such as Kᵀ V in linear attention."""
    values_learned: bool
    """True if the values are weights or the same for every sequence, such as a table of vectors."""


class SoftmaxFollower:
    """Observes torch functions in one forward pass, and detects products of attention weights with values."""

    def __init__(self) -> None:
        self._weights: Any = WeakIdKeyDictionary()
        self._compared: Any = WeakIdKeyDictionary()
        self._masks = Masks()
        self._shifted: Any = WeakIdKeyDictionary()
        """Scores before a number per row was subtracted, by the result; None if they are not the logits."""

    def observe(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> SoftmaxProduct | None:
        """Register a call of a torch function. Return its product of weights with values, otherwise None."""
        if func is Tensor.__setitem__ and args[0] in self._weights:
            self._weights[args[0]] = replace(self._weights[args[0]], probabilities=None)
        if not isinstance(out, Tensor) or out.is_nested:
            return None
        if func in SOFTMAX:
            self._softmax(args, kwargs, out)
            return None
        tensors = tensors_in((*args, *kwargs.values()))
        product = self._product(func, args, tensors, out) if self._weights else None
        if sizes := self._compares(func, args, tensors, out):
            self._compared[out] = sizes
            self._follow_shifts(func, tensors, out)
            self._masks.observe(func, args, kwargs, out, self._compared)
        if product is None and self._weights:
            self._follow(func, args, kwargs, out)
        return product

    def replace_product(self, out: Tensor, changed: Tensor) -> None:
        """Register that the model continues with ``changed`` in place of the output ``out``."""
        if out in self._compared:
            self._compared[changed] = self._compared[out]

    def _compares(
        self, func: Function, args: tuple[Any, ...], tensors: list[Tensor], out: Tensor
    ) -> tuple[int, ...] | None:
        """Return the last two sizes of the product of two activations from which ``out`` is computed.

        The product may be ``out`` itself. Return None if there is no such product. A product before a layer
        with parameters counts only if the layer mixes only heads.
        """
        if func in PRODUCTS or func in ADDED_PRODUCTS:
            factors = tensors[-2:]
            same_axes = len(factors) == 2 and factors[0].dim() == factors[1].dim()
            learned = any(isinstance(factor, nn.Parameter) for factor in factors)
            return tuple(out.shape[-2:]) if same_axes and not learned else None
        einsum = read_einsum(args) if func is torch.einsum else None
        if einsum is not None:
            learned = any(isinstance(tensor, nn.Parameter) for tensor in einsum.tensors)
            shared = set.intersection(*map(set, (*einsum.letters, einsum.result)))
            return tuple(out.shape[-2:]) if shared and not learned else None
        sizes = next((self._compared[tensor] for tensor in tensors if tensor in self._compared), None)
        kept = sizes is not None and (func not in STARTS_ANEW or _mixes_heads(func, tensors[0], out, sizes))
        return sizes if kept else None

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = args[0] if args else kwargs.get("input")
        if out.dim() > 1 and isinstance(scores, Tensor) and dim in (-1, out.dim() - 1):
            compared = scores in self._compared
            logits = self._shifted.get(scores, scores)
            numbers = None if logits is None else Entries(logits.shape, logits.detach)
            self._weights[out] = Weights(None, self._masks.allowed(scores, compared), numbers, compared)

    def _follow_shifts(self, func: Function, tensors: list[Tensor], out: Tensor) -> None:
        """Register scores from which a number per row is subtracted, such as the largest of the row.

        This does not change the softmax. The logits are the scores before, if only reshapes and casts follow.
        """
        scores = next((tensor for tensor in tensors if tensor in self._compared), out)
        shift = tensors[1] if func in DIFFERENCES and len(tensors) == 2 else None
        if shift is not None and (shift.dim() == 0 or shift.shape[-1] == 1):
            self._shifted[out] = None if out is scores else self._shifted.get(scores, scores)
        elif scores in self._shifted and func not in PRODUCTS | ADDED_PRODUCTS | {torch.einsum}:
            self._shifted[out] = self._shifted[scores] if func in KEEPS_VALUES else None

    def _follow(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        sources = [tensor for tensor in tensors if tensor in self._weights]
        if not sources:
            return
        source = sources[0]
        weights: Weights = self._weights[source]
        if func in KEEPS_VALUES and out.numel() == source.numel():
            if out is not source:
                first = source if weights.probabilities is None else weights.probabilities
                self._weights[out] = replace(weights, probabilities=first)
        elif _still_weights(func, source, out) and (weights.compared or func not in STARTS_ANEW):
            call = func, args, kwargs, source, out
            allowed = None if func in PRODUCTS else _through(weights.allowed, *call)
            mixed = func in PRODUCTS | STARTS_ANEW | {torch.einsum} or len(sources) > 1
            logits = None if mixed else _through(weights.logits, *call)
            self._weights[out] = Weights(None, allowed, logits, weights.compared)

    def _product(
        self, func: Function, args: tuple[Any, ...], tensors: list[Tensor], out: Tensor
    ) -> SoftmaxProduct | None:
        product = _read_product(func, args, tensors, out, self._weights)
        if product is None:
            return None
        weights, operand, given = self._weights[product.weights], product.weights, product.given
        if given in self._weights and self._weights[given].compared:
            return None  # the second factor is an attention matrix, not values
        matrix = operand.permute(*product.order)
        if weights.probabilities is not None:
            matrix = weights.probabilities.reshape(operand.shape).permute(*product.order)
        call: tuple[Any, ...] = (Tensor.permute, (operand, *product.order), {}, operand, matrix)
        return SoftmaxProduct(
            matrix,
            product.values,
            product.output,
            product.axes,
            _through(weights.allowed, *call),
            _through(weights.logits, *call),
            compared=weights.compared,
            values_compared=given in self._compared,
            values_learned=same_for_all(given, operand),
        )


def _through(entries: Entries | None, *call: Any) -> Entries | None:
    """Return `Entries.through` of a call, or None for None."""
    return None if entries is None else entries.through(*call)


def _mixes_heads(func: Function, scores: Tensor, out: Tensor, sizes: tuple[int, ...]) -> bool:
    """Return True if a layer with parameters mixes the heads of scores, but not tokens ("talking heads").

    Examples are a layer that acts on the last axis of (B, T, S, H), and a convolution of (B, H, T, S).
    """
    if func in LAST_AXIS:
        return not Counter(sizes) - Counter(scores.shape[1:-1])
    return tuple(scores.shape[-2:]) == tuple(out.shape[-2:]) == sizes


def _still_weights(func: Function, source: Tensor, out: Tensor) -> bool:
    """Return True if a tensor computed from attention weights has the shape of attention weights too."""
    if out.dim() < 2 or not out.is_floating_point():
        return False
    cut = func in CUTS and out.shape[-2] == source.shape[-2] and out.shape[-1] < source.shape[-1]
    return func in MOVES_AXES or out.shape[-2:] == source.shape[-2:] or cut


def _read_product(
    func: Function, args: tuple[Any, ...], tensors: list[Tensor], out: Tensor, weights: Any
) -> MatrixProduct | None:
    """Return the product of a tensor in ``weights`` with values that a call computes, otherwise None."""
    if func in PRODUCTS and len(tensors) == 2 and tensors[0] in weights:
        first, second = tensors
        if second.is_nested or min(first.dim(), second.dim(), out.dim()) < 2:
            return None
        return MatrixProduct(first, tuple(range(first.dim())), second, second, out, tuple(range(out.dim())))
    einsum = read_einsum(args) if func is torch.einsum else None
    if einsum is None or not any(tensor in weights for tensor in einsum.tensors):
        return None
    step = 1 if einsum.tensors[0] in weights else -1
    (operand, other), (mine, theirs) = einsum.tensors[::step], einsum.letters[::step]
    result = einsum.result
    summed = [letter for letter in mine if letter in theirs and letter not in result]
    rows = [letter for letter in mine if letter in result and letter not in theirs]
    channels = [letter for letter in theirs if letter not in mine]
    if len(summed) != 1 or len(channels) != 1 or not rows or mine.index(summed[0]) != len(mine) - 1:
        return None
    source, row, channel = summed[0], rows[-1], channels[0]
    leading = mine.replace(source, "").replace(row, "")
    wanted = leading + row + channel
    if sorted(wanted) != sorted(result):
        return None
    values = other
    if set(leading) <= set(theirs):
        values = torch.einsum(f"{theirs}->{leading}{source}{channel}", other)
    output = torch.einsum(f"{result}->{wanted}", out)
    order = tuple(map(mine.index, leading + row + source))
    return MatrixProduct(operand, order, other, values, output, tuple(map(result.index, wanted)))


class Einsum(NamedTuple):
    """The two operands of an einsum, and the letters of operands and result. Letters also replace "..."."""

    tensors: tuple[Tensor, ...]
    letters: tuple[str, ...]
    result: str


def read_einsum(args: tuple[Any, ...]) -> Einsum | None:
    """Parse the arguments of `torch.einsum`. Return None unless the equation has two operands and ``->``."""
    equation = args[0] if args and isinstance(args[0], str) else ""
    tensors = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or len(tensors) != 2 or not result:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    # Number of axes that "..." replaces in each operand.
    hidden = [
        tensor.dim() - len(mine.replace("...", "")) for tensor, mine in zip(tensors, letters, strict=True)
    ]
    free = "".join(letter for letter in ascii_uppercase if letter not in equation)[: max(hidden)]
    spelled = (
        mine.replace("...", free[len(free) - count :]) for mine, count in zip(letters, hidden, strict=True)
    )
    return Einsum(tuple(tensors), tuple(spelled), result.replace("...", free))
