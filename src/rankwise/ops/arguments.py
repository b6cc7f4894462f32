"""What `tssa` refuses, said in the words of its user."""

import os
import sys
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankwise.errors import InputError, ShapeError, did_you_mean


class Sums(NamedTuple):
    """The differentiable part of a state, for N sequences.

    Attributes:
        energy: (N, H, K).
        assigned: (N, H, K).
        mass: (N, H).
    """

    energy: Tensor
    assigned: Tensor
    mass: Tensor


class Problem(NamedTuple):
    """What is to be computed; every tensor but w is in the dtype of the sums.

    Attributes:
        w: (B, T, H, K), in its own dtype.
        temperature: (H,), or None for uniform memberships.
        offset: what the bias adds to the score, (B, T, H), or None.
        mask: real tokens, (B, T), or None for all.
        start: sums before the first token of a causal call; None for zeros, and where it is bidirectional.
        rate: λ, (H,) in float64, or None for λ = 1.
        bounds: where each of the N sequences packed in one row begins, and where the last ends, (N + 1,);
            None where each row is a sequence.
        causal: which of the two operations.
    """

    w: Tensor
    temperature: Tensor | None
    offset: Tensor | None
    mask: Tensor | None
    start: Sums | None
    rate: Tensor | None
    bounds: Tensor | None
    causal: bool

    @property
    def sequences(self) -> int:
        """N."""
        return self.w.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    def first(self) -> Sums:
        """The sums before the first token."""
        if self.start is not None:
            return self.start
        heads, width = self.w.shape[2:]
        energy = self.w.new_zeros((self.sequences, heads, width), dtype=exact(self.w.dtype))
        return Sums(energy, energy.clone(), energy.new_zeros((self.sequences, heads)))


