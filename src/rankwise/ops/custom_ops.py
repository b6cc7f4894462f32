"""TSSA kernels as custom torch operators with gradients; `torch.compile` treats an operator as one node."""

from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rankwise.errors import InputError
from rankwise.ops.arguments import Call, Cotangents, Gradients, Saved, Sums, check_shapes, sum_dtype


@runtime_checkable
class Kernels(Protocol):
    """Interface of the modules `cpu_causal`, `cpu_bidirectional`, `triton_causal`, `triton_bidirectional`."""

    def forward(self, call: Call, keep_scores: bool) -> tuple[Float[Tensor, "B T H K"], Saved]:
        """Return the output and the tensors for `backward`, with scores only if ``keep_scores``."""

    def backward(self, call: Call, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Return the gradients of w, temperature, offset and the sums before the first token."""


@cache
def kernels(impl: str, causal: bool) -> Kernels:
    """Import and return the module of an implementation, such as `cpu_causal` for ("cpu", True)."""
    return cast(Kernels, import_module(f"rankwise.ops.{impl}_{'causal' if causal else 'bidirectional'}"))


def flat(call: Call) -> tuple[Any, ...]:
    """Return the fields of a call as a flat tuple, because custom operators do not accept named tuples."""
    start = call.start or (None, None, None)
    return *call[:4], *start, call.rate, call.bounds, call.causal


@torch.library.custom_op("rankwise::tssa", mutates_args=())
def tssa(
    w: Tensor,
    temperature: Tensor | None,
    offset: Tensor | None,
    mask: Tensor | None,
    energy: Tensor | None,
    assigned: Tensor | None,
    mass: Tensor | None,
    rate: Tensor | None,
    bounds: Tensor | None,
    causal: bool,
    impl: str,
    keep_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run a forward pass; return output, memberships, scores (empty unless ``keep_scores``) and sums."""
    parts = {"temperature": temperature, "offset": offset, "mask": mask, "rate": rate}
    check_shapes(w, bounds, **parts, energy=energy, assigned=assigned, mass=mass)
    start = _start(energy, assigned, mass)
    call = Call(w, temperature, offset, mask, start, rate, bounds, causal)
    output, saved = kernels(impl, causal).forward(call, keep_scores)
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
    temperature: Tensor | None,
    mask: Tensor | None,
    energy: Tensor | None,
    assigned: Tensor | None,
    mass: Tensor | None,
    rate: Tensor | None,
    bounds: Tensor | None,
    membership: Tensor,
    score: Tensor,
    end_energy: Tensor,
    end_assigned: Tensor,
    end_mass: Tensor,
    causal: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of w, temperature, offset and initial sums; the last four are empty if not causal."""
    parts = {"temperature": temperature, "mask": mask, "rate": rate, "membership": membership}
    parts |= {"score": score, "energy": energy, "assigned": assigned, "mass": mass}
    parts |= {"end_energy": end_energy, "end_assigned": end_assigned, "end_mass": end_mass}
    parts |= {"d_output": d_output, "d_membership": d_membership}
    check_shapes(w, bounds, **parts, d_energy=d_energy, d_assigned=d_assigned, d_mass=d_mass)
    start = _start(energy, assigned, mass)
    call = Call(w, temperature, None, mask, start, rate, bounds, causal)
    saved = Saved(membership, score, Sums(end_energy, end_assigned, end_mass))
    cotangents = Cotangents(d_output, d_membership, Sums(d_energy, d_assigned, d_mass))
    call, saved = without_unread(call, saved, cotangents)
    dw, d_temperature, d_offset, d_start = kernels(impl, causal).backward(call, saved, cotangents)
    return dw, d_temperature, d_offset, *d_start


def without_unread(call: Call, saved: Saved, cotangents: Cotangents) -> tuple[Call, Saved]:
    """Mask tokens that do not affect the loss, so that their NaN does not reach other gradients as 0 · NaN.

    A cotangent is the gradient of the loss with respect to an output. In a causal call, the tokens after the
    last nonzero cotangent are masked, unless the final sums have a cotangent. A bidirectional sequence is
    masked only if all its cotangents are 0. Without NaN, masking changes no gradient, so a CPU skips it if
    all scores are finite. A GPU always masks, because checking the scores would wait for the GPU.
    """
    # One NaN makes the sum NaN, and testing only the sum is 20 times as fast as testing each score.
    if call.w.device.type == "cpu" and bool(saved.score.sum().isfinite()):
        return call, saved
    bounds, sequence = call.sequence_of_tokens()
    read = (cotangents.output != 0).flatten(2).any(-1) | (cotangents.membership != 0).any(-1)
    upto = torch.nn.functional.pad(read.flatten().cumsum(0), (1, 0))
    end_read = torch.stack([(part != 0).flatten(1).any(1) for part in cotangents.sums]).any(0)
    first = torch.arange(len(sequence), device=bounds.device) if call.causal else bounds[sequence]
    kept = ((upto[bounds[sequence + 1]] > upto[first]) | end_read[sequence]).view(read.shape)
    used = (upto[bounds].diff() > 0) | end_read
    sums = Sums(*(part.masked_fill(~used.view(-1, *[1] * (part.ndim - 1)), 0.0) for part in saved.sums))
    membership, score = (part.masked_fill(~kept[..., None], 0.0) for part in saved[:2])
    return call._replace(mask=kept if call.mask is None else kept & call.mask), Saved(membership, score, sums)


def _start(energy: Tensor | None, assigned: Tensor | None, mass: Tensor | None) -> Sums | None:
    """Return the sums before the first token, or None (zeros) if all are None; raise if only some are."""
    given = [part for part in (energy, assigned, mass) if part is not None]
    if len(given) in (1, 2):
        expected, fix = "the sums of one state", "Pass all three, or None for all."
        raise InputError("energy, assigned, mass", expected=expected, got="None for some", fix=fix)
    return Sums(*given) if given else None


def _empty(w: Tensor, *shape: Any) -> Tensor:
    return w.new_empty(shape, dtype=sum_dtype(w.dtype))  # sizes are symbols while torch traces


def _empty_sums(w: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    sequences, (heads, width) = w.shape[0] if bounds is None else bounds.shape[0] - 1, w.shape[2:]
    energy = _empty(w, sequences, heads, width)
    return energy, torch.empty_like(energy), _empty(w, sequences, heads)


@tssa.register_fake
def _(w, temperature, offset, mask, energy, assigned, mass, rate, bounds, causal, impl, keep_scores):  # type: ignore[no-untyped-def]
    output, per_token = torch.empty_like(w, memory_format=torch.contiguous_format), w.shape[:3]
    score = _empty(w, *per_token) if keep_scores else _empty(w, 0)
    return output, _empty(w, *per_token), score, *_empty_sums(w, bounds)


@tssa_backward.register_fake
def _(d_output, d_membership, d_energy, d_assigned, d_mass, w, *rest):  # type: ignore[no-untyped-def]
    bounds, causal = rest[6], rest[-2]
    dw, d_temperature = torch.empty_like(w, memory_format=torch.contiguous_format), _empty(w, w.shape[2])
    if not causal:
        return dw, d_temperature, *(_empty(w, 0) for _ in range(4))
    return dw, d_temperature, _empty(w, *w.shape[:3]), *_empty_sums(w, bounds)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, temperature, offset, mask, *state, ctx.causal, ctx.impl, _ = inputs
    ctx.given = temperature is not None, offset is not None, state[0] is not None
    ctx.save_for_backward(w, temperature, mask, *state, *output[1:])


def _backward(
    ctx: Any, d_output: Tensor, d_membership: Tensor, _: Tensor, *d_sums: Tensor
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once, because activation checkpointing allows only one access
    found = tssa_backward(d_output, d_membership, *d_sums, *saved, ctx.causal, ctx.impl)
    dw, d_temperature, d_offset, *d_start = found
    tempered, biased, started = ctx.given
    slopes = d_temperature if tempered else None, d_offset if biased else None
    return dw, *slopes, None, *(d_start if started else [None] * 3), *[None] * 5


def _no_second_derivative(ctx: Any, *_: Tensor) -> None:
    subject, expected = "second derivatives of TSSA's kernels", "first derivatives"
    raise InputError(subject, expected=expected, got="create_graph=True", fix='Pass impl="reference".')


tssa.register_autograd(_backward, setup_context=_save)
tssa_backward.register_autograd(_no_second_derivative)
