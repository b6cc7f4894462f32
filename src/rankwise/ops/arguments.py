"""Checks of the arguments of `tssa`, and their conversion to a `Call`, the input of all implementations."""

import os
import sys
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from rankwise._internals.torch_private import values_known
from rankwise.errors import InputError, ShapeError, instance_of, one_of
from rankwise.ops.decay import decay_rates

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32)
MEMBERSHIPS = ("softmax", "uniform")
SUMS = ("energy", "assigned", "mass")
AXES = {
    "w": "BTHK",
    "temperature": "H",
    "bias": "HP",
    "mask": "BT",
    "half_life": "H",
    "offset": "BTH",
    "rate": "H",
    "membership": "BTH",
    "score": "BTH",
    "d_output": "BTHK",
    "d_membership": "BTH",
    "seen": "N",
}
"""Axes of each argument: B rows, T tokens, H heads, K channels per head, N sequences, P positions."""
for _prefix in ("", "end_", "d_"):
    AXES |= {_prefix + "energy": "NHK", _prefix + "assigned": "NHK", _prefix + "mass": "NH"}
DTYPES = {"w": FLOATS, "mask": (torch.bool,), "seen": INTEGERS} | dict.fromkeys(SUMS, FLOATS)
"""Accepted dtypes of an argument, by name; an argument without an entry may have any real dtype."""
FIXES = {
    "w": "Split the last axis into heads: w.unflatten(-1, (H, -1)); one row is w[None].",
    "temperature": "Flatten a released (H, 1) parameter.",
    "bias": "Pass one row per head and one column per position.",
    "mask": "True marks real tokens; mask.bool() converts.",
    "half_life": "Make it with half_lives(heads).",
    "cu_seqlens": "Pack sequences of lengths n as torch.tensor([0, *n]).cumsum(0), in one row.",
} | {
    f"state.{name}": "Pass the state that a call on the same sequences returned." for name in (*SUMS, "seen")
}
ONE_THREAD_BELOW = 1 << 15
"""Number of tensor entries below which torch runs an elementwise operation on one thread."""
_PROCESS = os.getpid()


class Sums(NamedTuple):
    """Sums over tokens per sequence and head: energy Σ w², assigned Σ Π w² and mass Σ Π (Π: memberships)."""

    energy: Float[Tensor, "N H K"]
    assigned: Float[Tensor, "N H K"]
    mass: Float[Tensor, "N H"]


class Call(NamedTuple):
    """Checked arguments of `tssa`; temperature, offset and start are converted to the dtype of the sums.

    Attributes:
        w: projections of tokens to the heads, in the dtype that the caller passed.
        temperature: temperature per head; None for uniform memberships.
        offset: number added to each score: K times the learned bias at the token's position.
        mask: True for real tokens.
        start: sums before the first token of a causal call; None if they are zero.
        rate: factor λ by which the sums decay at each token; None for λ = 1.
        bounds: boundaries of sequences that are packed in one row; None if each row is one sequence.
        causal: True if a token reads only itself and earlier tokens.
    """

    w: Float[Tensor, "B T H K"]
    temperature: Float[Tensor, " H"] | None
    offset: Float[Tensor, "B T H"] | None
    mask: Bool[Tensor, "B T"] | None
    start: Sums | None
    rate: Float64[Tensor, " H"] | None
    bounds: Int64[Tensor, " N1"] | None
    causal: bool

    @property
    def sequences(self) -> int:
        """Number of sequences N: the rows of w, or the sequences that are packed in one row."""
        return self.w.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    def initial_sums(self) -> Sums:
        """Return ``start``, or sums of zeros if ``start`` is None."""
        if self.start is not None:
            return self.start
        heads, width = self.w.shape[2:]
        energy = self.w.new_zeros((self.sequences, heads, width), dtype=sum_dtype(self.w.dtype))
        return Sums(energy, energy.clone(), energy.new_zeros((self.sequences, heads)))

    def sequence_of_tokens(self) -> tuple[Int64[Tensor, " N1"], Int64[Tensor, " M"]]:
        """Return the sequence boundaries in a list of all M tokens, and the sequence index of each token."""
        batch, tokens = self.w.shape[:2]
        index, bounds = torch.arange(batch * tokens, device=self.w.device), self.bounds
        if bounds is None:
            bounds = torch.arange(0, batch * tokens + 1, tokens, device=index.device)
        return bounds, torch.searchsorted(bounds, index, right=True) - 1


