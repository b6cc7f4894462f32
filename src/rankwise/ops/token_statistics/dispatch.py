"""Which implementation runs, and its kernels: one rule, and no silent change of an explicit choice."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from rankwise.errors import InputError, did_you_mean

IMPLEMENTATIONS = ("reference", "cpu", "triton")
NEEDS = {"cpu": ("numba", "llvmlite"), "triton": ("triton",)}
"""Packages that an implementation cannot do without."""
_THERE = {name: find_spec(name) is not None for names in NEEDS.values() for name in names}


def choose(impl: str, device: torch.device) -> str:
    """The implementation for a device.

    ``"auto"`` is ``"cpu"`` for tensors on a CPU where numba is installed, ``"triton"`` for tensors on a CUDA
    or ROCm device where triton is installed, and ``"reference"`` elsewhere. Neither the length nor the dtype
    is looked at.

    Args:
        impl: what was asked for.
        device: where w lies.

    Returns:
        One of `IMPLEMENTATIONS`.

    Raises:
        InputError: if the name is unknown or the named implementation cannot run there; it never falls back.

    Examples:
        >>> import torch
        >>> choose("auto", torch.device("cpu")), choose("reference", torch.device("cpu"))
        ('cpu', 'reference')
    """
    if impl == "auto":
        fast = {"cpu": "cpu", "cuda": "triton"}.get(device.type)
        return "reference" if fast is None or _missing(fast) else fast
    if impl not in IMPLEMENTATIONS:
        fix = did_you_mean(str(impl), ("auto", *IMPLEMENTATIONS))
        raise InputError("impl", wanted="auto, reference, cpu or triton", got=repr(impl), fix=fix)
    if impl == "cpu" and device.type != "cpu":
        raise _cannot("cpu", "tensors on a CPU", f"tensors on {device}")
    missing = _missing(impl)
    if missing:
        package = "rankwise[cpu]" if impl == "cpu" else "triton"
        got = f"no {' and no '.join(missing)} that can be imported"
        raise _cannot(impl, f"an installed {NEEDS[impl][0]}", got, f"Install it: pip install '{package}'. ")
    if impl == "triton" and device.type != "cuda" and not interpreting():
        raise _cannot("triton", "tensors on a GPU, or TRITON_INTERPRET=1 set", f"tensors on {device}")
    return impl


@cache
def kernels(impl: str, causal: bool) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run; its folder is imported when it first runs.

    ``forward(problem, keep)`` gives the output in the dtype of w and, in that of the sums, memberships,
    scores and the sums over all tokens, if causal the last ones. Unless scores are to be kept, memberships
    lie in their place. ``backward(problem, membership, score, sums, given, given_membership)``, causal
    ``backward(problem, membership, score, given, given_membership, given_end)``, takes the gradients of the
    output, of Π and of the last sums, and gives those of w and of the temperature, causal also of the
    scores' offset and of the first sums.
    """
    return import_module(f"rankwise.ops.token_statistics.{impl}.{'causal' if causal else 'bidirectional'}")


def interpreting() -> bool:
    """Whether Triton's interpreter is switched on, which runs its kernels on a CPU, slowly, for tests."""
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


def _missing(impl: str) -> list[str]:
    return [name for name in NEEDS.get(impl, ()) if not _THERE[name]]


def _cannot(impl: str, wanted: str, got: str, fix: str = "") -> InputError:
    fix += 'Pass impl="auto", or impl="reference", which runs everywhere.'
    return InputError(f'impl="{impl}"', wanted=wanted, got=got, fix=fix)
