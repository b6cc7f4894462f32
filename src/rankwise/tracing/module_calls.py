"""Follow or record the calls of a model's modules by hooks, which are always removed at the end."""

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, no_type_check

import torch
from torch import Tensor, nn

from rankwise._internals.batches import map_tensors
from rankwise._internals.torch_private import forget_global_hook, in_backward

Arguments = dict[str, Any]
Listener = Callable[["ModuleCall"], None]
ABSENT = object()
"""Marker for an argument that the module does not have or did not receive."""


@dataclass(frozen=True)
class CallId:
    """Address of a module call in one forward pass; unlike `Address`, it contains no layer index."""

    module: str
    index: int
    """Index among all calls of the module in the forward pass, from 0."""


class CallCounter(Counter[str]):
    """Counter that numbers the calls of each module from 0."""

    def count(self, module: str) -> CallId:
        """Return the address of the next call of a module, and increment its count."""
        self[module] += 1
        return CallId(module, self[module] - 1)


@dataclass
class ModuleCall:
    """Record of a module call that is running or has just ended, shared by all parts of a capture.

    The module docstring of `rankwise.tracing.capture_context` lists which part writes which field, and when.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Arguments
    serial: int = 0
    """Serial number of the call in the capture, from 0."""
    output: Any = None
    raised: bool = False
    """True if the call ended with an error."""
    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    """Exception that the caller was handling when the call began; it is not an error of the call."""
    exit_stack: ExitStack = field(default_factory=ExitStack)
    block: Any = None
    """`Block` record of the call while it runs, if its module may be a block."""
    called_inside: bool = False
    """True if a submodule was called during the call."""
    mixed_inside: bool = False
    """True if a mixer was captured during the call."""
    other_mixing: dict[str, str] = field(default_factory=dict)
    """By module name, the torch function that mixed the call's tokens without attention."""
    reader: Any = None
    """`OperatorReader` that reads the operator of this call when the call ends. None if no reader does."""
    input_copy: Tensor | None = None
    """Copy of the block's input, if an intervention may replace the block's output."""
    call_id: CallId | None = None
    """Address of this mixer call, set before the call ends if an intervention receives its heads."""
    inner: dict[str, "RecordedCall"] = field(default_factory=dict)
    """Calls of submodules that the reader of this call reads, by name relative to the mixer."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensor arguments of the call, positional arguments first."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def tokens(self) -> Tensor | None:
        """First floating-point argument of shape (B, T, D). None if the call has no such argument."""
        return first_tokens(self.tensors)

    @property
    def stream(self) -> Tensor | None:
        """First floating-point argument with three axes (B, T, D). None if no argument fits.

        The second choice is an argument with two axes (T, D), the third an argument with four axes.
        """
        tensors = (first_tokens(self.tensors, axes) for axes in (3, 2, 4))
        return next((tokens for tokens in tensors if tokens is not None), None)

    def argument(self, name: str) -> Any:
        """Return the argument ``name`` of ``forward``. Return `ABSENT` if the call has no such argument."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = parameter_names(self.module)
        position = names.index(name) if name in names else len(self.args)
        return self.args[position] if position < len(self.args) else ABSENT


def holds(outer: str, inner: str) -> bool:
    """Return True if the module named ``outer`` is or contains the module ``inner``; "" names the model."""
    return not outer or f"{inner}.".startswith(f"{outer}.")


def first_tokens(values: object, axes: int = 3) -> Tensor | None:
    """Return the first floating-point tensor, nested or not, with ``axes`` axes. Return None if none fits."""
    tensors = (value for value in tensors_of(values) if value.is_floating_point() and value.dim() == axes)
    return next(tensors, None)


def tensors_of(output: object) -> list[Tensor]:
    """Return the tensors in the output of a module. Tensors in nested tuples come last."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    values = output if isinstance(output, tuple | list) else (output,)
    nested = [value for value in values if isinstance(value, tuple | list | Mapping)]
    direct = [value for value in values if isinstance(value, Tensor)]
    return direct + [tensor for value in nested for tensor in tensors_of(value)]


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's ``forward``, in order."""
    if "forward" in vars(module):  # set by accelerate, to move inputs to the module's device
        return tuple(inspect.signature(module.forward).parameters)
    return _names_of(type(module).forward)[1:]


@lru_cache(maxsize=512)
def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _ignore(*given: Any) -> None:
    """Do nothing. This is an empty listener, and replaces hooks in copies of modules."""


