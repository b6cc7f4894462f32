"""What every measure does first: check what came in, take it to float64, set aside what is not finite."""

import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators import DenseMixing, MixingOperator
from rankwise.shapes import TokenMask

Mixing = MixingOperator | Shaped[Tensor, "*batch T S"]
"""Mixing matrices, as an operator or already formed."""


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
    _check_matrices(mixing, subject)
    if isinstance(mixing, Tensor):
        return to_float64(mixing, subject)
    return to_float64(as_operator(mixing, subject).dense(torch.float64), subject)


def as_operator(mixing: Mixing, subject: str) -> MixingOperator:
    """Take an operator as it is, its matrices not formed and its rows in float64, or wrap a tensor.

    What lies on a device without float64 (mps) is taken to the CPU.

    Raises:
        ShapeError: as `as_matrices`.
    """
    _check_matrices(mixing, subject)
    if isinstance(mixing, Tensor):
        return DenseMixing(to_float64(mixing, subject))
    operator = mixing.to("cpu") if mixing.device.type == "mps" else mixing
    return operator if isinstance(operator, DenseMixing) else operator.to(torch.float64)


def _check_matrices(mixing: Mixing, subject: str) -> None:
    if not isinstance(mixing, MixingOperator | Tensor):
        raise ShapeError(
            subject,
            expected="a MixingOperator or a tensor of shape (..., T, S)",
            got=type(mixing).__name__,
            fix="Wrap an array with torch.as_tensor.",
        )
    if len(mixing.shape) < 2 or 0 in mixing.shape[-2:]:
        raise ShapeError(
            subject,
            expected="shape (..., T, S) with T, S ≥ 1",
            got=str(tuple(mixing.shape)),
            fix="Give each matrix at least one row and one column; leading axes may be empty.",
        )


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
            expected="tokens of shape (B, T, D) with T, D ≥ 1",
            got=str(tuple(tokens.shape)),
            fix="Add the batch axis of a single sequence with tokens[None].",
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
        raise ShapeError(
            f"mask of {subject}",
            expected=f"torch.bool of shape {tuple(tokens.shape[:2])}, True where a token is real",
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
            expected="real numbers",
            got=str(tensor.dtype),
            fix="Measure tensor.real, tensor.imag or tensor.abs().",
        )
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.float64)


def all_finite(matrices: Shaped[Tensor, "*batch T S"]) -> Bool[Tensor, "*batch"]:
    """Which matrices hold neither NaN nor infinity."""
    return matrices.isfinite().all(-1).all(-1)
