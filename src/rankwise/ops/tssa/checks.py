"""What `tssa` refuses, said in the words of its user."""

from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from rankwise.errors import InputError, ShapeError, did_you_mean
from rankwise.ops.tssa.state import TSSAState

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MEMBERSHIPS = ("softmax", "uniform")


def check_tensors(
    w: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, half_life: Tensor | None
) -> None:
    """Shapes and dtypes that do not fit one another.

    Raises:
        ShapeError: naming the argument, what it should be and what came.
    """
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
    if temperature.shape != (heads,):
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


def check_options(
    causal: bool, bias: Tensor | None, state: TSSAState | None, membership: str, half_life: Tensor | None
) -> None:
    """Options that mean nothing together.

    Raises:
        InputError: naming the option that would otherwise be ignored.
    """
    if membership not in MEMBERSHIPS:
        fix = did_you_mean(str(membership), MEMBERSHIPS)
        raise InputError("membership", wanted="softmax or uniform", got=repr(membership), fix=fix)
    ordered = {"bias": bias, "state": state, "half_life": half_life}
    given = [name for name, value in ordered.items() if value is not None]
    if not causal and given:
        raise InputError(
            f"{' and '.join(given)} with causal=False",
            wanted="causal=True",
            got="the bidirectional operation, which has no order of tokens",
            fix="Pass causal=True or leave it out.",
        )
    if membership == "uniform" and bias is not None:
        raise InputError(
            "bias with membership='uniform'",
            wanted="membership='softmax'",
            got="memberships of 1/H, which no score changes",
            fix="Leave the bias out.",
        )
    if half_life is not None and half_life.requires_grad:
        raise InputError(
            "half_life",
            wanted="constants",
            got="a tensor that requires a gradient",
            fix="Half-lives are not learned: pass half_life.detach() or a buffer.",
        )
    if half_life is not None and not torch.compiler.is_compiling() and not bool((half_life > 0).all()):
        got = f"{half_life.min().item():g}"
        raise InputError("half_life", wanted="numbers above 0", got=got, fix="Infinity forgets nothing.")


def check_state(state: TSSAState, sequences: int, heads: int, width: int) -> None:
    """A state of other sequences, heads or channels.

    Raises:
        ShapeError: if one of its parts has another shape.
    """
    sums = (sequences, heads, width)
    wanted = TSSAState(sums, sums, sums[:2], sums[:1])  # type: ignore[arg-type]
    for name, part, shape in zip(TSSAState._fields, state, wanted, strict=True):
        if part.shape != shape:
            _shape(
                f"state.{name}", f"{shape}", f"{tuple(part.shape)}", "Use the state of the same sequences."
            )


def check_packing(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    """Boundaries that are not those of one packed row.

    Raises:
        ShapeError: if they do not rise from 0 to the number of tokens.
    """
    fix = "Pack sequences of lengths n as torch.tensor([0, *n]).cumsum(0), in one row."
    if batch != 1:
        _shape("w with cu_seqlens", "one packed row, (1, T, H, K)", f"{batch} rows", fix)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}"
        _shape("cu_seqlens", "(sequences + 1,) integers", got, fix)
    if torch.compiler.is_compiling():
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        _shape("cu_seqlens", f"rising from 0 to {tokens}", f"{ends[:8]}{'…' * (len(ends) > 8)}", fix)


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


def _shape(subject: str, wanted: str, got: str, fix: str) -> NoReturn:
    raise ShapeError(subject, wanted=wanted, got=got, fix=fix)
