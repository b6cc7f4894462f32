"""Checks of the arguments of `tssa`, and their conversion to a `Call`, the input of all implementations."""

import os
import sys
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rankwise._internals.linalg import float64_device
from rankwise._internals.torch_private import values_known
from rankwise.errors import InputError, ShapeError, instance_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32)
SUMS = ("energy", "assigned", "mass")
AXES = {
    "temperature": "H",
    "bias": "HP",
    "mask": "BT",
    "half_life": "H",
    "energy": "BHK",
    "assigned": "BHK",
    "mass": "BH",
    "seen": "B",
}
"""Axes of each argument: B rows, T tokens, H heads, K channels per head, P positions (any number)."""
DTYPES = {"w": FLOATS, "mask": (torch.bool,), "seen": INTEGERS} | dict.fromkeys(SUMS, FLOATS)
"""Accepted dtypes of an argument, by name; an argument without an entry may have any real dtype."""
FIXES = {
    "w": "Split the last axis into heads: w.unflatten(-1, (H, -1)); one row is w[None].",
    "temperature": "Flatten a released (H, 1) parameter.",
    "bias": "Pass one row per head and one column per position.",
    "mask": "True marks real tokens; mask.bool() converts.",
    "half_life": "Make it with half_lives(heads).",
} | {f"state.{name}": "Pass the state that a call on the same rows returned." for name in (*SUMS, "seen")}
ONE_THREAD_BELOW = 1 << 15
"""Number of tensor entries below which torch runs an elementwise operation on one thread."""
_PROCESS = os.getpid()


class Sums(NamedTuple):
    """Sums over tokens, with projections w and memberships Π: energy Σ w², assigned Σ Π w² and mass Σ Π."""

    energy: Float[Tensor, "B H K"]
    assigned: Float[Tensor, "B H K"]
    mass: Float[Tensor, "B H"]


class Call(NamedTuple):
    """Checked arguments of `tssa`; temperature, offset and start are converted to the dtype of the sums.

    Attributes:
        w: projections of tokens to the heads, in the dtype that the caller passed.
        temperature: temperature per head.
        offset: number added to each score: K times the learned bias at the token's position.
        mask: True for real tokens.
        start: sums before the first token of a causal call; None if these sums are zero.
        rate: factor λ by which the sums decay at each token; None for λ = 1.
        causal: True if a token reads only itself and earlier tokens.
    """

    w: Float[Tensor, "B T H K"]
    temperature: Float[Tensor, " H"]
    offset: Float[Tensor, "B T H"] | None
    mask: Bool[Tensor, "B T"] | None
    start: Sums | None
    rate: Float64[Tensor, " H"] | None
    causal: bool

    def initial_sums(self) -> Sums:
        """Return ``start``, or sums of zeros if ``start`` is None."""
        if self.start is not None:
            return self.start
        batch, _, heads, width = self.w.shape
        energy = self.w.new_zeros((batch, heads, width), dtype=sum_dtype(self.w.dtype))
        return Sums(energy, energy.clone(), energy.new_zeros((batch, heads)))


class Outputs(NamedTuple):
    """Result of a `tssa` call: output, memberships and, if causal, the sums after the last token."""

    output: Float[Tensor, "B T H K"]
    membership: Float[Tensor, "B T H"]
    end: Sums | None


class Saved(NamedTuple):
    """Memberships, scores and sums after the last token, which a forward pass saves for the backward pass."""

    membership: Float[Tensor, "B T H"]
    score: Float[Tensor, "B T H"]
    """Scores. If no gradient is needed, memberships have overwritten the scores in memory."""
    sums: Sums


class Cotangents(NamedTuple):
    """Gradients of the loss with respect to the outputs of a `tssa` call: the input of the backward pass."""

    output: Float[Tensor, "B T H K"]
    membership: Float[Tensor, "B T H"]
    sums: Sums


class Gradients(NamedTuple):
    """Gradients of the loss with respect to inputs of `tssa`; if not causal, offset and start are empty."""

    w: Float[Tensor, "B T H K"]
    temperature: Float[Tensor, " H"]
    offset: Tensor
    start: Sums


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums: float64 if w is float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype; return x itself if it has the dtype, because `Tensor.to` can take 40 µs."""
    return x if x.dtype == dtype else x.to(dtype)


def make_call(
    w: Tensor,
    temperature: Tensor,
    causal: bool,
    bias: Tensor | None,
    mask: Tensor | None,
    state: tuple[Tensor, ...] | None,
    half_life: Tensor | None,
) -> tuple[Call, Int[Tensor, " B"] | None]:
    """Check the arguments of `tssa`, and return a `Call`; raise the errors that `tssa` documents.

    The second result is the number of real tokens per row, including earlier calls. For a bidirectional
    call, it is None.
    """
    tensors = {"bias": bias, "mask": mask, "half_life": half_life}
    if state is not None:
        tensors |= {f"state.{name}": x for name, x in zip((*SUMS, "seen"), state, strict=True)}
    given = {"temperature": temperature} | {name: x for name, x in tensors.items() if x is not None}
    _check_tensor("w", w, w)
    for name, value in given.items():
        _check_tensor(name, value, w)
    _check_shapes(w, given)
    _check_process(w)
    _check_options(causal, bias, state, half_life)

    dtype = sum_dtype(w.dtype)
    call = Call(w, as_dtype(temperature, dtype), None, mask, None, None, causal)
    if not causal:
        return call, None
    lengths = torch.full((len(w),), w.shape[1], device=w.device) if mask is None else mask.sum(1)
    rate = None if half_life is None else decay_rates(half_life, w.device)
    if state is None:
        start, seen = None, lengths
    else:
        start, seen = Sums(*(as_dtype(x, dtype) for x in state[:3])), lengths + state[3]
    offset = None if bias is None else _offset(bias.to(dtype), call, None if state is None else state[3])
    return call._replace(offset=offset, start=start, rate=rate), seen


def decay_rates(half_life: Float[Tensor, " H"], device: torch.device) -> Float64[Tensor, " H"]:
    """Return λ = 2^(−1/h) for half-life h: the factor by which sums decay per token; exactly 1 for h = ∞.

    λ is float64, because float32 would change a half-life of a million tokens by 3 %. λ is on the CPU if the
    device does not support float64.

    Examples:
        >>> import torch
        >>> decay_rates(torch.tensor([1.0, float("inf")]), torch.device("cpu")).tolist()
        [0.5, 1.0]
    """
    return torch.exp2(-1 / half_life.detach().to(float64_device(device)).double())


def _check_shapes(w: Tensor, tensors: dict[str, Tensor]) -> None:
    """Raise ShapeError if a tensor does not have the axes that `AXES` lists under its name."""
    if w.ndim != 4:
        raise ShapeError("w", expected="(B, T, H, K)", got=f"{tuple(w.shape)}", fix=FIXES["w"])
    if min(w.shape) < 1:
        expected, fix = "at least one row, token, head and channel", "Leave out empty calls."
        raise ShapeError("w", expected=expected, got=f"{tuple(w.shape)}", fix=fix)
    sizes = dict(zip("BTHK", w.shape, strict=True))
    for name, x in tensors.items():
        wanted = [sizes.get(axis, axis) for axis in AXES[name.removeprefix("state.")]]
        if x.ndim != len(wanted) or any(
            size not in (y, "P") for y, size in zip(x.shape, wanted, strict=True)
        ):
            expected = str(tuple(wanted)).replace("'", "")
            raise ShapeError(name, expected=expected, got=f"{tuple(x.shape)}", fix=FIXES[name])


def _check_tensor(name: str, value: Tensor, w: Tensor) -> None:
    """Raise if an argument is not a dense tensor, has a wrong dtype, or is on another device than w."""
    instance_of(name, value, Tensor, "a tensor", fix=f"Pass torch.as_tensor({name}).")
    if value.layout != torch.strided:
        fix = f"Pass {name}.to_dense()."
        raise InputError(name, expected="a dense tensor", got=str(value.layout), fix=fix)
    dtypes = DTYPES.get(name.removeprefix("state."))
    if value.is_complex() if dtypes is None else value.dtype not in dtypes:
        expected = "real numbers" if dtypes is None else " or ".join(map(str, dtypes))
        fix = f"Pass {name}.real." if dtypes is None else FIXES[name] if name == "mask" else "Convert it."
        raise ShapeError(name, expected=expected, got=str(value.dtype), fix=fix)
    if name != "half_life" and value.device != w.device:  # `decay_rates` moves half-lives to the device of w
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
    causal: bool, bias: Tensor | None, state: tuple[Tensor, ...] | None, half_life: Tensor | None
) -> None:
    """Raise InputError if an option would be ignored or has an invalid value."""
    options = {"bias": bias, "state": state, "half_life": half_life}
    given = [name for name, value in options.items() if value is not None]
    if not causal and given:
        subject, got = f"{' and '.join(given)} with causal=False", "the bidirectional operation"
        raise InputError(subject, expected="causal=True", got=got, fix="Pass causal=True or leave it out.")
    if half_life is not None and half_life.requires_grad:
        fix = "Half-lives are not learned: pass half_life.detach() or a buffer."
        got = "a tensor that requires a gradient"
        raise InputError("half_life", expected="constants", got=got, fix=fix)
    if half_life is not None and values_known(half_life) and not bool((half_life > 0).all()):
        got, fix = f"{half_life.min().item():g}", "Pass infinity for a head without decay."
        raise InputError("half_life", expected="numbers above 0", got=got, fix=fix)


def _offset(
    bias: Float[Tensor, "H P"], call: Call, before: Int[Tensor, " B"] | None
) -> Float[Tensor, "B T H"]:
    """Return K · bias[h, position] per token: a score is a sum over K channels, and each adds the bias.

    The position is the token's index among the real tokens of its row, plus the number of tokens ``before``
    this call. A bias that is too short raises ShapeError. In a compiled graph, where values are not known,
    indexing the bias fails instead.
    """
    batch, tokens, _, width = call.w.shape
    if call.mask is None and before is None:
        _check_positions(bias.shape[1], tokens - 1)
        return (width * bias[:, :tokens].t()).expand(batch, tokens, -1)
    if call.mask is None:
        position = torch.arange(tokens, device=bias.device).expand(batch, -1)
    else:
        position = (call.mask.cumsum(1) - 1).clamp(min=0)
    if before is not None:
        position = position + before[:, None]
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
