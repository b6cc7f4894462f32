"""Calls of modules: those under way in a model, and recorded ones; hooks are always removed."""

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, no_type_check

import torch
from torch import Tensor, nn

from rankwise._internals.forward import map_tensors
from rankwise._internals.torch_private import forget_global_hook, in_backward
from rankwise.tracing.head_id import CallId

Arguments = dict[str, Any]
Listener = Callable[["ModuleCall"], None]
ABSENT = object()
"""Represents an argument that the module does not have, or was not passed."""


@dataclass
class ModuleCall:
    """A call of a module that is under way, or has just ended.

    The docstring of `rankwise.tracing.context` says who writes into it, and when.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Arguments
    serial: int = 0
    """Number of the call in the capture."""
    output: Any = None
    raised: bool = False
    """True if the call ended with an error."""
    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    """Error that was being handled when the call began."""
    exit_stack: ExitStack = field(default_factory=ExitStack)
    unplaced_mixers: list[Any] = field(default_factory=list)
    """Mixers captured inside the call that do not belong to a block yet."""
    called_inside: bool = False
    """True if a module inside it was called."""
    mixed_inside: bool = False
    """True if a mixer inside it was captured."""
    other_mixing: dict[str, str] = field(default_factory=dict)
    """Modules that mixed its tokens without attention, by name, with a description."""
    adapter: Any = None
    """`Adapter` that reads its operator when it ends."""
    input_copy: Tensor | None = None
    """Copy of the input of a block whose output may be replaced."""
    call_id: CallId | None = None
    """Number of the call as a mixer, if its heads were seen before it ended."""
    changed: bool = False
    """True if its output was replaced."""
    changed_arguments: bool = False
    """True if its arguments were replaced."""
    inner: dict[str, "RecordedCall"] = field(default_factory=dict)
    """Calls inside it that its adapter reads, by their names inside the mixer."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among its arguments, by position and then by name."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def tokens(self) -> Tensor | None:
        """First (B, T, D) tensor among its arguments."""
        return first_tokens(self.tensors)

    @property
    def stream(self) -> Tensor | None:
        """First (B, T, D) tensor among its arguments, otherwise the first (T, D) tensor."""
        return first_tokens(self.tensors, axes=2) if self.tokens is None else self.tokens

    def argument(self, name: str) -> Any:
        """Return an argument by its name in ``forward``, or `ABSENT`."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = parameter_names(self.module)
        position = names.index(name) if name in names else len(self.args)
        return self.args[position] if position < len(self.args) else ABSENT


def holds(outer: str, inner: str) -> bool:
    """Return True if the module of the first name is or contains the second; the empty name contains all."""
    return not outer or f"{inner}.".startswith(f"{outer}.")


def first_tokens(values: object, axes: int = 3) -> Tensor | None:
    """Return the first floating (B, T, D) tensor among some values; nested tensors count."""
    tensors = (value for value in tensors_of(values) if value.is_floating_point() and value.dim() == axes)
    return next(tensors, None)


def tensors_of(output: object) -> list[Tensor]:
    """Return the tensors in the output of a module."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    values = output if isinstance(output, tuple | list) else (output,)
    return [value for value in values if isinstance(value, Tensor)]


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's ``forward``, in order."""
    if "forward" in vars(module):  # replaced on this module alone, as device placement does
        return tuple(inspect.signature(module.forward).parameters)
    return _names_of(type(module).forward)[1:]


