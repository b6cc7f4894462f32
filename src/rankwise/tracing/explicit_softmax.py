"""Detect attention written as softmax and product: follow each softmax to its product with the values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from rankwise.tracing.matrix_products import PRODUCTS, MatrixProduct, compares, matrix_products
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
TIMES = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__imul__}
DIVIDES = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__}
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
    axis: int = -1
    """Axis along which the weights sum to 1: another axis than −1 must be summed over to mix tokens."""


@dataclass(frozen=True)
class SoftmaxProduct(MatrixProduct):
    """A product of attention weights with values; the matrix has the highest precision that was computed."""

    allowed: Entries | None = None
    """True at entries of the matrix that no mask has hidden; None if unknown."""
    compared: bool = False
    values_compared: bool = False
    """True if the values are themselves a product of two activations, such as Kᵀ V in linear attention."""
    values_learned: bool = False
    """True if the values are a parameter of the model, such as a table of vectors."""
    softmax: bool = True
    """False if the matrix is not made by a softmax; it is then a product of activations, or queries alone."""
    keys: Tensor | None = None
    """Keys K (..., F, S) if the model computed Q (K V), as linear attention does; ``matrix`` is then Q."""
    inner: Any = None
    """Earlier product that computed ``values``, if its rows are not tokens (see `SoftmaxFollower.held`)."""


class SoftmaxFollower:
    """Observes torch functions and detects products of attention weights with their values."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all tensors, before a new forward pass."""
        self._weights: Any = WeakIdKeyDictionary()
        self._logarithms: Any = WeakIdKeyDictionary()
        self._compared: Any = WeakIdKeyDictionary()
        self._sums: Any = WeakIdKeyDictionary()
        """The `MatrixProduct` of two activations that computed a tensor, such as K V in linear attention."""
        self.held: Any = WeakIdKeyDictionary()
        """By tensor M V, the unfinished mixing M that computed it; the listener for products sets it."""
        self._masks = Masks()

    def observe(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[SoftmaxProduct]:
        """Register a call of a torch function; return how it multiplies weights by values, if it does.

        Without a softmax there may be two ways to read a product, of which the counts of tokens decide.
        """
        if func is Tensor.__setitem__:
            self._assigned(*args[:3])
        if not isinstance(out, Tensor):
            return []
        if func in SOFTMAX or func in LOG_SOFTMAX:
            self._softmax(args, kwargs, out, self._weights if func in SOFTMAX else self._logarithms)
            return []
        if func in EXP and args[0] in self._logarithms:
            self._weights[out] = self._logarithms[args[0]]
            return []
        tensors = _tensors(args, kwargs)
        products = matrix_products(func, args, tensors, out) if kwargs.get("alpha", 1) == 1 else []
        found = self._softmax_product(products, out) if self._weights else None
        if found is not None:
            mixed = [found]
        else:
            mixed = [] if out in self._weights else self._products_without_softmax(products)
        self._note_comparison(func, tensors, args, out)
        if out in self._compared:
            if products and func not in ADDED_PRODUCTS:
                self._sums[out] = replace(products[0], output=None)
            self._masks.observe(func, args, kwargs, out, self._compared)
        if not mixed and self._weights:
            self._follow(func, args, kwargs, out)
        if self.held:
            self._follow_held(func, args, out)
        return mixed

    def replace_product(self, out: Tensor, changed: Tensor) -> None:
        """Register that the model continues with ``changed`` in place of the output ``out``."""
        for known in (self._compared, self.held):
            if out in known:
                known[changed] = known[out]

    # --- scores -------------------------------------------------------------------------------------------

    def _note_comparison(
        self, func: Function, tensors: list[Tensor], args: tuple[Any, ...], out: Tensor
    ) -> None:
        if func is torch.einsum:
            compared = compares(args)
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
        if axis == -1 or compared:
            known[out] = Weights(None, self._masks.allowed(scores, compared), compared, axis=axis)

    # --- from the softmax to the product ------------------------------------------------------------------

    def _follow(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        source = next((tensor for tensor in tensors if tensor in self._weights), None)
        if source is None:
            return
        weights: Weights = self._weights[source]
        axis = _moved_axis(weights.axis, func, args, kwargs, source, out)
        if axis is None:
            return
        if func in KEEPS_VALUES and out.numel() == source.numel():
            if out is not source:
                first = source if weights.probabilities is None else weights.probabilities
                self._weights[out] = replace(weights, probabilities=first)
        elif _still_weights(func, source, out) and (weights.compared or func not in STARTS_ANEW):
            allowed = None
            if weights.allowed is not None and func not in RECOMBINES:
                allowed = weights.allowed.through(func, args, kwargs, source, out)
                allowed = _zeroed(allowed, func, args, out)
            self._weights[out] = Weights(None, allowed, weights.compared, intact=False, axis=axis)

    def _assigned(self, tensor: Tensor, where: object, value: object) -> None:
        weights = self._weights.get(tensor)
        if weights is not None:
            self._weights[tensor] = replace(weights, probabilities=None, intact=False)
        elif tensor in self._compared:
            self._masks.assigned(tensor, where, value)

    def _softmax_product(self, products: list[MatrixProduct], out: Tensor) -> SoftmaxProduct | None:
        for product in products:
            weights, given = self._weights.get(product.operand), product.given
            if weights is None or weights.axis not in product.summed:
                continue
            if given in self._weights and self._weights[given].compared:
                # A product of two matrices is a matrix, such as a step of an iterated pseudo-inverse.
                self._weights[out] = Weights(None, None, compared=True, intact=False)
                return None
            matrix, allowed = product.matrix, weights.allowed
            if product.order is not None:
                if allowed is not None:
                    order = (product.operand, *product.order)
                    allowed = allowed.through(Tensor.permute, order, {}, product.operand, matrix)
            elif weights.intact and weights.probabilities is not None:
                matrix = weights.probabilities.reshape(matrix.shape)
            mixed = self._mixed(product, matrix)
            keys = None if weights.compared else mixed.keys
            return replace(mixed, allowed=allowed, compared=weights.compared, keys=keys)
        return None

    def _products_without_softmax(self, products: list[MatrixProduct]) -> list[SoftmaxProduct]:
        """Return products in which scores multiply values, or queries a product K V or a held product."""
        found = []
        for product in products:
            if _activations(product.operand, product.given):
                mixed = replace(self._mixed(product, product.matrix), softmax=False)
                rows, columns = product.matrix.shape[-2:]
                weights = self._weights.get(product.operand)  # of a softmax along another axis
                scores = product.operand in self._compared if weights is None else weights.compared
                if scores and rows == columns and not mixed.values_compared:
                    found.append(replace(mixed, compared=True, keys=None))
                elif mixed.inner is not None or mixed.keys is not None:
                    found.append(mixed)
        return found

    def _mixed(self, product: MatrixProduct, matrix: Tensor) -> SoftmaxProduct:
        given, made = product.given, self._sums.get(product.given)
        inner = self.held.get(given)
        read = None if inner is not None or made is None else made.as_keys_and_values(product.contracted)
        keys, values = (None, product.values) if read is None else read
        return SoftmaxProduct(
            **vars(product) | {"matrix": matrix, "values": values},
            values_compared=given in self._compared,
            values_learned=isinstance(given, nn.Parameter),
            keys=keys,
            inner=inner,
        )

    def _follow_held(self, func: Function, args: tuple[Any, ...], out: Tensor) -> None:
        """Follow a product M V through casts, and through factors of its rows such as a normalization."""
        source = next((arg for arg in args[:2] if isinstance(arg, Tensor) and arg in self.held), None)
        if source is None or out is source or out in self.held or out.shape != source.shape:
            return
        if func in KEEPS_VALUES:
            self.held[out] = self.held[source]
        elif (func in TIMES or (func in DIVIDES and source is args[0])) and len(args) > 1:
            factor = args[1] if source is args[0] else args[0]
            factor = factor if isinstance(factor, Tensor) else out.new_tensor(factor)
            if self.held[source].scale_rows(1 / factor if func in DIVIDES else factor, out):
                self.held[out] = self.held[source]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments, including tensors in lists, as in `torch.cat`."""
    given = (*args, *kwargs.values())
    listed = (value if isinstance(value, list | tuple) else (value,) for value in given)
    return [value for values in listed for value in values if isinstance(value, Tensor)]


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


def _moved_axis(
    axis: int, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
) -> int | None:
    """Return where a call moves the axis along which weights sum to 1; None if it merges or splits the axis.

    Axis −1 stays −1, because products read `weights.mT` too. Strides of a test tensor show where axes go.
    """
    if axis == -1:
        return axis
    if func in MOVES_AXES:
        strides = list(func(torch.empty([2] * source.dim(), device="meta"), *args[1:], **kwargs).stride())
        return strides.index(2 ** (-axis - 1)) - len(strides)
    return axis if axis == -2 or out.shape[axis:] == source.shape[axis:] else None


def _still_weights(func: Function, source: Tensor, out: Tensor) -> bool:
    """Return True if a tensor computed from attention weights has the shape of attention weights too."""
    if out.dim() < 2 or not out.is_floating_point():
        return False
    if func in MOVES_AXES:
        return True
    cut = out.shape[-2] == source.shape[-2] and out.shape[-1] < source.shape[-1]
    return out.shape[-2:] == source.shape[-2:] or (func in CUTS and cut)