class Solution(NamedTuple):
    """Result of a `tssa` call: output, memberships and, if causal, the sums after the last token."""

    output: Float[Tensor, "B T H K"]
    membership: Float[Tensor, "B T H"]
    end: Sums | None


class Saved(NamedTuple):
    """Memberships, scores and sums after the last token, which a forward pass saves for the backward pass."""

    membership: Float[Tensor, "B T H"]
    score: Float[Tensor, "B T H"]
    """Scores; if no gradient is needed, memberships, which have overwritten the scores."""
    sums: Sums


class Cotangents(NamedTuple):
    """Gradients of the loss with respect to the outputs of a `tssa` call: the input of the backward pass."""

    output: Float[Tensor, "B T H K"]
    membership: Float[Tensor, "B T H"]
    sums: Sums


class Gradients(NamedTuple):
    """Gradients of the loss with respect to inputs of `tssa`; offset and start are empty if not causal."""

    w: Float[Tensor, "B T H K"]
    temperature: Float[Tensor, " H"]
    offset: Tensor
    start: Sums


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums: float64 if w is float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype; a call of `Tensor.to`, which can take 40 µs, is avoided if possible."""
    return x if x.dtype == dtype else x.to(dtype)


def make_call(
    w: Tensor,
    temperature: Tensor | None,
    causal: bool,
    bias: Tensor | None,
    mask: Tensor | None,
    state: tuple[Tensor, ...] | None,
    membership: str,
    half_life: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Call, Int[Tensor, " N"] | None]:
    """Check the arguments of `tssa`, and return them as a call; raise as `tssa` does.

    For a causal call, also return the number of real tokens per sequence, including earlier calls.
    """
    parts = {"temperature": temperature, "bias": bias, "mask": mask, "half_life": half_life}
    if state is not None:
        parts |= {f"state.{name}": part for name, part in zip((*SUMS, "seen"), state, strict=True)}
    _check_tensor("w", w, w)
    for name, part in [*parts.items(), ("cu_seqlens", cu_seqlens)]:
        if part is not None:
            _check_tensor(name, part, w)
    check_shapes(w, cu_seqlens, **parts)
    _check_process(w)
    _check_options(causal, temperature, bias, state, membership, half_life)

    dtype = sum_dtype(w.dtype)
    tau = None if membership == "uniform" or temperature is None else as_dtype(temperature, dtype)
    bounds = None if cu_seqlens is None else cu_seqlens.to(w.device, torch.int64)
    call = Call(w, tau, None, mask, None, None, bounds, causal)
    if not causal:
        return call, None
    start = None if state is None else Sums(*(as_dtype(part, dtype) for part in state[:3]))
    before = None if state is None else state[3]
    offset = None if bias is None else _offset(bias.to(dtype), call, before)
    rate = None if half_life is None else decay_rates(half_life, w.device)
    lengths = _lengths(call)
    return call._replace(
        offset=offset, start=start, rate=rate
    ), lengths if before is None else lengths + before


def check_shapes(w: Tensor, bounds: Tensor | None, **parts: Tensor | None) -> None:
    """Raise ShapeError if a tensor does not have the axes that `AXES` lists under its name.

    Custom operators check again: compiled graphs call them directly, and kernels do not check array bounds.
    """
    if w.ndim != 4:
        raise ShapeError("w", expected="(B, T, H, K)", got=f"{tuple(w.shape)}", fix=FIXES["w"])
    if min(w.shape) < 1:
        expected, fix = "at least one row, token, head and channel", "Leave out empty calls."
        raise ShapeError("w", expected=expected, got=f"{tuple(w.shape)}", fix=fix)
    batch, tokens, heads, width = w.shape
    sequences = batch
    if bounds is not None:
        if batch != 1 or bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype not in INTEGERS:
            expected = "(N + 1,) integers and a w with one packed row"
            got = f"{tuple(bounds.shape)}, {bounds.dtype}, and {batch} rows"
            raise ShapeError("cu_seqlens", expected=expected, got=got, fix=FIXES["cu_seqlens"])
        if values_known(bounds):
            check_boundaries(bounds.tolist(), tokens)
        sequences = len(bounds) - 1
    shapes = {"H": (heads,), "BT": w.shape[:2], "BTH": w.shape[:3], "BTHK": w.shape}
    shapes |= {"N": (sequences,), "NH": (sequences, heads), "NHK": (sequences, heads, width)}
    for name, part in parts.items():
        if part is None:
            continue
        wanted = shapes.get(AXES[name.removeprefix("state.")])  # None for the bias, whose length may vary
        if part.shape != wanted if wanted else part.ndim != 2 or part.shape[0] != heads:
            expected = f"{tuple(wanted)}" if wanted else f"({heads}, P)"
            fix = FIXES.get(name, "Call rankwise.ops.tssa, which prepares the tensors of an operator.")
            raise ShapeError(name, expected=expected, got=f"{tuple(part.shape)}", fix=fix)


def check_boundaries(ends: list[int], tokens: int) -> None:
    """Raise ShapeError unless boundaries start at 0, never decrease, and end at the number of tokens."""
    if ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        got = f"{ends[:8]}{'…' * (len(ends) > 8)}"
        raise ShapeError(
            "cu_seqlens", expected=f"rising from 0 to {tokens}", got=got, fix=FIXES["cu_seqlens"]
        )


def _check_tensor(name: str, value: Tensor, w: Tensor) -> None:
    """Raise if an argument is not a dense tensor, has a wrong dtype, or is on another device than w."""
    instance_of(name, value, Tensor, "a tensor", fix=f"Pass torch.as_tensor({name}).")
    if value.layout != torch.strided:
        fix = f"Pass {name}.to_dense()."
        raise InputError(name, expected="a dense tensor", got=str(value.layout), fix=fix)
    known = DTYPES.get(name.removeprefix("state."))
    if value.is_complex() if known is None else value.dtype not in known:
        expected = "real numbers" if known is None else " or ".join(map(str, known))
        fix = f"Pass {name}.real." if known is None else FIXES[name] if name == "mask" else "Convert it."
        raise ShapeError(name, expected=expected, got=str(value.dtype), fix=fix)
    if name not in ("half_life", "cu_seqlens") and value.device != w.device:  # `make_call` moves both
        fix, expected = f"Move it: {name}.to(w.device).", f"a tensor on {w.device}, like w"
        raise InputError(name, expected=expected, got=f"a tensor on {value.device}", fix=fix)


def _check_process(w: Tensor) -> None:
    """Raise InputError if this process is a fork in which torch would wait for threads that do not exist."""
    if torch.compiler.is_compiling() or sys.platform != "linux" or os.getpid() == _PROCESS:
        return
    if w.device.type == "cpu" and w.numel() >= ONE_THREAD_BELOW and torch.get_num_threads() > 1:
        raise InputError(
            "a forked process",
            expected="torch.get_num_threads() = 1, because a fork has none of torch's threads",
            got=f"{torch.get_num_threads()}",
            fix="Call torch.set_num_threads(1) in it first, as DataLoader does, or start it by spawn.",
        )


def _check_options(
    causal: bool,
    temperature: Tensor | None,
    bias: Tensor | None,
    state: tuple[Tensor, ...] | None,
    membership: str,
    half_life: Tensor | None,
) -> None:
    """Raise InputError if an option is missing, would be ignored or has an invalid value."""
    one_of("membership", membership, MEMBERSHIPS)
    if membership == "softmax" and temperature is None:
        fix = "Pass torch.ones(H), or membership='uniform', which needs no temperature."
        raise InputError("temperature", expected="a tensor (H,)", got="None", fix=fix)
    options = {"bias": bias, "state": state, "half_life": half_life}
    given = [name for name, value in options.items() if value is not None]
    if not causal and given:
        subject, got = f"{' and '.join(given)} with causal=False", "the bidirectional operation"
        raise InputError(subject, expected="causal=True", got=got, fix="Pass causal=True or leave it out.")
    if membership == "uniform" and bias is not None:
        got = "memberships of 1/H, which do not depend on scores"
        subject, expected = "bias with membership='uniform'", "membership='softmax'"
        raise InputError(subject, expected=expected, got=got, fix="Leave the bias out.")
    if half_life is not None and half_life.requires_grad:
        fix = "Half-lives are not learned: pass half_life.detach() or a buffer."
        got = "a tensor that requires a gradient"
        raise InputError("half_life", expected="constants", got=got, fix=fix)
    if half_life is not None and values_known(half_life) and not bool((half_life > 0).all()):
        got, fix = f"{half_life.min().item():g}", "Pass infinity for a head without decay."
        raise InputError("half_life", expected="numbers above 0", got=got, fix=fix)
    seen = None if state is None else state[3]
    # On a GPU, this check would wait for the GPU.
    if seen is not None and seen.device.type == "cpu" and values_known(seen) and int(seen.min()) < 0:
        fix = "It counts real tokens; TSSAState.zeros starts at 0."
        raise InputError("state.seen", expected="numbers from 0 on", got=f"{int(seen.min())}", fix=fix)


def _lengths(call: Call) -> Int[Tensor, " N"]:
    """Return the number of real tokens of each sequence."""
    mask, bounds, (batch, tokens) = call.mask, call.bounds, call.w.shape[:2]
    if bounds is None:
        return torch.full((batch,), tokens, device=call.w.device) if mask is None else mask.sum(1)
    if mask is None:
        return bounds.diff()
    return torch.nn.functional.pad(mask.flatten().cumsum(0), (1, 0))[bounds].diff()


def _positions(call: Call, before: Int[Tensor, " N"] | None) -> Int[Tensor, "B T"]:
    """Return each token's index among the real tokens of its sequence; values at padding are not used."""
    mask, (bounds, sequence) = call.mask, call.sequence_of_tokens()
    real = torch.ones_like(sequence) if mask is None else mask.flatten().long()
    upto = torch.nn.functional.pad(real.cumsum(0), (1, 0))
    within = (upto[1:] - upto[bounds[sequence]] - 1).clamp(min=0)
    return (within if before is None else within + before[sequence]).view(call.w.shape[:2])


def _offset(
    bias: Float[Tensor, "H P"], call: Call, before: Int[Tensor, " N"] | None
) -> Float[Tensor, "B T H"]:
    """Return K · bias[h, position] per token: a score is a sum over K channels, each of which adds the bias.

    If values are not known, as in a compiled graph, a bias that is too short fails when it is indexed.
    """
    batch, tokens, _, width = call.w.shape
    if call.mask is None and before is None and call.bounds is None:
        _check_positions(bias.shape[1], tokens - 1)
        return (width * bias[:, :tokens].t()).expand(batch, tokens, -1)
    position = _positions(call, before)
    if call.mask is not None:
        position = position.masked_fill(~call.mask, 0)
    if values_known(position):
        _check_positions(bias.shape[1], int(position.max()))
    return width * bias.t()[position]


def _check_positions(positions: int, farthest: int) -> None:
    """Raise ShapeError if the learned bias has no position for the last token."""
    if farthest >= positions:
        expected = f"at least {farthest + 1} positions, because the last token is at position {farthest}"
        fix = "A learned bias limits the length; half-lives (half_life=) do not."
        raise ShapeError("bias", expected=expected, got=f"{positions}", fix=fix)
