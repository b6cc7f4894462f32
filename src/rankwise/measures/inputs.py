"""What every measure does first: check what came in, take it to float64, set aside what is not finite.

Matrices are measured a few at a time, so that what is formed on the way stays small.
"""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators import MixingOperator
from rankwise.shapes import TokenMask

Mixing = MixingOperator | Shaped[Tensor, "*batch T S"]
"""Mixing matrices, as an operator or already formed."""

PART_BYTES = {"cpu": 2**23}
"""Float64 matrices measured at once: few enough for a CPU's cache."""
DEVICE_PART_BYTES = 2**29
"""The same on an accelerator, which wants many."""

PartMeasure = Callable[[Tensor], tuple[Tensor, ...]]
"""A function of finite float64 matrices (N, T, S) that answers with tensors (N, ...)."""


def as_matrices(mixing: Mixing, subject: str = "matrix") -> Float64[Tensor, "*batch T S"]:
    """Form the matrices of an operator, or take a tensor as it is, in float64.

    Cost: O(T S) memory for each matrix. What lies on a device without float64 (mps) is taken to the CPU.

    Args:
        mixing: an operator or a tensor (..., T, S) of any real dtype.
        subject: what an error calls it.

    Raises:
        ShapeError: if it is neither, is complex, or T or S is 0 or missing.

    Examples:
        >>> import torch
        >>> as_matrices(torch.ones(2, 3, dtype=torch.bfloat16)).dtype
        torch.float64
    """
    if not isinstance(mixing, MixingOperator | Tensor):
        raise ShapeError(
            subject,
            wanted="a MixingOperator or a tensor of shape (..., T, S)",
            got=type(mixing).__name__,
            fix="Wrap an array with torch.as_tensor.",
        )
    if len(mixing.shape) < 2 or 0 in mixing.shape[-2:]:
        raise ShapeError(
            subject,
            wanted="shape (..., T, S) with T, S ≥ 1",
            got=str(tuple(mixing.shape)),
            fix="Give each matrix at least one row and one column; leading axes may be empty.",
        )
    if isinstance(mixing, Tensor):
        return to_float64(mixing, subject)
    operator = mixing.to("cpu") if mixing.device.type == "mps" else mixing
    return to_float64(operator.dense(torch.float64), subject)


def as_tokens(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None, subject: str
) -> tuple[Float64[Tensor, "B T D"], TokenMask, Bool[Tensor, " B"]]:
    """Take token states to float64, with padded tokens and unusable sequences set to zero.

    Returns:
        The states; which tokens are real; which sequences can be measured: those that have a real token
        and whose real tokens are all finite.

    Raises:
        ShapeError: if the tokens are not (B, T, D) with T, D ≥ 1, or the mask is not Bool (B, T).
    """
    if tokens.ndim != 3 or 0 in tokens.shape[1:]:
        raise ShapeError(
            subject,
            wanted="tokens of shape (B, T, D) with T, D ≥ 1",
            got=str(tuple(tokens.shape)),
            fix="Add the batch axis of a single sequence with tokens[None].",
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
        raise ShapeError(
            f"mask of {subject}",
            wanted=f"torch.bool of shape {tuple(tokens.shape[:2])}, True where a token is real",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}",
            fix="A tokenizer's attention_mask becomes one with .bool().",
        )
    states = to_float64(tokens, subject)
    valid = states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.to(states.device)
    states = states.masked_fill(~valid[..., None], 0)
    usable = all_finite(states) & valid.any(-1)
    return states.masked_fill(~usable[:, None, None], 0), valid, usable


def to_float64(tensor: Tensor, subject: str) -> Tensor:
    """Take a real tensor to float64, on the CPU where its device has none."""
    if tensor.is_complex():
        raise ShapeError(
            subject,
            wanted="real numbers",
            got=str(tensor.dtype),
            fix="Measure tensor.real, tensor.imag or tensor.abs().",
        )
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.float64)


def all_finite(matrices: Shaped[Tensor, "*batch T S"]) -> Bool[Tensor, "*batch"]:
    """Which matrices hold neither NaN nor infinity."""
    return matrices.isfinite().all(-1).all(-1)


def measured_in_parts(mixing: Mixing, subject: str, measure: PartMeasure) -> tuple[Tensor, ...]:
    """Apply a measure part by part; a matrix that is not finite answers NaN and leaves the others alone.

    Memory: one part at a time, or the heads of one sequence where those are more.
    """
    answers = [_measure_part(part, measure) for part in _parts(mixing, subject)]
    lead = mixing.shape[:-2]
    joined = (torch.cat(numbers) for numbers in zip(*answers, strict=True))
    return tuple(numbers.reshape(lead + numbers.shape[1:]) for numbers in joined)


def _measure_part(part: Float64[Tensor, "N T S"], measure: PartMeasure) -> list[Tensor]:
    finite = part.amax((-2, -1)).isfinite() & part.amin((-2, -1)).isfinite()
    if not bool(finite.all()):
        part = part.masked_fill(~finite[:, None, None], 0)
    numbers = measure(part)
    return [one.masked_fill(~finite.view(-1, *[1] * (one.ndim - 1)), math.nan) for one in numbers]


def _parts(mixing: Mixing, subject: str) -> Iterator[Float64[Tensor, "N T S"]]:
    """The matrices, at least one part even where there are none."""
    whole = not isinstance(mixing, MixingOperator | Tensor) or len(mixing.shape) < 3 or 0 in mixing.shape
    if whole:
        matrices = as_matrices(mixing, subject)
        yield from _split(matrices.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:]))
        return
    at_once = _at_once(mixing.shape[1:], mixing.device)
    for start in range(0, mixing.shape[0], at_once):
        index = slice(start, min(start + at_once, mixing.shape[0]))
        yield from _split(as_matrices(mixing[index], subject).flatten(0, -3))


def _split(matrices: Float64[Tensor, "N T S"]) -> tuple[Tensor, ...]:
    return matrices.split(_at_once(matrices.shape[1:], matrices.device))


def _at_once(shape: torch.Size, device: torch.device) -> int:
    limit = PART_BYTES.get(device.type, DEVICE_PART_BYTES)
    return max(1, limit // (8 * math.prod(shape)))