class ModuleCalls:
    """Stack of the running module calls of a model; calls listeners when a module call begins and ends.

    Each module gets hooks if ``where(name, module)`` is True, except the modules in ``hookless``. These are
    PyTorch's own attention layers and the modules inside them. Their hooks would turn off the inference fast
    path and change the computation. Global hooks, which the fast path ignores, follow ``hookless`` modules.
    """

    def __init__(
        self,
        model: nn.Module,
        hookless: Collection[nn.Module] = frozenset(),
        *,
        where: Callable[[str, nn.Module], bool] = lambda name, module: True,
        on_enter: Listener = _ignore,
        on_leave: Listener = _ignore,
    ) -> None:
        self.running: list[ModuleCall] = []
        self.called: set[str] = set()
        self._on_enter, self._on_leave = on_enter, on_leave
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model, self._hookless, self._where = model, hookless, where
        self._thread = threading.get_ident()
        self.in_other_thread = False
        """True if the model was called in another thread, where the function mode is not active."""
        self._serial = count()
        self._paused = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context manager that follows the calls of the model by hooks and removes the hooks at the end."""
        handles = []
        always: dict[str, Any] = {"with_kwargs": True, "always_call": True}
        try:
            for name, module in self._model.named_modules():
                if module not in self._hookless and self._where(name, module):
                    handles.append(module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
                    handles.append(module.register_forward_hook(Hook(self._leave), **always))
            if self._hookless:
                every = nn.modules.module
                handles.append(every.register_module_forward_pre_hook(self._enter_hookless))
                handles.append(every.register_module_forward_hook(self._leave_hookless, **always))
            yield
        finally:
            for handle in handles:
                handle.remove()
                forget_global_hook(handle)
            self._drop_above(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which module calls are ignored, because callbacks may run parts of the model."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments
    ) -> tuple[tuple[Any, ...], Arguments] | None:
        if self._ignores():
            return None
        if module is self._model:  # drop calls of an earlier pass that never ended
            self._drop_above(0)
        if self.running:
            self.running[-1].called_inside = True
        call = ModuleCall(self._names[id(module)], module, args, kwargs, next(self._serial))
        self.called.add(call.name)
        self.running.append(call)
        self._on_enter(call)
        changed = call.args is not args or call.kwargs is not kwargs
        return (call.args, call.kwargs) if changed else None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> Any:
        if self._ignores() or not any(call.module is module for call in self.running):
            return None
        # drop inner calls that raised: no hook reported their end
        while self.running[-1].module is not module:
            self._drop_above(len(self.running) - 1)
        call = self.running[-1]
        call.exit_stack.close()
        call.kwargs, call.output = kwargs, output
        # A call that raised has the output None. Other calls may also return None, so the exception decides.
        call.raised = output is None and sys.exc_info()[1] is not call.handled
        try:
            self._on_leave(call)
        finally:
            self.running.pop()
        return None if call.output is output else call.output

    def _ignores(self) -> bool:
        if in_backward():  # activation checkpointing runs a block again in the backward pass
            return True
        other = threading.get_ident() != self._thread
        self.in_other_thread = self.in_other_thread or other
        return other or self._paused

    def _drop_above(self, height: int) -> None:
        while len(self.running) > height:
            self.running.pop().exit_stack.close()

    def _enter_hookless(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in self._hookless:
            self._enter(module, args, {})

    def _leave_hookless(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if module not in self._hookless:
            return None
        *kwargs, output = rest  # PyTorch omits kwargs if the module raised
        return self._leave(module, args, kwargs[0] if kwargs else {}, output)


class Hook:
    """Module hook that calls a function; in a copy of the module the hook does nothing.

    A copy of a module includes its hooks, which would otherwise report to a copied capture that never ends.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @no_type_check  # torch.compile inside the model traces this method, but cannot trace type checks
    def __call__(self, *given: Any) -> Any:
        """Call the function with the arguments of the hook, except while `torch.compile` traces the model."""
        return None if torch.compiler.is_dynamo_compiling() else self._call(*given)

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        """Return a hook without effect, which replaces this hook in copies and pickles."""
        return partial, (_ignore,)


def same(first: Tensor | None, second: Tensor | None) -> bool:
    """Return True if two tensors are views of the same entries of the same memory."""
    if first is None or second is None or first is second:
        return first is second
    if first.is_nested or second.is_nested or first.device != second.device or first.device.type == "meta":
        return False
    if first.shape != second.shape:
        return False
    try:
        return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    except RuntimeError:  # sparse tensors, and tensors inside torch.vmap, have no data pointer
        return False


def snapshot(tokens: Tensor) -> Tensor:
    """Return a detached copy of a tensor, which later changes in place do not affect."""
    with torch.no_grad():
        return tokens.detach().clone()


@dataclass(frozen=True)
class RecordedCall:
    """Record of a module call that has ended: arguments and output."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Arguments
    output: Any


@contextmanager
def record_calls(
    model: nn.Module,
    where: Collection[str] | Callable[[str, nn.Module], bool],
    *,
    copy: bool = False,
    detach: bool = True,
) -> Iterator[list[RecordedCall]]:
    """Yield a list of the calls of some modules of a model, in the order in which the calls end.

    ``where`` contains the names of the modules, or is a function of (name, module) that selects them. Calls
    that raise are not recorded, nor are calls that autograd repeats in a backward pass. ``copy`` copies
    arguments before the call and outputs after it, so that later changes in place do not affect the record.
    ``detach`` records tensors without gradient history.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> with record_calls(model, {"0"}) as calls:
        ...     _ = model(torch.ones(1, 2))
        >>> [(call.name, tuple(call.args[0].shape), tuple(call.output.shape)) for call in calls]
        [('0', (1, 2), (1, 3))]
    """
    recorded: list[RecordedCall] = []
    begun: dict[int, tuple[tuple[Any, ...], Arguments]] = {}
    wanted = where if callable(where) else lambda name, module: name in where

    def kept(value: Any) -> Any:
        def one(tensor: Tensor) -> Tensor:
            tensor = tensor.detach() if detach else tensor
            return tensor.clone() if copy else tensor

        return map_tensors(value, one)

    def enter(call: ModuleCall) -> None:
        if copy:
            begun[call.serial] = kept(call.args), kept(call.kwargs)

    def leave(call: ModuleCall) -> None:
        if not call.raised:
            args, kwargs = begun.pop(call.serial) if copy else (kept(call.args), kept(call.kwargs))
            recorded.append(RecordedCall(call.name, call.module, args, kwargs, kept(call.output)))

    with ModuleCalls(model, where=wanted, on_enter=enter, on_leave=leave).following():
        yield recorded
