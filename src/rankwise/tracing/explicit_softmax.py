"""Detect attention written as softmax and product: follow each softmax to its product with the values."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from rankwise._internals.forward import tensors_in
from rankwise.tracing.axes import same_for_all
from rankwise.tracing.score_masks import (
    ADDED_PRODUCTS,
    CUTS,
    FILLS,
    MOVES_AXES,
    Entries,
    Function,
    Masks,
    named_functions,
)

SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax}
PRODUCTS = {*named_functions(torch, "matmul bmm mm"), *named_functions(Tensor, "matmul __matmul__ bmm mm")}
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
COMPARES = {torch.cosine_similarity, torch.cdist}
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
    """The weights before casts, dropout and reshapes, in a higher precision; None for the tensor itself."""
    allowed: Entries | None
    """True at weights that no mask hides; None if unknown."""
    compared: bool
    """True if the scores are a product of two activations, as in Q Kᵀ."""
    axis: int = -1
    """Axis along which the weights sum to 1: another axis than −1 must be summed over to mix tokens."""


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
    order: tuple[int, ...]
    """Permutation of the axes of ``operand`` to the axes of ``matrix``."""
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


@dataclass(frozen=True)
class SoftmaxProduct(MatrixProduct):
    """A product of attention weights with values; the matrix has the highest precision that was computed."""

    allowed: Entries | None = None
    """True at entries of the matrix that no mask has hidden; None if unknown."""
    compared: bool = False
    values_compared: bool = False
    """True if the values are themselves a product of two activations, such as Kᵀ V in linear attention."""
    values_learned: bool = False
    """True if the values are weights or the same for every sequence, such as a table of vectors."""
    softmax: bool = True
    """False if the matrix is not made by a softmax; it is then a product of activations, or queries alone."""
    keys: Tensor | None = None
    """Keys K (..., F, S) if the model computed Q (K V), as linear attention does; ``matrix`` is then Q."""
    inner: Any = None
    """Earlier product that computed ``values``, if its rows are not tokens (see `SoftmaxFollower.held`)."""


class SoftmaxFollower:
    """Observes torch functions in one forward pass, and detects products of attention weights with values."""

    def __init__(self) -> None:
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
        if not isinstance(out, Tensor) or out.is_nested:
            return []
        if func in SOFTMAX or func in LOG_SOFTMAX:
            self._softmax(args, kwargs, out, self._weights if func in SOFTMAX else self._logarithms)
            return []
        if func in EXP and args[0] in self._logarithms:
            self._weights[out] = self._logarithms[args[0]]
            return []
        tensors = tensors_in((*args, *kwargs.values()))
        products = matrix_products(func, args, tensors, out) if kwargs.get("alpha", 1) == 1 else []
        found = self._softmax_product(products, out) if self._weights else None
        mixed = [] if found is None else [found]
        if found is None and out not in self._weights:
            mixed = self._products_without_softmax(products)
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

    def compares(self, weights: Tensor) -> bool:
        """Return True for weights whose scores are a product of two activations."""
        return weights in self._weights and self._weights[weights].compared

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
        elif func in PRODUCTS or func in ADDED_PRODUCTS or func in COMPARES:
            first, second = tensors[-2:] if len(tensors) > 1 else (out, out)
            compared = _activations(first, second) and _same_batch(first, second)
        else:
            compared = func not in STARTS_ANEW and any(tensor in self._compared for tensor in tensors)
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
            self._weights[out] = Weights(None, allowed, weights.compared, axis)

    def _assigned(self, tensor: Tensor, where: object, value: object) -> None:
        weights = self._weights.get(tensor)
        if weights is not None:
            self._weights[tensor] = replace(weights, probabilities=None)
        elif tensor in self._compared:
            self._masks.assigned(tensor, where, value)

    def _softmax_product(self, products: list[MatrixProduct], out: Tensor) -> SoftmaxProduct | None:
        for product in products:
            weights, given = self._weights.get(product.operand), product.given
            if weights is None or weights.axis not in product.summed:
                continue
            if given in self._weights and self._weights[given].compared:
                # A product of two matrices is a matrix, such as a step of an iterated pseudo-inverse.
                self._weights[out] = Weights(None, None, compared=True)
                return None
            operand, matrix, allowed = product.operand, product.matrix, weights.allowed
            if weights.probabilities is not None:
                matrix = weights.probabilities.reshape(operand.shape).permute(*product.order)
            if allowed is not None:
                order = (operand, *product.order)
                allowed = allowed.through(Tensor.permute, order, {}, operand, matrix)
            mixed = self._mixed(product, matrix)
            if weights.compared:
                mixed = replace(mixed, keys=None, values=product.values)
            return replace(mixed, allowed=allowed, compared=weights.compared)
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
            values_learned=same_for_all(given, product.operand),
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


# --- products of two tensors ------------------------------------------------------------------------------


def matrix_products(
    func: Function, args: tuple[Any, ...], tensors: list[Tensor], out: Tensor
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
    if len(tensors) != 2 or any(tensor.is_nested or tensor.dim() < 2 for tensor in (*tensors, out)):
        return []
    first, second = tensors
    whole, straight = tuple(range(out.dim())), tuple(range(first.dim()))
    turned = (*whole[:-2], whole[-1], whole[-2])
    swapped = (*range(second.dim() - 2), second.dim() - 1, second.dim() - 2)
    return [
        MatrixProduct(first, first, second, second, out, whole, straight, (-1,), second.dim() - 2),
        # If channels come before tokens, the model computes Y = V Mᵀ, which is Yᵀ = M Vᵀ.
        MatrixProduct(second, second.mT, first, first.mT, out.mT, turned, swapped, (-1, -2), first.dim() - 1),
    ]


Einsum = tuple[list[Tensor], list[str], str]
"""The operands of an einsum, their letters and those of its result; letters stand for an ellipsis, too."""


def _einsum_products(args: tuple[Any, ...], out: Tensor) -> Iterator[MatrixProduct]:
    read = read_einsum(args)
    if read is None:
        return
    tensors, letters_of, result = read
    for step in (1, -1):
        (operand, other), (mine, theirs) = tensors[::step], letters_of[::step]
        summed = [letter for letter in mine if letter in theirs and letter not in result]
        rows = [letter for letter in mine if letter in result and letter not in theirs]
        channels = [letter for letter in theirs if letter not in mine]
        if len(summed) != 1 or len(channels) != 1 or not rows:
            continue
        source, row, channel = summed[0], rows[-1], channels[0]
        leading = mine.replace(source, "").replace(row, "")
        wanted = leading + row + channel
        if not set(wanted) <= set(result):
            continue
        letters = leading + row + source
        order = tuple(map(mine.index, letters))
        whole = sorted(wanted) == sorted(result)
        aligned = leading == "".join(letter for letter in theirs if letter in leading)
        values = other
        if set(leading) <= set(theirs):
            values = torch.einsum(f"{theirs}->{leading}{source}{channel}", other)
        yield MatrixProduct(
            operand,
            operand.permute(*order),
            other,
            values,
            torch.einsum(f"{result}->{wanted}", out),
            tuple(map(result.index, wanted)) if whole else None,
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
    return list(tensors), letters, result


def compares(args: tuple[Any, ...]) -> bool:
    """Return True if an einsum may compute scores Q Kᵀ: its operands share a batch axis, or have none."""
    einsum = read_einsum(args)
    if einsum is None or any(isinstance(tensor, nn.Parameter) for tensor in einsum[0]):
        return False
    _, (first, second), result = einsum
    shared = set(first) & set(second) & set(result)
    return bool(shared) or len(first) == len(second) == 2
