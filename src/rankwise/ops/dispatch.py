"""Choice of the implementation (reference, CPU or Triton kernels) of a `tssa` call, and its execution."""

import os
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from rankwise._internals.torch_private import (
    constant_when_traced,
    in_dispatch_mode,
    in_function_transform,
    in_grad_transform,
    is_profiled,
    is_zero_tensor,
)
from rankwise.errors import InputError, one_of
from rankwise.ops import custom_ops, reference
from rankwise.ops.arguments import Call, Solution, Sums

REFERENCE = 'Pass impl="reference".'
IMPLEMENTATIONS = ("reference", "cpu", "triton")
PACKAGES = {"cpu": ("numba", "llvmlite"), "triton": ("triton",)}
"""Python packages that an implementation requires; the reference requires none."""


def choose(impl: str, device: torch.device) -> str:
    """Return the name of the implementation for a device; raise if a name is unknown or cannot run.

    ``"auto"`` means ``"cpu"`` on a CPU if numba can be imported, ``"triton"`` on a CUDA or ROCm device if
    triton can be imported, and ``"reference"`` otherwise, or inside a transform of torch.func, such as `vmap`
    and `grad`, because kernels have no rules for them. The choice does not depend on length or dtype.

    Examples:
        >>> import torch
        >>> choose("auto", torch.device("cpu")), choose("reference", torch.device("cpu"))
        ('cpu', 'reference')
    """
    if impl == "auto":
        fast = {"cpu": "cpu", "cuda": "triton"}.get(device.type)
        return "reference" if fast is None or missing(fast) or in_function_transform() else fast
    one_of("impl", impl, ("auto", *IMPLEMENTATIONS))
    fix, interpreted = "", os.environ.get("TRITON_INTERPRET") == "1"  # runs Triton on a CPU, for tests
    if impl == "cpu" and device.type != "cpu":
        expected, got = "tensors on a CPU", f"tensors on {device}"
    elif reason := missing(impl):
        expected, got = f"an installed {PACKAGES[impl][0]}", reason
        extra, packages = "rankwise[cpu]" if impl == "cpu" else "triton", " ".join(PACKAGES[impl])
        fix = f"Install it: pip install '{extra}', or --force-reinstall {packages} if it is broken. "
    elif impl == "triton" and device.type != "cuda" and not interpreted:
        expected, got = "tensors on a GPU, or TRITON_INTERPRET=1 set", f"tensors on {device}"
    else:
        return impl
    fix += 'Pass impl="auto", or impl="reference", which runs everywhere.'
    raise InputError(f'impl="{impl}"', expected=expected, got=got, fix=fix)


@constant_when_traced
def missing(impl: str) -> str:
    """Return why a package that an implementation requires cannot be imported, or "" if all can be."""
    return next((reason for name in PACKAGES.get(impl, ()) if (reason := import_failure(name))), "")


@cache
def import_failure(package: str) -> str:
    """Return why a package cannot be imported, or "" if it can; even an installed package may fail."""
    try:
        import_module(package)
    except Exception as error:
        return f"no {package} that can be imported ({type(error).__name__}: {error})"
    return ""


def solve(call: Call, impl: str) -> Solution:
    """Run a call by the reference, by a custom operator or, if nothing observes torch, directly by a kernel.

    Raise `InputError` for derivatives that custom operators would silently drop, or have no rule for.
    """
    if impl == "reference":
        return reference.solve(call)
    inputs = [x for x in (call.w, call.temperature, call.offset, *(call.start or ())) if x is not None]
    transformed = in_function_transform()  # `requires_grad` may be hidden there
    if not torch.compiler.is_compiling():
        dual = any(forward_ad.unpack_dual(x).tangent is not None for x in inputs)
        if dual or in_grad_transform():
            subject = f"{'forward-mode derivatives' if dual else 'torch.func.grad'} with impl={impl!r}"
            expected, got = "derivatives by .backward() or torch.autograd.grad", "a transformed function"
            raise InputError(subject, expected=expected, got=got, fix=REFERENCE)
    keep_scores = torch.is_grad_enabled() and (transformed or any(x.requires_grad for x in inputs))
    if not (keep_scores or transformed) and _unobserved([*inputs, call.mask, call.rate, call.bounds]):
        output, saved = custom_ops.kernels(impl, call.causal).forward(call, keep_scores)
        return Solution(output, saved.membership, saved.sums if call.causal else None)
    output, membership, _, *sums = custom_ops.tssa(*custom_ops.flat(call), impl, keep_scores)
    return Solution(output, membership, Sums(*sums) if call.causal else None)


def _unobserved(tensors: list[Tensor | None]) -> bool:
    """Return True if a kernel can be called without a custom operator, which halves the time for one token.

    Dispatch modes, tracers, profilers and tensor subclasses have to see an operator. Lazy negations and
    ZeroTensors need one too, because only torch's dispatcher computes their values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_dispatch_mode() or is_profiled():
        return False
    return all(
        x is None or (type(x) in (Tensor, Parameter) and not (x.is_neg() or is_zero_tensor(x)))
        for x in tensors
    )
