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
from rankwise.tracing.torch_functions import CUTS, DIFFERENCES, FILLS, MOVES_AXES, SUMS, Function


@dataclass(frozen=True, eq=False)
class Entries:
    """Lazy tensor: one boolean or number per entry of a tensor, computed only if `of` is called."""

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
            missing = [piece for piece in waiting[-1].parts if piece not in made]
            waiting += missing
            if not missing:
                entries = waiting.pop()
                pieces = [made[piece] for piece in entries.parts]
                made[entries] = entries.make(*pieces).expand(entries.shape)
        return made[self].reshape(shape)

    def through(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Tensor
    ) -> "Entries | None":
        """Return the booleans for ``out``, computed from ``source``. Return None if the shapes do not fit."""
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
        """Register a call that returned scores. Arguments in ``compared`` are scores, others are masks."""
        sources = [arg for arg in args if isinstance(arg, Tensor) and arg in self._hidden]
        given = [self._hidden[source].through(func, args, kwargs, source, out) for source in sources]
        new = _newly_hidden(func, args, kwargs, compared)
        if new is not None:
            given.append(Entries(out.shape, new))
        # Merge the masks of all paths into one object, because a list would double where two paths join.
        masks = tuple(dict.fromkeys(mask for mask in given if mask is not None))
        if masks:
            self._hidden[out] = masks[0] if len(masks) == 1 else _any_of(out.shape, masks)

    def allowed(self, scores: Tensor, compared: bool) -> Entries:
        """Return booleans, True at scores that no mask hides, so that their weight may be positive."""
        masked = self._hidden.get(scores)
        # Unmasked products Q Kᵀ may be below `MASKED_BELOW`, but not near the least number of their dtype.
        least = torch.finfo(scores.dtype).min / 2 if compared else MASKED_BELOW

        def make() -> Tensor:
            hidden = scores.detach() <= least
            return ~(hidden if masked is None else hidden | masked.of(scores.shape))

        return Entries(scores.shape, make)


def _any_of(shape: torch.Size, masks: tuple[Entries, ...]) -> Entries:
    return Entries(shape, lambda *hidden: reduce(or_, (mask.reshape(shape) for mask in hidden)), masks)


def _newly_hidden(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], compared: Any
) -> Callable[[], Tensor] | None:
    """Return a function that computes which scores a call hides. Return None if the call hides no scores."""
    if func in FILLS and len(args) > 1 and _low(args[2] if len(args) > 2 else kwargs.get("value")):
        filled = args[1]
        return lambda: filled
    if func is torch.where and len(args) == 3 and _low(args[2]):
        kept = args[0]
        return lambda: ~kept
    if func in SUMS | DIFFERENCES and len(args) > 1:
        tensors = [arg for arg in args[:2] if isinstance(arg, Tensor) and arg.dim() > 0]
        biases = [tensor for tensor in tensors if tensor.is_floating_point() and tensor not in compared]
        if len(biases) == 1:
            bias, negative = biases[0], func in DIFFERENCES and biases[0] is args[1]
            return lambda: hidden_by(-bias if negative else bias)
    return None


def _low(value: object) -> bool:
    """Return True if scores filled with this value have no softmax weight."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point() and bool(value <= NO_WEIGHT)
    return isinstance(value, Number) and not isinstance(value, complex) and value <= NO_WEIGHT  # type: ignore[operator]
