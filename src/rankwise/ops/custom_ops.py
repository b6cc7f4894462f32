"""The kernels as torch operators: with shapes for tracing, and gradients, so that compilers see one node."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from rankwise._internals.torch_private import (
    in_dispatch_mode,
    in_forward_derivative,
    in_function_transform,
    is_profiled,
    is_zero_tensor,
)
from rankwise.errors import InputError
from rankwise.ops.arguments import Problem, Solution, Sums, check_call, exact
from rankwise.ops.dispatch import kernels


@torch.library.custom_op("rankwise::tssa_bidirectional", mutates_args=())
def bidirectional(
    w: Tensor,
    temperature: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor | None,
    impl: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, memberships; and for the gradient sums and, if they are to be kept, scores."""
    check_call(w, bounds, temperature=temperature, mask=mask)
    problem = Problem(w, temperature, None, mask, None, None, bounds, causal=False)
    output, membership, score, sums = kernels(impl, causal=False).forward(problem, keep)
    return output, membership, score if keep else membership.new_empty(0), *sums


@torch.library.custom_op("rankwise::tssa_bidirectional_backward", mutates_args=())
def bidirectional_backward(
    given: Tensor,
    given_membership: Tensor,
    w: Tensor,
    temperature: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor | None,
    membership: Tensor,
    score: Tensor,
    energy: Tensor,
    assigned: Tensor,
    mass: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of w and of the temperature."""
    own = {"temperature": temperature, "mask": mask, "membership": membership, "score": score}
    own |= {"given": given, "given_membership": given_membership}
    check_call(w, bounds, **own, energy=energy, assigned=assigned, mass=mass)
    problem = Problem(w, temperature, None, mask, None, None, bounds, causal=False)
    sums = Sums(energy, assigned, mass)
    back = kernels(impl, causal=False).backward
    return back(problem, membership, score, sums, given, given_membership)


@torch.library.custom_op("rankwise::tssa_causal", mutates_args=())
def causal(
    w: Tensor,
    temperature: Tensor | None,
    offset: Tensor | None,
    mask: Tensor | None,
    energy: Tensor | None,
    assigned: Tensor | None,
    mass: Tensor | None,
    rate: Tensor | None,
    bounds: Tensor | None,
    impl: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, memberships, scores if they are to be kept for the gradient, the sums after the last token."""
    own = {"temperature": temperature, "offset": offset, "mask": mask, "rate": rate}
    check_call(w, bounds, **own, energy=energy, assigned=assigned, mass=mass)
    start = _sums(energy, assigned, mass)
    problem = Problem(w, temperature, offset, mask, start, rate, bounds, causal=True)
    output, membership, score, end = kernels(impl, causal=True).forward(problem, keep)
    return output, membership, score if keep else membership.new_empty(0), *end


@torch.library.custom_op("rankwise::tssa_causal_backward", mutates_args=())
def causal_backward(
    given: Tensor,
    given_membership: Tensor,
    given_energy: Tensor,
    given_assigned: Tensor,
    given_mass: Tensor,
    w: Tensor,
    temperature: Tensor | None,
    mask: Tensor | None,
    energy: Tensor | None,
    assigned: Tensor | None,
    mass: Tensor | None,
    rate: Tensor | None,
    bounds: Tensor | None,
    membership: Tensor,
    score: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w, temperature, offset and the first sums."""
    own = {"temperature": temperature, "mask": mask, "rate": rate, "membership": membership, "score": score}
    own |= {"given": given, "given_membership": given_membership}
    own |= {"given_energy": given_energy, "given_assigned": given_assigned, "given_mass": given_mass}
    check_call(w, bounds, **own, energy=energy, assigned=assigned, mass=mass)
    start, end = _sums(energy, assigned, mass), Sums(given_energy, given_assigned, given_mass)
    problem = Problem(w, temperature, None, mask, start, rate, bounds, causal=True)
    back = kernels(impl, causal=True).backward
    dw, dtemperature, doffset, first = back(problem, membership, score, given, given_membership, end)
    return dw, dtemperature, doffset, *first


def solve(problem: Problem, impl: str) -> Solution:
    """Run a kernel.

    Args:
        problem: a call that has been checked: kernels look at no shape.
        impl: "cpu" or "triton".

    Returns:
        Its solution.

    Raises:
        InputError: if forward-mode derivatives are asked for, which operators of torch.library drop.
    """
    w, temperature, offset, mask, start, rate, bounds, is_causal = problem
    inputs = (w, temperature, offset, *(start or ()))
    given = [x for x in inputs if x is not None]
    hidden = False  # whether it cannot be seen that a gradient is wanted
    if not torch.compiler.is_compiling():
        hidden = in_function_transform()
        _check_no_tangent(given, impl)
    keep = torch.is_grad_enabled() and (hidden or any(x.requires_grad for x in given))
    if not (keep or hidden) and _nobody_watches([*given, mask, rate, bounds]):
        output, membership, _, last = kernels(impl, is_causal).forward(problem, keep)
        return Solution(output, membership, last if is_causal else None)
    if not is_causal:
        output, membership, *_ = bidirectional(w, temperature, mask, bounds, impl, keep)
        return Solution(output, membership, None)
    energy, assigned, mass = start or (None, None, None)
    output, membership, _, *end = causal(
        w, temperature, offset, mask, energy, assigned, mass, rate, bounds, impl, keep
    )
    return Solution(output, membership, Sums(*end))


def _nobody_watches(given: list[Tensor | None]) -> bool:
    """Whether no mode, tracer, profiler or kind of tensor wants to see an operator.

    Then the kernel is called without one: that takes half the time of a call on one token. Numbers that are
    still to be negated or made zeros are so by the dispatcher only.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if in_dispatch_mode() or is_profiled():
        return False
    there = [x for x in given if x is not None]
    return all(type(x) in (Tensor, Parameter) and not (x.is_neg() or is_zero_tensor(x)) for x in there)


def _check_no_tangent(given: list[Tensor], impl: str) -> None:
    if not in_forward_derivative() or all(forward_ad.unpack_dual(x).tangent is None for x in given):
        return
    raise InputError(
        f"forward-mode derivatives with impl={impl!r}",
        expected="derivatives by .backward() or torch.autograd.grad",
        got="a tensor with a tangent",
        fix='Pass impl="reference".',
    )


def _sums(energy: Tensor | None, assigned: Tensor | None, mass: Tensor | None) -> Sums | None:
    """The sums before the first token: all of them, or none, which is zeros."""
    if energy is None and assigned is None and mass is None:
        return None
    if energy is None or assigned is None or mass is None:
        wanted, fix = "the sums of one state", "Pass all three, or None for all."
        raise InputError("energy, assigned, mass", expected=wanted, got="None for some", fix=fix)
    return Sums(energy, assigned, mass)


def _like(w: Tensor, *shape: Any) -> Tensor:
    # sizes are symbols while a graph is traced
    return w.new_empty(shape, dtype=exact(w.dtype))


@bidirectional.register_fake
def _(w, temperature, mask, bounds, impl, keep):  # type: ignore[no-untyped-def]
    return _shapes(w, bounds, keep)


@causal.register_fake
def _(w, temperature, offset, mask, energy, assigned, mass, rate, bounds, impl, keep):  # type: ignore[no-untyped-def]
    return _shapes(w, bounds, keep)


def _shapes(w: Tensor, bounds: Tensor | None, keep: bool) -> tuple[Tensor, ...]:
    batch, tokens, heads, width = w.shape
    sequences = batch if bounds is None else bounds.shape[0] - 1
    per_token, per_channel = (batch, tokens, heads), (sequences, heads, width)
    sums = (_like(w, *per_channel), _like(w, *per_channel), _like(w, sequences, heads))
    output = torch.empty_like(w, memory_format=torch.contiguous_format)
    return output, _like(w, *per_token), _like(w, *per_token) if keep else _like(w, 0), *sums


@bidirectional_backward.register_fake
def _(given, given_membership, w, temperature, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(w, memory_format=torch.contiguous_format), _like(w, w.shape[2])


@causal_backward.register_fake
def _(given, given_membership, given_energy, given_assigned, given_mass, w, *rest):  # type: ignore[no-untyped-def]
    sums = (
        torch.empty_like(part, memory_format=torch.contiguous_format)
        for part in (given_energy, given_assigned, given_mass)
    )
    per_token = _like(w, *w.shape[:3])
    return torch.empty_like(w, memory_format=torch.contiguous_format), _like(w, w.shape[2]), per_token, *sums


def _keep_bidirectional(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, temperature, mask, bounds, ctx.impl, _ = inputs
    ctx.save_for_backward(w, temperature, mask, bounds, *output[1:])


def _bidirectional_backward(ctx: Any, given: Tensor, given_membership: Tensor, *_: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # under checkpointing they can be asked for once
    dw, slope = bidirectional_backward(given, given_membership, *saved, impl=ctx.impl)
    return dw, None if saved[1] is None else slope, *[None] * 4


def _keep_causal(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, temperature, offset, mask, energy, assigned, mass, rate, bounds, ctx.impl, _ = inputs
    ctx.offset, ctx.started = offset is not None, energy is not None
    ctx.save_for_backward(w, temperature, mask, energy, assigned, mass, rate, bounds, *output[1:3])


def _causal_backward(
    ctx: Any, given: Tensor, given_membership: Tensor, _: Tensor, *given_end: Tensor
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dw, slope, offset, *first = causal_backward(given, given_membership, *given_end, *saved, impl=ctx.impl)
    slopes = (None if saved[1] is None else slope, offset if ctx.offset else None)
    starts = first if ctx.started else [None] * 3
    return dw, *slopes, None, *starts, *[None] * 4


bidirectional.register_autograd(_bidirectional_backward, setup_context=_keep_bidirectional)
causal.register_autograd(_causal_backward, setup_context=_keep_causal)
