"""Names of torch that begin with an underscore and that tests need; no other test uses such names.

`tests/internals/test_torch_private.py` tests the wrappers of the package, and may use private names, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from rankwise._internals.torch_private import COMPILED_PREFIX as COMPILED_PREFIX

FAST_LAYER, FAST_ATTENTION = "_transformer_encoder_layer_fwd", "_native_multi_head_attention"
"""Operations of the fast path of PyTorch's encoder layer."""


class Operations(TorchDispatchMode):
    """Keeps the operations that run in its block, and shows each one, its arguments and its output."""

    def __init__(self, show: Callable[[Any, Any, Any], object] = lambda function, args, output: None) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self.show = show

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(function)
        output = function(*args, **(kwargs or {}))
        self.show(function, args, output)
        return output


def zero_tensor(*shape: int) -> Tensor:
    """Return zeros without storage."""
    return torch._efficientzerotensor(shape)


def lazy_negation(x: Tensor) -> Tensor:
    """Return −x as a view that is negated when it is read."""
    return torch._neg_view(x)


def hook_stores(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the hooks before and after the forward method of a module."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_of(model: nn.Module) -> list[Any]:
    """Return the hooks before and after the forward methods of all modules of a model."""
    return [hook for module in model.modules() for store in hook_stores(module) for hook in store.values()]


def function_modes() -> list[Any]:
    """Return the active function modes, outermost first."""
    return list(_get_current_function_mode_stack())


def left_behind(model: nn.Module) -> list[str]:
    """Return every hook and function mode that a capture could forget, and notes of removed hooks."""
    stores = {key: store for key, store in vars(nn.modules.module).items() if key.startswith("_global_")}
    for name, module in model.named_modules():
        stores |= {f"{name}.{key}": store for key, store in vars(module).items() if "_hooks" in key}
    found = [name for name, store in stores.items() if isinstance(store, dict) and store]
    return found + [repr(mode) for mode in function_modes()]
