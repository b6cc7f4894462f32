"""Which implementation runs, and its kernels: one rule, and no silent change of an explicit choice."""

import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from rankwise._internals.torch_private import constant_when_traced
from rankwise.errors import InputError, did_you_mean

IMPLEMENTATIONS = ("reference", "cpu", "triton")
NEEDS = {"cpu": ("numba", "llvmlite"), "triton": ("triton",)}
"""Packages that an implementation cannot do without."""


def choose(impl: str, device: torch.device) -> str:
    """The implementation for a device.

    ``"auto"`` is ``"cpu"`` for tensors on a CPU where numba can be imported, ``"triton"`` for tensors on a
    CUDA or ROCm device where triton can be, and ``"reference"`` elsewhere. Neither the length nor the dtype
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
        return "reference" if fast is None or missing(fast) else fast
    if impl not in IMPLEMENTATIONS:
        fix = did_you_mean(str(impl), ("auto", *IMPLEMENTATIONS))
        raise InputError("impl", expected="auto, reference, cpu or triton", got=repr(impl), fix=fix)
    if impl == "cpu" and device.type != "cpu":
        raise _cannot("cpu", "tensors on a CPU", f"tensors on {device}")
    if lost := missing(impl):
        package, parts = "rankwise[cpu]" if impl == "cpu" else "triton", " ".join(NEEDS[impl])
        fix = f"Install it: pip install '{package}', or --force-reinstall {parts} if it is broken. "
        raise _cannot(impl, f"an installed {NEEDS[impl][0]}", lost, fix)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, slowly, for tests
    if impl == "triton" and device.type != "cuda" and not interpreted:
        raise _cannot("triton", "tensors on a GPU, or TRITON_INTERPRET=1 set", f"tensors on {device}")
    return impl


@cache
def kernels(impl: str, causal: bool) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run; its folder is imported when it first runs.

    ``forward(problem, keep)`` gives the output in the dtype of w and, in that of the sums, memberships,
    scores and the sums over all tokens, if causal the last sums. Unless scores are to be kept, memberships
    lie in their place. ``backward(problem, membership, score, sums, given, given_membership)``, causal
    ``backward(problem, membership, score, given, given_membership, given_end)``, takes the gradients of the
    output, of Π and of the last sums, and gives those of w and of the temperature, causal also of the
    scores' offset and of the first sums.
    """
    return import_module(f"rankwise.ops.{impl}_{'causal' if causal else 'bidirectional'}")


@constant_when_traced
def missing(impl: str) -> str:
    """The first package an implementation needs that cannot be imported, and why; nothing where all can."""
    return next((said for name in NEEDS.get(impl, ()) if (said := _failure(name))), "")


@cache
def _failure(package: str) -> str:
    """An installed package may still fail, such as numba without the library that llvmlite loads."""
    try:
        import_module(package)
    except Exception as error:
        return f"no {package} that can be imported ({type(error).__name__}: {error})"
    return ""


def _cannot(impl: str, wanted: str, got: str, fix: str = "") -> InputError:
    fix += 'Pass impl="auto", or impl="reference", which runs everywhere.'
    return InputError(f'impl="{impl}"', expected=wanted, got=got, fix=fix)
