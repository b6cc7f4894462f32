"""Which way each matrix goes: an inertia, the Gram matrix, or the SVD where those cannot tell.

The rule, as measured on a CPU by benchmarks/rank.py (decision 004):

- smaller side below `DIRECT`, or a gradient wanted: the SVD;
- a count alone, on a CPU: the inertia; what that leaves open: the eigenvalues of the Gram matrix;
- a count on another device, or more than a count: the eigenvalues of the Gram matrix;
- what they leave open: the SVD.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.dense_gram import gram_spectrum, in_range
from rankwise.measures.inertia import inertia_count

DIRECT = 96
"""Fewer rows or columns than this go straight to the SVD, which is about as fast there."""
EFFECTIVE_RTOL = 1e-2
"""Relative error the effective rank may have where the SVD is spared."""


def count_at_least(matrices: Float64[Tensor, "N T S"], delta: float) -> Float64[Tensor, " N"]:
    """How many singular values are ≥ δ: by inertia; where that is not certain, by `gram_or_svd`.

    Args:
        matrices: finite.
        delta: the threshold, above 0.
    """
    with torch.no_grad():
        if min(matrices.shape[1:]) < DIRECT:
            return _count(torch.linalg.svdvals(matrices), delta)
        if matrices.device.type != "cpu":
            return _count(_sigma(matrices, delta), delta)
        count, certain = inertia_count(matrices, delta)
        unsure = (~certain).nonzero()[:, 0]
        if len(unsure):
            count[unsure] = _count(_sigma(matrices[unsure], delta), delta)
        return count


def gram_or_svd(
    matrices: Float64[Tensor, "N T S"],
    thresholds: Sequence[float] = (),
    rtol: float | None = EFFECTIVE_RTOL,
) -> tuple[Float64[Tensor, "N R"], Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Singular values as right as they need be.

    Args:
        matrices: finite.
        thresholds: none of them may have crossed one of these by rounding.
        rtol: the relative error they may give the effective rank.

    Returns:
        The singular values in units of a power of two; that power; 1 where the Gram matrix could not promise
        what was asked and the SVD was taken, else 0.
    """
    if min(matrices.shape[1:]) < DIRECT or (matrices.requires_grad and torch.is_grad_enabled()):
        return *scaled_svd(matrices), matrices.new_zeros(len(matrices))
    with torch.no_grad():
        spectrum = gram_spectrum(matrices)
        decided = torch.ones_like(spectrum.scale, dtype=torch.bool)
        for delta in thresholds:
            decided &= spectrum.decides_count(delta)
        if rtol is not None:
            decided &= spectrum.effective_rank_error() <= rtol
        sigma = spectrum.eigenvalues.sqrt()
        unsure = (~decided).nonzero()[:, 0]
        if len(unsure):
            sigma[unsure] = scaled_svd(matrices[unsure])[0]
        return sigma, spectrum.scale, (~decided).to(torch.float64)


def scaled_svd(matrices: Float64[Tensor, "N T S"]) -> tuple[Float64[Tensor, "N R"], Float64[Tensor, " N"]]:
    """Singular values by the SVD in units of a power of two, and that power.

    In units they have all their digits, where they themselves may leave float64 above or below.

    Args:
        matrices: finite.
    """
    scaled, scale = in_range(matrices)
    return torch.linalg.svdvals(scaled), scale


def _sigma(matrices: Float64[Tensor, "N T S"], delta: float) -> Float64[Tensor, "N R"]:
    sigma, scale, _ = gram_or_svd(matrices, (delta,), rtol=None)
    return sigma * scale[:, None]


def _count(sigma: Float64[Tensor, "N R"], delta: float) -> Float64[Tensor, " N"]:
    return (sigma >= delta).sum(-1).to(torch.float64)
