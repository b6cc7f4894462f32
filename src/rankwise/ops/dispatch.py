"""Choice of the implementation of a `tssa` call, and its execution.

Kernels run as custom torch operators with gradients; `torch.compile` treats an operator as one node.
"""

import os
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
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
from rankwise.ops import reference
from rankwise.ops.arguments import (
    Call,
    Cotangents,
    Gradients,
    Outputs,
    Saved,
    Sums,
    sum_dtype,
)

REFERENCE = 'Pass impl="reference".'
IMPLEMENTATIONS = ("reference", "cpu", "triton")
PACKAGES = {"cpu": ("numba", "llvmlite"), "triton": ("triton",)}
"""Python packages that an implementation requires; the reference requires none."""


def choose(impl: str, device: torch.device) -> str:
    """Return the name of the implementation for a device; raise if a name is unknown or cannot run.

    ``"auto"`` means ``"cpu"`` on a CPU if numba can be imported, and ``"triton"`` on a CUDA or ROCm device if
    triton can be imported. Otherwise ``"auto"`` means ``"reference"``. Inside a transform of torch.func, such
    as `vmap` or `grad`, it always means ``"reference"``, because kernels have no rules for transforms. The
    choice does not depend on length or dtype.

    Examples:
        >>> import torch
        >>> choose("auto", torch.device("cpu")), choose("reference", torch.device("cpu"))
        ('cpu', 'reference')
    """
    if impl == "auto":
        fast = {"cpu": "cpu", "cuda": "triton"}.get(device.type)
        return "reference" if fast is None or missing(fast) or in_function_transform() else fast
    one_of("impl", impl, ("auto", *IMPLEMENTATIONS))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # runs Triton on a CPU, for tests
    fix = 'Pass impl="auto", or impl="reference", which runs everywhere.'
    if impl == "cpu" and device.type != "cpu":
        expected, got = "tensors on a CPU", f"tensors on {device}"
    elif reason := missing(impl):
        expected, got = f"an installed {PACKAGES[impl][0]}", reason
        fix = f"Install it: pip install '{'rankwise[cpu]' if impl == 'cpu' else 'triton'}'. {fix}"
    elif impl == "triton" and device.type != "cuda" and not interpreted:
        expected, got = "tensors on a GPU, or TRITON_INTERPRET=1 set", f"tensors on {device}"
    else:
        return impl
    raise InputError(f'impl="{impl}"', expected=expected, got=got, fix=fix)


@constant_when_traced
def missing(impl: str) -> str:
    """Return why a package that an implementation requires cannot be imported; "" if none is missing."""
    return next(filter(None, map(import_failure, PACKAGES.get(impl, ()))), "")


@cache
def import_failure(package: str) -> str:
    """Return why a package, even if it is installed, cannot be imported; return "" if the import succeeds."""
    try:
        import_module(package)
    except Exception as error:
        return f"no {package} that can be imported ({type(error).__name__}: {error})"
    return ""


def solve(call: Call, impl: str) -> Outputs:
    """Return the outputs of a call, computed by the reference or by a kernel.

    A kernel runs in a custom operator or, if nothing observes torch, without one. Raise `InputError` for
    derivatives that custom operators would silently drop or for which they have no rule.
    """
    if impl == "reference":
        return reference.solve(call)
    start = call.start or (None, None, None)
    inputs = [x for x in (call.w, call.temperature, call.offset, *start) if x is not None]
    transformed = in_function_transform()  # a transform may hide `requires_grad`
    if not torch.compiler.is_compiling():
        dual = any(forward_ad.unpack_dual(x).tangent is not None for x in inputs)
        if dual or in_grad_transform():
            subject = f"{'forward-mode derivatives' if dual else 'torch.func.grad'} with impl={impl!r}"
            expected, got = "derivatives by .backward() or torch.autograd.grad", "a transformed function"
            raise InputError(subject, expected=expected, got=got, fix=REFERENCE)
    keep_scores = torch.is_grad_enabled() and (transformed or any(x.requires_grad for x in inputs))
    if not (keep_scores or transformed) and _unobserved([*inputs, call.mask, call.rate]):
        output, saved = kernels(impl).forward(call, keep_scores)
        return Outputs(output, saved.membership, saved.sums if call.causal else None)
    arguments = (*call[:4], *start, call.rate, call.causal, impl, keep_scores)
    output, membership, _, *sums = tssa_forward(*arguments)
    return Outputs(output, membership, Sums(*sums) if call.causal else None)


