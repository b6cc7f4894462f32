"""Norms without overflow or underflow, and distances from a mean without cancellation."""

import math
import os

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise.errors import one_of

_EXPONENT_BITS = 0x7FF0_0000_0000_0000
_SMALLEST_NORMAL = torch.finfo(torch.float64).tiny
MATRIX = (-2, -1)
"""The two axes of a matrix: rows and columns."""

SQUARES = 2.0**450
"""Norms between 1/SQUARES and SQUARES need no scaling: squares do not overflow, and squares that underflow
are negligible, because they are below 2⁻¹²² · norm²."""
CANCELLATION = 1e-7
"""Relative error above which a distance is not computed from a difference of squared norms."""


def float64_device(device: torch.device) -> torch.device:
    """Return the device that computes float64 numbers of tensors on ``device``.

    It is the same device, or the CPU if the device, such as MPS, does not have float64. GPUs that run float64
    at 1/64 of their float32 rate keep it (docs/decisions/004-fast-ranks.md). The environment variable
    RANKWISE_FLOAT64=cpu moves all float64 work to the CPU.
    """
    wanted = os.environ.get("RANKWISE_FLOAT64", "auto")
    one_of("RANKWISE_FLOAT64", wanted, ("auto", "cpu"))
    if device.type == "cpu" or wanted == "cpu":
        return torch.device("cpu")
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
    largest = torch.maximum(
        values.detach().amax(axes, keepdim=True), -values.detach().amin(axes, keepdim=True)
    )
    power = (largest.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    return torch.where(largest > 0, power.clamp(min=_SMALLEST_NORMAL), 1.0)


def norm(values: Float64[Tensor, "..."], axes: tuple[int, ...]) -> Float64[Tensor, "..."]:
    """Return the Euclidean norm along ``axes``, even if the squares overflow or underflow float64."""
    plain = torch.linalg.vector_norm(values, dim=axes)
    if has_plain_squares(plain):
        return plain
    unit = unit_scale(values, axes)
    return torch.linalg.vector_norm(values / unit, dim=axes) * unit.squeeze(axes)


def has_plain_squares(norms: Float64[Tensor, "..."]) -> bool:
    """Return True if squares of vectors with these norms need no scaling; False if a norm is 0 or NaN."""
    return bool(((norms > 1 / SQUARES) & (norms < SQUARES)).all())


def to_range(matrices: Float64[Tensor, "*N T S"]) -> tuple[Float64[Tensor, "*N T S"], Float64[Tensor, "*N"]]:
    """Return matrices divided by a power of two, and the power; 1 if squares need no scaling."""
    norms = torch.linalg.vector_norm(matrices.detach(), dim=MATRIX)
    if has_plain_squares(norms):
        return matrices, torch.ones_like(norms)
    scale = unit_scale(matrices, MATRIX)
    scale = torch.where((scale > 1 / SQUARES) & (scale < SQUARES), 1.0, scale)
    return (matrices if bool((scale == 1).all()) else matrices / scale), scale[..., 0, 0]


def no_cancellation(
    square: Float64[Tensor, "..."], whole: Float64[Tensor, "..."], numbers: int
) -> Bool[Tensor, "..."]:
    """Return True where √square has a relative rounding error below `CANCELLATION`.

    ``square`` is a sum of products of at most ``numbers`` terms, whose magnitudes sum to at most ``whole``.
    Such a sum errs by at most numbers·ε·whole, twice the bound of Higham, "Accuracy and Stability of
    Numerical Algorithms", Section 3.1, in any order of the terms. Its square root errs by half as much.
    """
    bound = numbers * torch.finfo(torch.float64).eps / (2 * CANCELLATION)
    return (square > bound * whole) & (whole > 1 / SQUARES) & (whole < SQUARES)


def ratio(share: Float64[Tensor, "..."], whole: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Return ``share / whole`` where ``whole`` is above 0, and 0 elsewhere."""
    return torch.where(whole > 0, share / torch.where(whole > 0, whole, 1.0), 0.0)


def mean_distance(
    rows: Float64[Tensor, "*batch T D"], real: Bool[Tensor, "*batch T"] | None = None
) -> Float64[Tensor, "*batch"]:
    """Return μ = ‖Y − 1ȳᵀ‖_F, the distance of the rows of a matrix Y from their mean ȳ.

    μ² = ‖Y‖² − T‖ȳ‖² if this does not cancel. Otherwise the first real row is subtracted before the mean, so
    that nearly equal rows lose no digits. Rows that are not ``real`` (padding) are left out; real rows must
    be finite.
    """
    if real is None:
        real = torch.ones_like(rows[..., 0], dtype=torch.bool)
    elif not bool(real.all()):
        rows = rows.masked_fill(~real[..., None], 0.0)
    count = real.sum(-1).clamp(min=1)
    whole = torch.linalg.vector_norm(rows, dim=MATRIX).square()
    square = whole - (rows.sum(-2) / count[..., None]).square().sum(-1) * count
    plain = no_cancellation(square, 2 * whole, math.prod(rows.shape[-2:]))
    distance = square.where(plain, 1.0).sqrt()
    if bool(plain.all()):
        return distance
    rows, unit = to_range(rows)
    first = real.int().argmax(-1)[..., None, None].expand(*rows.shape[:-2], 1, rows.shape[-1])
    shifted = (rows - rows.gather(-2, first)) * real[..., None]
    center = shifted.sum(-2, keepdim=True) / count[..., None, None]
    return torch.where(plain, distance, norm((shifted - center) * real[..., None], MATRIX) * unit)


def roots_of(
    moments: Float64[Tensor, "*batch K K"], ridge: float
) -> tuple[Float64[Tensor, "*batch K K"], Float64[Tensor, "*batch K K"]]:
    """Return S^½ and S^−½ of second moments S plus a ridge, relative to the mean eigenvalue of all S."""
    least = ridge * moments.diagonal(dim1=-2, dim2=-1).mean().clamp(min=1e-300)
    eye = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    values, vectors = torch.linalg.eigh(moments + least * eye)
    roots = torch.maximum(values, least).sqrt()[..., None, :]
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT
