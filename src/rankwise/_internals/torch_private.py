"""Wrappers of private names of torch, so that a new version affects only this file.

``test_torch_private.py`` tests each function. ``test_private_names.py`` tests that only this file
uses private names.
"""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any, TypeVar, no_type_check

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.hooks import RemovableHandle

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# --- function modes ----------------------------------------------------------------------------------------


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context manager that disables all function modes and tensor subclasses in its block."""
    return torch._C.DisableTorchFunction()


def in_function_mode() -> bool:
    """Return True if a function mode is active, such as a capture, or a default device."""
    return bool(_get_current_function_mode_stack())


def pop_mode(mode: TorchFunctionMode) -> int | None:
    """Remove a function mode from torch's stack. Return the number of modes below it if it was found."""
    modes = _get_current_function_mode_stack()
    depth = max((index for index, other in enumerate(modes) if other is mode), default=None)
    if depth is not None:
        for _ in modes[depth:]:
            _pop_mode()
        for other in modes[depth + 1 :]:
            _push_mode(other)
    return depth


def push_mode(mode: TorchFunctionMode, depth: int) -> None:
    """Insert a function mode into torch's stack of active modes, above ``depth`` other modes."""
    above = _get_current_function_mode_stack()[depth:]
    for _ in above:
        _pop_mode()
    for other in (mode, *above):
        _push_mode(other)


# --- autograd ----------------------------------------------------------------------------------------------


@no_type_check  # torch.compile traces through this function, and cannot trace through type checks
def in_backward():
    """Return True during a backward pass, in which checkpointing may call modules a second time."""
    return torch._C._current_graph_task_id() != -1


@no_type_check
def changes_in_place(tensor):
    """Return the number of in-place changes of a tensor (its version counter)."""
    return tensor._version


@no_type_check
def base_of(tensor):
    """Return the base tensor of a view, or the tensor itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


def in_function_transform() -> bool:
    """Return True inside a transform of torch.func, such as `vmap` or `grad`."""
    return torch._C._are_functorch_transforms_active()


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context manager that suspends the transforms of torch.func, such as `vmap`, in its block."""
    return temporarily_clear_interpreter_stack()


def in_grad_transform() -> bool:
    """Return True inside a reverse-mode transform of torch.func, such as `grad`, `vjp` or `jacrev`."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in stack)


def is_mapped(tensor: Tensor) -> bool:
    """Return True if a tensor is inside `torch.vmap`, so that it lacks the mapped axis."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


@no_type_check
def values_known(*tensors):
    """Return True if Python can read the values of all tensors; arguments that are None are ignored.

    Return False while compiling, in `vmap`, for meta tensors and for tensor subclasses.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    for tensor in tensors:
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                return False
            tensor = functorch.get_unwrapped(tensor)
        if tensor is not None and (tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter)):
            return False
    return True


def is_profiled() -> bool:
    """Return True if an autograd profiler is running."""
    return torch.autograd._profiler_enabled()


def in_dispatch_mode() -> bool:
    """Return True while a `TorchDispatchMode` (which intercepts every operator call) is active."""
    return is_in_torch_dispatch_mode()


def is_zero_tensor(tensor: Tensor) -> bool:
    """Return True for a ZeroTensor, by which torch represents zeros without storage."""
    return tensor._is_zerotensor()


# --- compiled modules --------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module was compiled by `torch.compile` or `Module.compile`."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def original_of(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper that `torch.compile` returned; return any other module unchanged."""
    return getattr(module, "_orig_mod", module)


COMPILED_PREFIX = "_orig_mod."
"""Prefix of the weight names of a module that `torch.compile` returned."""


def original_name(name: str) -> str:
    """Return the name of a weight or module without the parts that `torch.compile` and checkpoints insert."""
    return name.replace(COMPILED_PREFIX, "").replace("_checkpoint_wrapped_module.", "")


def runs_compiled_eagerly() -> bool:
    """Return True if ``torch.compiler.set_stance("force_eager")`` makes compiled code run eagerly."""
    return torch._dynamo.eval_frame._stance.stance == "force_eager"


def is_program(module: nn.Module) -> bool:
    """Return True for a program that TorchScript or `torch.export` made of a module."""
    exported = any(kind.__module__.startswith("torch.export") for kind in type(module).__mro__)
    return exported or isinstance(module, torch.jit.ScriptModule)


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context manager in which compiled functions run eagerly, that is, uncompiled.

    If the compiler has not been imported, no function is compiled. Then the context manager does nothing,
    because importing the compiler would be slow.
    """
    imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if imported else nullcontext()


def constant_when_traced(function: FunctionT) -> FunctionT:
    """Mark a function so that `torch.compile` treats its result as a constant; return the function.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which is slow.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- modules -----------------------------------------------------------------------------------------------


RESET = "_reset_parameters"
"""Name of the method with which torch's attention and transformer modules initialize their weights."""


def dropout_rate(module: nn.Module) -> float:
    """Return the rate of a dropout layer, or 0 for any other module."""
    return float(module.p) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0


def forget_global_hook(handle: RemovableHandle) -> None:
    """Delete the entry that PyTorch keeps after a global hook with keyword arguments is removed."""
    nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def forward_hooks(module: nn.Module) -> list[object]:
    """Return the hooks that run before and after a module's forward method, in the order of their calls."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def remove_forward_hooks(module: nn.Module, wanted: Callable[[object], bool]) -> None:
    """Remove the forward hooks for which ``wanted(hook)`` is True, and torch's flags for these hooks."""
    hooks = {**module._forward_pre_hooks, **module._forward_hooks}
    for name, store in vars(module).items():
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            for number in [number for number in store if wanted(hooks.get(number))]:
                del store[number]


