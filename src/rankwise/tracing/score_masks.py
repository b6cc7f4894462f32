"""Find the attention scores that a mask hides before the softmax."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from numbers import Number
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rankwise.operators.softmax import MASKED_BELOW, NO_WEIGHT, hidden_by

Function = Callable[..., Any]


def named_functions(home: Any, names: str) -> set[Function]:
    """Return the functions of a module or class whose names are listed in a string."""
    return {getattr(home, name) for name in names.split()}


MOVES_AXES = {
    *named_functions(torch, "transpose permute swapaxes movedim"),
    *named_functions(Tensor, "transpose permute swapaxes movedim"),
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.T.__get__,  # type: ignore[attr-defined]
}
ADDS = {torch.add, Tensor.add, Tensor.add_, Tensor.__iadd__, Tensor.__add__, Tensor.__radd__}
SUBTRACTS = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__isub__, Tensor.__sub__}
FILLS = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
WHERES = {torch.where, Tensor.where}
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
"""Functions that compute scores as bias + Q Kᵀ in one call."""
CUTS = {Tensor.__getitem__}


@dataclass(frozen=True, eq=False)
class Entries:
    """Lazy boolean tensor: one boolean per entry of a tensor, computed only if `of` is called."""

    shape: torch.Size
    make: Callable[..., Tensor]
    """Function that computes the booleans, broadcastable to the shape, from the booleans of the parts."""
    parts: tuple["Entries", ...] = ()

    def of(self, shape: torch.Size) -> Tensor:
        """Return the booleans, reshaped to another shape with the same number of entries.

        Many paths may lead to one part, as in a residual stream. Each part is computed once.
        """
        made: dict[Entries, Tensor] = {}
        waiting = [self]
        while waiting:
            missing = [part for part in waiting[-1].parts if part not in made]
            waiting += missing
            if not missing:
                entries = waiting.pop()
                parts = [made[part] for part in entries.parts]
                made[entries] = entries.make(*parts).expand(entries.shape)
        return made[self].reshape(shape)

    def through(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
    ) -> "Entries | None":
        """Return the booleans for ``out``, the result of a call on ``source``; None if shapes do not fit."""
        was, shape = source.shape, out.shape
        if func in MOVES_AXES or func in CUTS:
            return Entries(shape, lambda hidden: func(hidden.reshape(was), *args[1:], **kwargs), (self,))
        if out.numel() == math.prod(self.shape):
            return self
        try:
            fits = torch.broadcast_shapes(was, shape) == shape
        except RuntimeError:
            fits = False
        return Entries(shape, lambda hidden: hidden.reshape(was), (self,)) if fits else None


class Masks:
    """Record of the scores that a model hides between Q Kᵀ and the softmax.

    A score is hidden only by an operation: a fill with a very negative number, or an added bias that is not a
    product of activations. A score that is very negative without such an operation is not hidden, because
    sharp attention has such scores too.
    """

    def __init__(self) -> None:
        self._hidden: Any = WeakIdKeyDictionary()

    def observe(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, compared: Any
    ) -> None:
        """Register a call that returned scores; arguments in ``compared`` are scores, others are masks."""
        known = [arg for arg in args if isinstance(arg, Tensor) and arg in self._hidden]
        parts = [self._hidden[source].through(func, args, kwargs, source, out) for source in known]
        new = _newly_hidden(func, args, kwargs, compared)
        if new is not None:
            parts.append(Entries(out.shape, new))
        self._hide(out, *parts)

    def assigned(self, scores: Tensor, where: object, value: object) -> None:
        """Register an assignment ``scores[where] = value``, which may hide scores."""
        if isinstance(where, Tensor) and where.dtype == torch.bool and _low(value):
            # The mask indexes the first axes; axes of length 1 are added so that it broadcasts to the scores.
            shape = (*where.shape, *[1] * (scores.dim() - where.dim()))
            added = Entries(scores.shape, lambda: where.reshape(shape))
            self._hide(scores, self._hidden.get(scores), added)

    def _hide(self, scores: Tensor, *given: Entries | None) -> None:
        """Register the scores that any part hides, as one object: a list would double where paths join."""
        shape, parts = scores.shape, tuple(dict.fromkeys(part for part in given if part is not None))
        if len(parts) > 1:
            any_of = Entries(shape, lambda *made: reduce(or_, (one.reshape(shape) for one in made)), parts)
            parts = (any_of,)
        if parts:
            self._hidden[scores] = parts[0]

    def allowed(self, scores: Tensor, compared: bool) -> Entries:
        """Return booleans, True at scores that no mask hides, so that their weight may be positive."""
        known = self._hidden.get(scores)
        # Products Q Kᵀ are never near the least number of their dtype. Other scores use a higher limit.
        least = torch.finfo(scores.dtype).min / 2 if compared else MASKED_BELOW

        def make() -> Tensor:
            hidden = scores.detach() <= least
            return ~(hidden if known is None else hidden | known.of(scores.shape))

        return Entries(scores.shape, make)


def _newly_hidden(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], compared: Any
) -> Callable[[], Tensor] | None:
    """Return a function that computes which scores a call hides; None if the call hides none."""
    if func in FILLS and len(args) > 1 and _low(args[2] if len(args) > 2 else kwargs.get("value")):
        return lambda: args[1]
    if func in WHERES and len(args) == 3:
        # The orders of arguments are torch.where(condition, a, b) and a.where(condition, b).
        first, second, third = args
        condition, kept, other = (first, second, third) if func is torch.where else (second, first, third)
        if _low(other):
            return lambda: ~condition
        return (lambda: condition) if _low(kept) else None
    if func in ADDED_PRODUCTS:
        bias = args[0]
        return (lambda: hidden_by(bias)) if kwargs.get("beta", 1) == 1 and bias not in compared else None
    if (func in ADDS or func in SUBTRACTS) and len(args) > 1:
        tensors = [arg for arg in args[:2] if isinstance(arg, Tensor) and arg.dim() > 0]
        biases = [tensor for tensor in tensors if tensor.is_floating_point() and tensor not in compared]
        if len(biases) == 1:
            bias = biases[0]
            return lambda: hidden_by(-bias if func in SUBTRACTS and bias is args[1] else bias)
    return None


def _low(value: object) -> bool:
    """Return True if scores filled with this value have no softmax weight."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point() and bool(value <= NO_WEIGHT)
    return isinstance(value, Number) and not isinstance(value, complex) and value <= NO_WEIGHT  # type: ignore[operator]
