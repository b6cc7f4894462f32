"""Torch function mode that reports the attention functions and other token mixing of a running model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankwise._internals.torch_private import pop_mode, push_mode, without_torch_function
from rankwise.tracing.explicit_softmax import SoftmaxFollower, SoftmaxProduct

Listener = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


class AttentionMode(TorchFunctionMode):
    """Torch function mode that runs each function of a model and reports token mixing to listeners.

    ``listeners`` receive the calls of functions that compute complete attention. ``on_product`` receives each
    product of attention weights with values. A result that a listener or ``on_product`` returns replaces the
    function's result. ``on_other`` receives all other calls. ``functional`` runs in place of
    `multi_head_attention_forward`, and can replace heads. Calls are not reported while ``ignores()`` is True.
    """

    def __init__(
        self,
        listeners: Mapping[Any, Listener],
        on_product: Callable[[SoftmaxProduct, Tensor], Tensor | None],
        on_other: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
        ignores: Callable[[], bool],
        functional: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        super().__init__()
        self.weights = SoftmaxFollower()
        self._listeners, self._functional = listeners, functional
        self._on_product, self._on_other, self._ignores = on_product, on_other, ignores
        self._lifted_from: int | None = None
        """Number of modes below this mode before it left torch's stack. None while it is on the stack."""

    @no_type_check  # torch.compile inside the model traces this method, but cannot trace type checks
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function with this mode off, then report the call to the listener for it."""
        kwargs = kwargs or {}
        # While torch.compile traces the model, this mode must not become a part of the compiled code.
        ignored = torch.compiler.is_dynamo_compiling() or self._ignores()
        if func is F.multi_head_attention_forward and not ignored:
            return self._functional(args, kwargs)
        out = func(*args, **kwargs)
        if ignored:
            return out
        with without_torch_function():
            listener = self._listeners.get(func)
            if listener is not None:
                changed = listener(args, kwargs, out)
                return out if changed is None else changed
            product = self.weights.observe(func, args, kwargs, out)
            if product is None:
                self._on_other(func, args, kwargs, out)
                return out
            changed = self._on_product(product, out)
            if changed is None:
                return out
            self.weights.replace_product(out, changed)
            return changed

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Context manager that puts the mode on torch's stack of function modes, or takes it off the stack.

        PyTorch skips its inference fast path if any function mode is active. So PyTorch's own layers run with
        this mode off the stack, while the user's modes stay on it.
        """
        if on != (self._lifted_from is not None):
            yield
            return
        self._switch(on)
        try:
            yield
        finally:
            self._switch(not on)

    def _switch(self, on: bool) -> None:
        if not on:
            # Inside `__torch_function__` the depth is None, because torch has already removed the mode.
            self._lifted_from = pop_mode(self)
        elif self._lifted_from is not None:
            push_mode(self, self._lifted_from)
            self._lifted_from = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the mode from the stack, even if another mode is on top."""
        pop_mode(self)