class Solution(NamedTuple):
    """Output (B,T,H,K) in the dtype of w, memberships (B,T,H), the sums after the last token if causal."""

    output: Tensor
    membership: Tensor
    end: Sums | None


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sums: float64 for a w of float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of that dtype: itself where it can be, as asking torch takes 40 µs in a cold cache."""
    return x if x.dtype == dtype else x.to(dtype)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32)
MEMBERSHIPS = ("softmax", "uniform")
AXES = {
    "temperature": "H",
    "offset": "BTH",
    "mask": "BT",
    "rate": "H",
    "energy": "NHK",
    "assigned": "NHK",
    "mass": "NH",
    "membership": "BTH",
    "score": "BTH",
    "given": "BTHK",
    "given_membership": "BTH",
    "given_energy": "NHK",
    "given_assigned": "NHK",
    "given_mass": "NH",
}
"""The axes of what an operator is given beside w (B, T, H, K), of N sequences."""
PACKING = "Pack sequences of lengths n as torch.tensor([0, *n]).cumsum(0), in one row."

ALONE = 1 << 15
"""Numbers below which torch takes no second thread."""
_PROCESS = os.getpid()


def check_tensors(
    w: Tensor, temperature: Tensor | None, bias: Tensor | None, mask: Tensor | None, half_life: Tensor | None
) -> None:
    """Things that are no tensors, shapes and dtypes that do not fit one another.

    Raises:
        InputError: naming the argument that should be a tensor.
        ShapeError: naming the argument, what it should be and what came.
    """
    _tensor("w", w)
    others = {"temperature": temperature, "bias": bias, "mask": mask, "half_life": half_life}
    for name, value in others.items():
        if value is not None:
            _tensor(name, value)
            if value.is_complex():
                _shape(name, "real numbers", str(value.dtype), f"Pass {name}.real.")
        if value is not None and name != "half_life":  # that is moved
            check_device(name, value, w)
    if w.ndim != 4:
        fix = "Split the last axis into heads: w.unflatten(-1, (H, -1)); one row is w[None]."
        _shape("w", "(B, T, H, K)", f"{tuple(w.shape)}", fix)
    batch, tokens, heads, _ = w.shape
    if w.dtype not in FLOATS:
        _shape("w", "a floating-point tensor", str(w.dtype), "Convert it: w.float().")
    if min(w.shape) < 1:
        _shape(
            "w",
            "at least one of each of batch, token, head and channel",
            f"{tuple(w.shape)}",
            "Leave out empty calls.",
        )
    if temperature is not None and temperature.shape != (heads,):
        _shape(
            "temperature",
            f"({heads},), one a head",
            f"{tuple(temperature.shape)}",
            "Flatten a released (H, 1) parameter.",
        )
    if mask is not None and (mask.shape != (batch, tokens) or mask.dtype != torch.bool):
        got = f"{tuple(mask.shape)}, {mask.dtype}"
        _shape(
            "mask", f"({batch}, {tokens}) of torch.bool", got, "True marks real tokens; mask.bool() converts."
        )
    if bias is not None and (bias.ndim != 2 or bias.shape[0] != heads):
        _shape(
            "bias", f"({heads}, positions)", f"{tuple(bias.shape)}", "One row a head, one column a position."
        )
    if half_life is not None and half_life.shape != (heads,):
        _shape(
            "half_life",
            f"({heads},), one a head",
            f"{tuple(half_life.shape)}",
            "Make one with half_lives(heads).",
        )


def check_device(name: str, value: Tensor, w: Tensor) -> None:
    """A tensor that lies elsewhere: kernels would read what is no memory of theirs.

    Raises:
        InputError: naming it, its device and that of w.
    """
    if value.device != w.device:
        fix = f"Move it: {name}.to(w.device)."
        raise InputError(
            name, expected=f"a tensor on {w.device}, as w", got=f"one on {value.device}", fix=fix
        )


def check_process(w: Tensor) -> None:
    """A forked process that counts on torch's threads, of which it has none: torch would wait for ever.

    Raises:
        InputError: if w is large enough for several threads, and torch is to use them.
    """
    if torch.compiler.is_compiling() or sys.platform != "linux" or os.getpid() == _PROCESS:
        return
    if w.device.type == "cpu" and w.numel() >= ALONE and torch.get_num_threads() > 1:
        raise InputError(
            "a forked process",
            expected="torch.get_num_threads() = 1, as the threads of torch stay behind in a fork",
            got=f"{torch.get_num_threads()}",
            fix="Call torch.set_num_threads(1) in it first, as DataLoader does, or start it by spawn.",
        )


def check_options(
    causal: bool,
    temperature: Tensor | None,
    bias: Tensor | None,
    state: tuple[Tensor, ...] | None,
    membership: str,
    half_life: Tensor | None,
) -> None:
    """Options that mean nothing together.

    Raises:
        InputError: naming the option that is missing or would otherwise be ignored.
    """
    if membership not in MEMBERSHIPS:
        fix = did_you_mean(str(membership), MEMBERSHIPS)
        raise InputError("membership", expected="softmax or uniform", got=repr(membership), fix=fix)
    if membership == "softmax" and temperature is None:
        fix = "Pass torch.ones(H), or membership='uniform', which needs none."
        raise InputError("temperature", expected="a tensor (H,), one a head", got="None", fix=fix)
    ordered = {"bias": bias, "state": state, "half_life": half_life}
    given = [name for name, value in ordered.items() if value is not None]
    if not causal and given:
        raise InputError(
            f"{' and '.join(given)} with causal=False",
            expected="causal=True",
            got="the bidirectional operation, which has no order of tokens",
            fix="Pass causal=True or leave it out.",
        )
    if membership == "uniform" and bias is not None:
        raise InputError(
            "bias with membership='uniform'",
            expected="membership='softmax'",
            got="memberships of 1/H, which no score changes",
            fix="Leave the bias out.",
        )
    if half_life is not None and half_life.requires_grad:
        raise InputError(
            "half_life",
            expected="constants",
            got="a tensor that requires a gradient",
            fix="Half-lives are not learned: pass half_life.detach() or a buffer.",
        )
    if half_life is not None and not torch.compiler.is_compiling() and not bool((half_life > 0).all()):
        got = f"{half_life.min().item():g}"
        raise InputError("half_life", expected="numbers above 0", got=got, fix="Infinity forgets nothing.")


def check_state(state: tuple[Tensor, ...], w: Tensor, sequences: int) -> None:
    """A state that is none, or one of other sequences, heads or channels, or elsewhere.

    Raises:
        InputError: if it is on another device, or has seen fewer than no tokens.
        ShapeError: if one of its parts has another shape or kind of number.
    """
    sums = (sequences, *w.shape[2:])
    shapes = {"energy": sums, "assigned": sums, "mass": sums[:2], "seen": sums[:1]}
    for part, (name, shape) in zip(state, shapes.items(), strict=True):
        _tensor(f"state.{name}", part)
        check_device(f"state.{name}", part, w)
        if part.shape != shape:
            _shape(
                f"state.{name}", f"{shape}", f"{tuple(part.shape)}", "Use the state of the same sequences."
            )
        if part.dtype not in (INTEGERS if name == "seen" else FLOATS):
            kind = "int64 or int32" if name == "seen" else "floating-point numbers"
            _shape(f"state.{name}", kind, str(part.dtype), "Use the state as a call gave it.")
    if torch.compiler.is_compiling() or state.seen.device.type != "cpu":
        return  # to read a number back, a GPU would have to finish first
    least = int(state.seen.min())
    if least < 0:
        fix = "It counts the real tokens before these; TSSAState.zeros begins."
        raise InputError("state.seen", expected="numbers from 0 on", got=f"{least}", fix=fix)


def check_packing(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    """Boundaries that are not those of one packed row; under torch.compile the operators look at them.

    Raises:
        InputError: if they are no tensor.
        ShapeError: if they do not rise from 0 to the number of tokens.
    """
    _tensor("cu_seqlens", cu_seqlens)
    if batch != 1:
        _shape("w with cu_seqlens", "one packed row, (1, T, H, K)", f"{batch} rows", PACKING)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in INTEGERS:
        got = f"{tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}"
        _shape("cu_seqlens", "(sequences + 1,) integers", got, PACKING)
    if not torch.compiler.is_compiling():
        check_ends(cu_seqlens.tolist(), tokens)


def check_ends(ends: list[int], tokens: int) -> None:
    """Boundaries that leave the tokens or turn back.

    Raises:
        ShapeError: if they do not rise from 0 to the number of tokens.
    """
    if not ends or ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        got = f"{ends[:8]}{'…' * (len(ends) > 8)}"
        _shape("cu_seqlens", f"rising from 0 to {tokens}", got, PACKING)


def check_call(w: Tensor, bounds: Tensor | None, **parts: Tensor | None) -> None:
    """What an operator is given, before kernels that check no bounds follow it.

    Graphs of torch.compile and direct calls of the operators come past no other check of the numbers.

    Args:
        w: (B, T, H, K).
        bounds: where each of the sequences packed in one row begins and the last ends; None for rows.
        parts: the other tensors, named as in `AXES`.

    Raises:
        ShapeError: if a tensor has another shape, or the bounds do not rise from 0 to T in one row.
    """
    fix = "Call rankwise.ops.tssa, which makes what the operators take."
    for name, part, axes in (("w", w, 4), ("bounds", bounds, 1)):
        if part is not None and part.ndim != axes:
            _shape(name, f"{axes} axes", f"{tuple(part.shape)}", fix)
    if bounds is not None:
        if w.shape[0] != 1 or bounds.dtype not in INTEGERS:
            got = f"{bounds.dtype} and {w.shape[0]} rows"
            _shape("bounds", "integers, for sequences packed in one row", got, fix)
        check_ends(bounds.tolist(), w.shape[1])
    sizes = dict(zip("BTHK", w.shape, strict=True), N=w.shape[0] if bounds is None else len(bounds) - 1)
    for name, given in parts.items():
        if given is not None and given.shape != (wanted := tuple(sizes[axis] for axis in AXES[name])):
            _shape(name, f"{wanted}", f"{tuple(given.shape)}", fix)


def check_positions(positions: int, farthest: int) -> None:
    """A learned bias that ends before the text does.

    Raises:
        ShapeError: saying how far it reaches.
    """
    if farthest >= positions:
        _shape(
            "bias",
            f"at least {farthest + 1} positions, since the last token stands at position {farthest}",
            f"{positions}",
            "A learned bias has a longest text; half-lives (half_life=) have none.",
        )


def _tensor(subject: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        fix = f"Pass torch.as_tensor({subject})."
        raise InputError(subject, expected="a tensor", got=type(value).__name__, fix=fix)
    if value.layout != torch.strided:
        fix = f"Pass {subject}.to_dense()."
        raise InputError(subject, expected="a dense tensor", got=str(value.layout), fix=fix)


def _shape(subject: str, wanted: str, got: str, fix: str) -> NoReturn:
    raise ShapeError(subject, expected=wanted, got=got, fix=fix)


def lengths(problem: Problem) -> Int[Tensor, " N"]:
    """How many real tokens each sequence has, int64."""
    mask, bounds, (batch, tokens) = problem.mask, problem.bounds, problem.w.shape[:2]
    if bounds is None:
        return torch.full((batch,), tokens, device=problem.w.device) if mask is None else mask.sum(1)
    if mask is None:
        return bounds.diff()
    return torch.nn.functional.pad(mask.flatten().cumsum(0), (1, 0))[bounds].diff()


def positions(problem: Problem, count: Int[Tensor, " N"] | None) -> Int[Tensor, "B T"]:
    """The position of every token among the real tokens of its sequence, from 0.

    Padding takes no position, so a padded row reads the bias as the row alone would; the number given to a
    padded token means nothing (its result is zero) and lies within the row.

    Args:
        problem: the call.
        count: tokens seen before, or None for none.

    Returns:
        Positions.
    """
    shape, mask, bounds = problem.w.shape[:2], problem.mask, problem.bounds
    index = torch.arange(shape.numel(), device=problem.w.device)
    if bounds is None:
        bounds = torch.arange(0, len(index) + 1, shape[1], device=index.device)
    sequence = torch.searchsorted(bounds, index, right=True) - 1
    ones = torch.ones_like(index) if mask is None else mask.flatten().long()
    upto = torch.nn.functional.pad(ones.cumsum(0), (1, 0))
    within = (upto[1:] - upto[bounds[sequence]] - 1).clamp(min=0)
    return (within if count is None else within + count[sequence]).view(shape)


def offsets(
    bias: Float[Tensor, "H P"], problem: Problem, count: Int[Tensor, " N"] | None
) -> Float[Tensor, "B T H"]:
    """What the learned bias adds to the score of every token: K · bias[h, position].

    Args:
        bias: learned, by head and position; it is added before the sum over the K channels.
        problem: the call.
        count: tokens seen before, or None for none.

    Returns:
        Offsets.

    Raises:
        ShapeError: if the bias ends before a real token. Under torch.compile, which looks at no number,
            indexing fails instead.
    """
    batch, tokens, _, width = problem.w.shape
    mask = problem.mask
    if mask is None and count is None and problem.bounds is None:
        check_positions(bias.shape[1], tokens - 1)
        return (width * bias[:, :tokens].t()).expand(batch, tokens, -1)
    position = positions(problem, count)
    if mask is not None:
        position = position.masked_fill(~mask, 0)
    if not torch.compiler.is_compiling():
        check_positions(bias.shape[1], int(position.max()))
    return width * bias.t()[position]