@lru_cache(maxsize=512)
def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class ModuleCalls:
    """Keeps the calls under way in a model, and reports each call when it begins and when it has ended.

    Ordinary modules get hooks of their own. A hook inside PyTorch's own attention layers would end their
    inference fast path and change the computation; PyTorch's global hooks, which the path ignores, follow the
    modules there: ``hookless`` has their names.
    """

    def __init__(
        self,
        model: nn.Module,
        hookless: frozenset[str] = frozenset(),
        *,
        on_enter: Listener | None = None,
        on_leave: Listener | None = None,
    ) -> None:
        self.running: list[ModuleCall] = []
        self.called: set[str] = set()
        self._on_enter, self._on_leave = on_enter, on_leave
        self._names = {id(module): name for name, module in model.named_modules()}
        self._hookless = {id(module) for name, module in model.named_modules() if name in hookless}
        self._model = model
        self._thread = threading.get_ident()
        self.in_other_thread = False
        """True if the model was called in another thread, where the function mode is not active."""
        self._serial = count()
        self._paused = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the model until the block ends, however it ends."""
        handles = []
        always: dict[str, Any] = {"with_kwargs": True, "always_call": True}
        try:
            for module in self._model.modules():
                if id(module) not in self._hookless:
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
        """Ignore calls until the block ends: callbacks may run parts of the model."""
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
        if module is self._model:  # whatever is still here was left behind by a call that never ended
            self._drop_above(0)
        if self.running:
            self.running[-1].called_inside = True
        call = ModuleCall(self._names[id(module)], module, args, kwargs, next(self._serial))
        self.called.add(call.name)
        self.running.append(call)
        if self._on_enter is not None:
            self._on_enter(call)
        return (call.args, call.kwargs) if call.changed_arguments else None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> Any:
        if self._ignores() or not any(call.module is module for call in self.running):
            return None
        # calls of modules that raised are still here
        while self.running[-1].module is not module:
            self._drop_above(len(self.running) - 1)
        call = self.running[-1]
        call.exit_stack.close()
        call.kwargs, call.output = kwargs, output
        # the output of a call that raised is None, but so is the output of some modules
        call.raised = output is None and sys.exc_info()[1] is not call.handled
        try:
            if self._on_leave is not None:
                self._on_leave(call)
        finally:
            self.running.pop()
        return call.output if call.changed else None

    def _ignores(self) -> bool:
        if in_backward():  # a checkpointed block runs a second time
            return True
        other = threading.get_ident() != self._thread
        self.in_other_thread = self.in_other_thread or other
        return other or self._paused

    def _drop_above(self, height: int) -> None:
        while len(self.running) > height:
            self.running.pop().exit_stack.close()

    def _enter_hookless(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) in self._hookless:
            self._enter(module, args, {})

    def _leave_hookless(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        if id(module) not in self._hookless:
            return None
        *kwargs, output = rest  # PyTorch omits keyword arguments if the module raised
        return self._leave(module, args, kwargs[0] if kwargs else {}, output)


class Hook:
    """Calls a function as a module hook; copies of the module get a hook that does nothing.

    Copying a module copies its hooks. A copied hook would report to a copy of the capture that never ends.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @no_type_check  # a function compiled inside the model traces through it, and cannot through checks
    def __call__(self, *given: Any) -> Any:
        """Pass the call on."""
        return None if torch.compiler.is_dynamo_compiling() else self._call(*given)

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        """Return the replacement in copies and pickles."""
        return partial, (_ignore,)


def _ignore(*given: Any) -> None:
    """Do nothing."""


def same(known: Tensor | None, tensor: Tensor) -> bool:
    """Return True if two tensors are the same entries of the same memory."""
    if known is None or known is tensor:
        return known is tensor
    if known.is_nested or tensor.is_nested or known.device != tensor.device or known.device.type == "meta":
        return False
    if known.shape != tensor.shape or {known.layout, tensor.layout} != {torch.strided}:
        return False
    try:
        return known.data_ptr() == tensor.data_ptr() and known.stride() == tensor.stride()
    except RuntimeError:  # tensors without memory of their own, as inside torch.vmap
        return False


def snapshot(tokens: Tensor) -> Tensor:
    """Return a copy without gradient history, safe from later changes in place."""
    with torch.no_grad():
        return tokens.detach().clone()


@dataclass(frozen=True)
class RecordedCall:
    """A call of a module that has ended."""

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
    """Record calls of some modules of a model, in the order in which the calls end.

    Calls that raise are not recorded, nor are calls that autograd repeats in a backward pass. ``copy``
    protects arguments, as they are before the call, and outputs from later changes in place. ``detach``
    records tensors without their gradient history.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> with record_calls(model, {"0"}) as calls:
        ...     _ = model(torch.ones(1, 2))
        >>> [(call.name, tuple(call.args[0].shape), tuple(call.output.shape)) for call in calls]
        [('0', (1, 2), (1, 3))]
    """
    recorded: list[RecordedCall] = []
    begun: list[tuple[nn.Module, tuple[Any, ...], Arguments]] = []

    def kept(value: Any) -> Any:
        def one(tensor: Tensor) -> Tensor:
            tensor = tensor.detach() if detach else tensor
            return tensor.clone() if copy else tensor

        return map_tensors(value, one)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        if not in_backward():
            begun.append((module, kept(args), kept(kwargs)))

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> None:
        if in_backward():
            return
        entered = None if copy else module
        args, kwargs = (args, kwargs) if copy else (kept(args), kept(kwargs))
        while begun and entered is not module:  # skip calls that raised
            entered, args, kwargs = begun.pop()
        recorded.append(RecordedCall(name, module, args, kwargs, kept(output)))

    handles = []
    try:
        for name, module in model.named_modules():
            if where(name, module) if callable(where) else name in where:
                if copy:
                    handles.append(module.register_forward_pre_hook(Hook(enter), with_kwargs=True))
                handles.append(module.register_forward_hook(Hook(partial(leave, name)), with_kwargs=True))
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
