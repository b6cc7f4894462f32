"""Norms without overflow or underflow, and distances from a mean without cancellation."""

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

_EXPONENT_BITS = 0x7FF0_0000_0000_0000
_SMALLEST_NORMAL = torch.finfo(torch.float64).tiny
MATRIX = (-2, -1)
"""The two axes of a matrix: rows and columns."""

SQUARES = 2.0**450
"""Norms between 1/SQUARES and SQUARES need no scaling: squares do not overflow, and squares that underflow
are negligible, because they are below 2⁻¹²² · norm²."""


def float64_device(device: torch.device) -> torch.device:
    """Return the device, or the CPU if the device, such as MPS, does not have float64."""
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except TypeError:  # torch raises this on MPS; other errors are faults of the device
        return torch.device("cpu")
    return device


def as_float64(values: Tensor) -> Float64[Tensor, "..."]:
    """Return a tensor in float64, on the CPU if its device does not have float64."""
    return values.to(float64_device(values.device)).double()


def unit_scale(values: Float64[Tensor, "..."], axes: tuple[int, ...]) -> Float64[Tensor, "..."]:
    """Return the largest power of two that does not exceed the largest absolute value along ``axes``.

    The result is at least 2⁻¹⁰²², or 1 if all values are 0. The axes are kept with length 1. Division by a
    power of two is exact, and squares of the quotients do not overflow.
    """
    largest = values.detach().abs().amax(axes, keepdim=True)
    power = (largest.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    return torch.where(largest > 0, power.clamp(min=_SMALLEST_NORMAL), 1.0)


def norm(values: Float64[Tensor, "..."], axes: tuple[int, ...]) -> Float64[Tensor, "..."]:
    """Return the Euclidean norm along ``axes``, even if the squares overflow or underflow float64."""
    plain = torch.linalg.vector_norm(values, dim=axes)
    if bool(((plain > 1 / SQUARES) & (plain < SQUARES)).all()):
        return plain
    unit = unit_scale(values, axes)
    return torch.linalg.vector_norm(values / unit, dim=axes) * unit.squeeze(axes)


def ratio(share: Float64[Tensor, "..."], whole: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Return ``share / whole`` where ``whole`` is above 0, and 0 elsewhere."""
    return torch.where(whole > 0, share / torch.where(whole > 0, whole, 1.0), 0.0)


def mean_distance(
    rows: Float64[Tensor, "*batch T D"], real: Bool[Tensor, "*batch T"] | None = None
) -> Float64[Tensor, "*batch"]:
    """Return μ = ‖Y − 1ȳᵀ‖_F, the distance of the rows of a matrix Y from their mean ȳ.

    The first real row is subtracted before the mean, so that nearly equal rows lose no digits.
    Rows that are not ``real`` (padding) are left out; real rows must be finite.
    """
    unit = unit_scale(rows, MATRIX)
    rows = rows / unit
    real = torch.ones_like(rows[..., 0], dtype=torch.bool) if real is None else real
    first = real.int().argmax(-1)[..., None, None].expand(*rows.shape[:-2], 1, rows.shape[-1])
    shifted = (rows - rows.gather(-2, first)) * real[..., None]
    mean = shifted.sum(-2, keepdim=True) / real.sum(-1).clamp(min=1)[..., None, None]
    return norm((shifted - mean) * real[..., None], MATRIX) * unit[..., 0, 0]
