"""All that Rankwise uses of torch and numpy without a promise that it stays: names that begin with _.

One function for each, so that what a version changes is mended here. ``test_torch_internals.py`` says what it
was, ``test_private_names.py`` that no other file uses such names.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, no_type_check

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.hooks import RemovableHandle

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# --- function modes ----------------------------------------------------------------------------------------


def without_torch_function() -> AbstractContextManager[None]:
    """Run torch functions past all function modes and subclasses of tensors, as long as the block runs."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def take_off_mode(mode: TorchFunctionMode) -> int | None:
    """Remove a mode from the stack; how many modes lie below it, or None if it was not there."""
    above: list[Any] = []
    found = None
    while torch._C._len_torch_function_stack():
        top = _pop_mode()
        if top is mode:
            found = torch._C._len_torch_function_stack()
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    return found


def put_on_mode(mode: TorchFunctionMode, depth: int) -> None:
    """Put a mode on the stack with so many modes below it."""
    above = []
    while torch._C._len_torch_function_stack() > depth:
        above.append(_pop_mode())
    _push_mode(mode)
    for other in reversed(above):
        _push_mode(other)


# --- autograd ----------------------------------------------------------------------------------------------


@no_type_check  # functions compiled inside a model trace through it, and cannot through checks
def in_backward():
    """Whether a backward pass is under way: modules that are called in it are called a second time."""
    return torch._C._current_graph_task_id() != -1


@no_type_check
def changes_in_place(tensor):
    """How often a tensor has been changed in place."""
    return tensor._version


@no_type_check
def base_of(tensor):
    """The tensor of which another tensor is a view; itself where it is no view."""
    return tensor if tensor._base is None else tensor._base


def in_function_transform() -> bool:
    """Whether a transform of torch.func, such as `vmap` or `grad`, is under way."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def in_forward_derivative() -> bool:
    """Whether forward-mode derivatives are taken."""
    level: int = forward_ad._current_level
    return level >= 0


def is_profiled() -> bool:
    """Whether a profiler of autograd is on."""
    on: bool = torch.autograd._profiler_enabled()
    return on


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active."""
    active: bool = is_in_torch_dispatch_mode()
    return active


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether a tensor stands for zeros that are yet to be written."""
    zero: bool = tensor._is_zerotensor()
    return zero


# --- compiled modules --------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `Module.compile` has compiled a module."""
    return (
        isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None
    )


def original_of(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; any other as it is."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


COMPILED_PREFIX = "_orig_mod."
"""What `torch.compile` puts before the names of all weights."""


def runs_compiled_eagerly() -> bool:
    """Whether compiled modules run uncompiled, by ``torch.compiler.set_stance("force_eager")``."""
    eager: bool = torch._dynamo.eval_frame._stance.stance == "force_eager"
    return eager


def constant_when_traced(function: FunctionT) -> FunctionT:
    """A function that a compiler calls while it traces, and whose answer it takes for constant.

    As `torch.compiler.assume_constant_result`, which imports the compiler to say so.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- modules -----------------------------------------------------------------------------------------------


RESET = "_reset_parameters"
"""The method by which attention and transformers of torch draw their weights."""


def drops(module: nn.Module) -> float:
    """The share that a dropout layer drops; 0 for any other module."""
    return float(module.p) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0


def forget_global_hook(handle: RemovableHandle) -> None:
    """Take back the note on keyword arguments that PyTorch keeps of a global hook after its removal."""
    nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def forward_pre_hooks(module: nn.Module) -> list[object]:
    """The hooks that run before one module's forward, in their order."""
    return list(module._forward_pre_hooks.values())


def forward_hooks(module: nn.Module) -> list[object]:
    """The hooks that run after one module's forward, in their order."""
    return list(module._forward_hooks.values())


def remove_forward_hooks(module: nn.Module, wanted: Callable[[object], bool]) -> int:
    """Take some of the hooks off one module, before and after its forward; how many there were."""
    removed = 0
    stores: list[tuple[Any, tuple[Any, ...]]] = [
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ]
    for hooks, notes in stores:
        for number in [number for number, hook in hooks.items() if wanted(hook)]:
            removed += 1
            del hooks[number]
            for note in notes:
                note.pop(number, None)
    return removed


@contextmanager
def registered_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module has the buffers it had, the same tensors or None; later ones are gone."""
    kept = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # TorchScript adds and removes no buffer
    ]
    try:
        yield
    finally:
        for module, buffers, left_out in kept:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(left_out)


@contextmanager
def without_forward_hooks(model: nn.Module, wanted: Callable[[object], bool]) -> Iterator[None]:
    """A model without some of its hooks as long as the block runs, then with all it had, in their order."""
    kept = [
        (hooks, dict(hooks))
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]
    try:
        for hooks, before in kept:
            for number, hook in before.items():
                if wanted(hook):
                    del hooks[number]
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


# --- numpy -------------------------------------------------------------------------------------------------


def numpy_linalg_file() -> str | None:
    """The library that `numpy.linalg` is in, linked to its LAPACK; None where numpy keeps it elsewhere."""
    module = getattr(np.linalg, "_umath_linalg", None)
    file: str | None = getattr(module, "__file__", None)
    return file