def set_attribute(module: nn.Module, name: str, value: object) -> Callable[[], None]:
    """Set an attribute, parameter, buffer or child of a module; return a function that undoes this."""
    stores: list[dict[str, Any]] = [vars(module), module._parameters, module._buffers, module._modules]
    before = [(store, name in store, store.get(name)) for store in stores]
    setattr(module, name, value)

    def restore() -> None:
        for store, there, former in before:
            if there:
                store[name] = former
            else:
                store.pop(name, None)

    return restore


CHILDREN = "_modules"
"""Attribute of a module that contains its children by name."""
LONGEST = 10_000
"""Number of entries above which a container of a model is data, such as a vocabulary, and no state."""


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model works on copies of its buffers, and which restores its attributes.

    Counters, caches, running statistics and random generators are restored, also in lists, dicts, sets and
    deques. Added hooks are removed; hooks that remove themselves stay removed. If a first run adds hooks and
    notes this in an attribute, the hooks and the note are removed. The original tensors are not written to,
    so the backward passes of earlier and later operations stay valid. The content of other objects and of
    containers with more than `LONGEST` entries is not restored. Nothing is restored if the model adds modules
    or parameters, as lazy modules do, because attributes record the addition. Cost: a copy of the buffers.
    """
    special = (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)  # these store state elsewhere
    every = [*model.modules()]
    modules = [module for module in every if not isinstance(module, special)]
    torch_names = vars(nn.Module())
    hook_names = [name for name in torch_names if "_hooks" in name]
    hooks = [vars(module)[name] for module in modules for name in hook_names]
    present = [(store, set(store)) for store in hooks]
    places: list[Any] = [(vars(x), name) for x in modules for name in vars(x).keys() - torch_names.keys()]
    inside: list[Any] = [module._buffers for module in modules]
    inside += _containers(store[name] for store, name in places)
    stores = [vars(module) for module in modules] + inside
    stores += [module._non_persistent_buffers_set for module in modules]
    sets = [store for store in inside if isinstance(store, set)]  # a set would not find copies of tensors
    for store in inside:
        if not isinstance(store, set):
            places += [(store, name) for name in (store if isinstance(store, dict) else range(len(store)))]
    contents = chain((store[name] for store, name in places), *sets)
    kinds = (Tensor, Generator, np.random.Generator)
    values = [value for value in contents if isinstance(value, kinds)]
    generators = [(value, value.get_state()) for value in values if isinstance(value, Generator)]
    bits = [value.bit_generator for value in values if isinstance(value, np.random.Generator)]
    numpy_states = [(bit_generator, bit_generator.state) for bit_generator in bits]

    def parts() -> int:
        inner = (store for module in every for store in (module._modules, module._parameters))
        return sum(part is not None for store in inner for part in store.values())

    before, kept = parts(), [(store, store.copy()) for store in stores]
    try:
        with without_torch_function():
            # Skip tensors that require gradients: in FSDP1, they are views of freed storage.
            tensors = [value for value in values if isinstance(value, Tensor) and not value.requires_grad]
            memo: dict[int, Any] = {}  # so that the copies of tensors that share storage share storage, too
            copies = {
                id(x): deepcopy(x, memo) if type(x) is Tensor else like(x.clone(), x)
                for x in tensors
                if not isinstance(x, nn.Parameter)
            }
            for store, name in places:
                if id(store[name]) in copies:
                    store[name] = copies[id(store[name])]
        yield
    finally:
        for generator, state in generators:
            generator.set_state(state)
        for bit_generator, numpy_state in numpy_states:
            bit_generator.state = numpy_state
        restored = parts() <= before
        for store, numbers in present if restored else []:
            for number in store.keys() - numbers:
                del store[number]
        for store, content in kept if restored else []:
            if not isinstance(store, dict) or list(store) != list(content):
                store.clear()
            (store.extend if isinstance(store, list | deque) else store.update)(content)


def _containers(values: Iterable[Any]) -> list[Any]:
    """Return all containers among values, also nested containers."""
    containers: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        is_container = type(value) in (list, dict, OrderedDict, defaultdict, set, deque)
        if is_container and id(value) not in containers and len(value) <= LONGEST:
            containers[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    return [*containers.values()]


def like(new: Tensor, old: Tensor) -> Tensor:
    """Return the copy ``new`` with class and attributes of ``old``, which define a mask like `CausalBias`."""
    if type(new) is Tensor and type(old) not in (Tensor, nn.Parameter):  # else `new` has the class
        new = new.as_subclass(type(old))
    for name, value in vars(old).items():  # keep attributes that wrappers such as DTensor copied
        vars(new).setdefault(name, value)
    return new


@contextmanager
def without_forward_hooks(model: nn.Module, wanted: Callable[[object], bool]) -> Iterator[None]:
    """Context manager that disables hooks for which ``wanted(hook)`` is True, and then restores all hooks."""
    with ExitStack() as restored:
        for module in model.modules():
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name).items()
                others = OrderedDict((number, hook) for number, hook in hooks if not wanted(hook))
                restored.callback(set_attribute(module, name, others))
        yield
