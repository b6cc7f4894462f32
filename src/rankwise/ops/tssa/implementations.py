"""The kernels by name; a folder is imported when it first runs."""

from functools import cache
from importlib import import_module
from types import ModuleType

import rankwise.ops.tssa.cpu.threads  # noqa: F401 - it watches for forks, also before the first call


@cache
def kernels(impl: str, causal: bool) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run.

    Args:
        impl: "cpu" or "triton".
        causal: which of the two operations.

    Returns:
        The module.
    """
    return import_module(f"rankwise.ops.tssa.{impl}.{'causal' if causal else 'bidirectional'}")