def _unobserved(tensors: list[Tensor | None]) -> bool:
    """Return True if a kernel can be called without a custom operator, to halve the time of a one-token call.

    Dispatch modes, tracers, profilers and tensor subclasses have to see an operator. Lazy negations and
    ZeroTensors need an operator too, because only torch's dispatcher computes their values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_dispatch_mode() or is_profiled():
        return False
    return all(
        x is None or (type(x) in (Tensor, Parameter) and not (x.is_neg() or is_zero_tensor(x)))
        for x in tensors
    )


@runtime_checkable
class Kernels(Protocol):
    """Interface of the modules `cpu_passes` and `triton_passes`."""

    def forward(self, call: Call, keep_scores: bool) -> tuple[Float[Tensor, "B T H K"], Saved]:
        """Return the output, and the tensors for `backward`; these contain scores only if ``keep_scores``."""

    def backward(self, call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Return the gradients of w, temperature and, if causal, offset and sums before the first token."""


@cache
def kernels(impl: str) -> Kernels:
    """Import and return the module of an implementation, such as `cpu_passes` for "cpu"."""
    return cast(Kernels, import_module(f"rankwise.ops.{impl}_passes"))


@torch.library.custom_op("rankwise::tssa", mutates_args=())
def tssa_forward(
    w: Tensor,
    temperature: Tensor,
    offset: Tensor | None,
    mask: Tensor | None,
    energy: Tensor | None,
    assigned: Tensor | None,
    mass: Tensor | None,
    rate: Tensor | None,
    causal: bool,
    impl: str,
    keep_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run a forward pass, and return output, memberships, scores (empty if not ``keep_scores``) and sums."""
    call = Call(w, temperature, offset, mask, _start(energy, assigned, mass), rate, causal)
    output, saved = kernels(impl).forward(call, keep_scores)
    score = saved.score if keep_scores else saved.membership.new_empty(0)
    return output, saved.membership, score, *saved.sums


@torch.library.custom_op("rankwise::tssa_backward", mutates_args=())
def tssa_backward(
    d_output: Tensor,
    d_membership: Tensor,
    d_energy: Tensor,
    d_assigned: Tensor,
    d_mass: Tensor,
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    energy: Tensor | None,
    assigned: Tensor | None,
    mass: Tensor | None,
    rate: Tensor | None,
    membership: Tensor,
    score: Tensor,
    end_energy: Tensor,
    end_assigned: Tensor,
    end_mass: Tensor,
    causal: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of w, temperature, offset and initial sums; the last four are empty if not causal."""
    call = Call(w, temperature, None, mask, _start(energy, assigned, mass), rate, causal)
    saved = Saved(membership, score, Sums(end_energy, end_assigned, end_mass))
    cotangents = Cotangents(d_output, d_membership, Sums(d_energy, d_assigned, d_mass))
    call, saved = without_unread(call, saved, cotangents)
    dw, d_temperature, d_offset, d_start = kernels(impl).backward(call, saved, cotangents)
    return dw, d_temperature, d_offset, *d_start


def without_unread(call: Call, saved: Saved, cotangents: Cotangents) -> tuple[Call, Saved]:
    """Mask tokens that do not affect the loss, so that their NaN does not reach other gradients as 0 · NaN.

    A cotangent is the gradient of the loss with respect to an output. In a causal call, the tokens after the
    last nonzero cotangent are masked, unless the final sums have a cotangent. A bidirectional row is masked
    only if all its cotangents are 0. Without NaN, masking changes no gradient, so a CPU skips it if all
    scores are finite. A GPU always masks, because checking the scores would wait for the GPU.
    """
    # One NaN makes the sum NaN, and testing only the sum is 20 times as fast as testing each score.
    if call.w.device.type == "cpu" and bool(saved.score.sum().isfinite()):
        return call, saved
    read = (cotangents.output != 0).flatten(2).any(-1) | (cotangents.membership != 0).any(-1)
    sums_read = torch.stack([(x != 0).flatten(1).any(1) for x in cotangents.sums]).any(0)[:, None]
    row_read = read.any(1, keepdim=True) | sums_read
    kept = read.flip(1).cumsum(1).flip(1) > 0 if call.causal else row_read.expand_as(read)
    kept = (kept | sums_read) if call.mask is None else (kept | sums_read) & call.mask
    sums = Sums(*(x.masked_fill(~row_read.view(-1, *[1] * (x.ndim - 1)), 0.0) for x in saved.sums))
    membership, score = (x.masked_fill(~kept[..., None], 0.0) for x in saved[:2])
    return call._replace(mask=kept), Saved(membership, score, sums)


def _start(energy: Tensor | None, assigned: Tensor | None, mass: Tensor | None) -> Sums | None:
    """Return the initial sums. If an argument is None, return None, which means zeros."""
    return None if energy is None or assigned is None or mass is None else Sums(energy, assigned, mass)


def _empty(w: Tensor, *shape: Any) -> Tensor:
    return w.new_empty(shape, dtype=sum_dtype(w.dtype))  # sizes may be symbols of torch.compile


def _empty_sums(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, heads, width = w.shape
    energy = _empty(w, batch, heads, width)
    return energy, torch.empty_like(energy), _empty(w, batch, heads)


@tssa_forward.register_fake
def _(w, temperature, offset, mask, energy, assigned, mass, rate, causal, impl, keep_scores):  # type: ignore[no-untyped-def]
    output, per_token = torch.empty_like(w, memory_format=torch.contiguous_format), w.shape[:3]
    score = _empty(w, *per_token) if keep_scores else _empty(w, 0)
    return output, _empty(w, *per_token), score, *_empty_sums(w)


@tssa_backward.register_fake
def _(d_output, d_membership, d_energy, d_assigned, d_mass, w, *rest):  # type: ignore[no-untyped-def]
    dw, d_temperature = torch.empty_like(w, memory_format=torch.contiguous_format), _empty(w, w.shape[2])
    if not rest[-2]:  # not causal
        return dw, d_temperature, *(_empty(w, 0) for _ in range(4))
    return dw, d_temperature, _empty(w, *w.shape[:3]), *_empty_sums(w)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, temperature, offset, mask, *state, ctx.causal, ctx.impl, _ = inputs
    ctx.has_offset, ctx.has_start = offset is not None, state[0] is not None
    ctx.save_for_backward(w, temperature, mask, *state, *output[1:])


def _backward(
    ctx: Any, d_output: Tensor, d_membership: Tensor, _: Tensor, *d_sums: Tensor
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once, because activation checkpointing allows only one access
    gradients = tssa_backward(d_output, d_membership, *d_sums, *saved, ctx.causal, ctx.impl)
    dw, d_temperature, d_offset, *d_start = gradients
    if not ctx.has_start:
        d_start = [None] * 3
    return dw, d_temperature, d_offset if ctx.has_offset else None, None, *d_start, *[None] * 4


def _no_second_derivative(ctx: Any, *_: Tensor) -> None:
    subject, expected = "second derivatives of TSSA's kernels", "first derivatives"
    raise InputError(subject, expected=expected, got="create_graph=True", fix='Pass impl="reference".')


tssa_forward.register_autograd(_backward, setup_context=_save)
tssa_backward.register_autograd(_no_second_derivative)
