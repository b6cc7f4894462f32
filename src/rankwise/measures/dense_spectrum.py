"""Singular values of dense matrices, from the Gram matrix if rounding cannot change a rank, otherwise by SVD.

The SVD is computed if the smaller side is below `SVD_SIZE` or a gradient is required
(docs/decisions/004-fast-ranks.md). Otherwise eigenvalues of the Gram matrix are computed first, and
the SVD is computed only for matrices in which rounding could change a rank.

Matrices are decomposed in parts (a few matrices each), to limit the memory of intermediate results. On a
CPU each part runs on one thread, and several parts run in parallel (`rankwise._internals.threads`).
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import ratio, to_range
from rankwise._internals.threads import PARALLEL_BYTES, map_threads
from rankwise.measures.registry import Mixing, all_finite, as_matrices, check_matrices

SVD_SIZE = 96
"""Size below which the SVD is computed: for min(T, S) < SVD_SIZE, the SVD is as fast as the Gram matrix."""
EFFECTIVE_RTOL = 1e-2
"""Bound on the relative error of the effective rank; the SVD is computed if rounding may exceed the bound."""
PART_BYTES = {"cpu": 2**21}
"""Bytes of float64 matrices that one CPU thread decomposes together; several such parts fit the cache."""
DEVICE_PART_BYTES = 2**29
"""Bytes of float64 matrices that an accelerator decomposes together."""

PartFunction = Callable[[Tensor], tuple[Tensor, ...]]
"""Function that maps N finite float64 matrices (N, T, S) to a tuple of tensors (N, ...)."""

EPS = torch.finfo(torch.float64).eps
ROW_BLOCKS = 4
"""Number of row blocks of the symmetric Gram matrix. Only half is computed, with 5/8 of all products."""


def gram_or_svd(
    matrices: Float64[Tensor, "N T S"],
    delta: float | None = None,
    rtol: float | None = EFFECTIVE_RTOL,
    relative: float | None = None,
) -> tuple[Float64[Tensor, "N R"], Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Compute singular values from the Gram matrix, or by the SVD if rounding could change the result.

    Args:
        matrices: finite matrices.
        delta: δ at which the number of singular values ≥ δ must be exact; None to skip this check.
        rtol: largest relative error of the effective rank; None to skip this check.
        relative: δ at which the number of singular values ≥ δσ_1 must be exact; None to skip this check.

    Returns:
        Singular values divided by a scale; the scale of each matrix; and 1 for each matrix whose SVD was
        computed because the Gram matrix is not accurate enough, else 0.
    """
    if min(matrices.shape[1:]) < SVD_SIZE or (matrices.requires_grad and torch.is_grad_enabled()):
        return *scaled_svd(matrices), matrices.new_zeros(len(matrices))
    with torch.no_grad():
        spectrum = gram_spectrum(matrices)
        decided = torch.ones_like(spectrum.scale, dtype=torch.bool)
        if delta is not None:
            decided &= spectrum.decides_count(delta)
        if relative is not None:
            decided &= spectrum.decides_relative_count(relative)
        if rtol is not None:
            decided &= spectrum.effective_rank_error() <= rtol
        sigma = spectrum.eigenvalues.sqrt()
        unsure = (~decided).nonzero()[:, 0]
        if len(unsure):
            sigma[unsure] = scaled_svd(matrices[unsure])[0]
        return sigma, spectrum.scale, (~decided).to(torch.float64)


def scaled_svd(matrices: Float64[Tensor, "N T S"]) -> tuple[Float64[Tensor, "N R"], Float64[Tensor, " N"]]:
    """Return the singular values of finite matrices divided by a power of two, and the power of two.

    The scaled values have full precision even if the singular values overflow or underflow float64.
    """
    scaled, scale = to_range(matrices)
    return torch.linalg.svdvals(scaled), scale


class GramSpectrum(NamedTuple):
    """Eigenvalues of the Gram matrix G = M Mᵀ/scale² of a matrix M, and a bound on their rounding error.

    The computed eigenvalues λ̂ are exact for a perturbed matrix G + E. The perturbation E has ‖E‖_F ≤
    ``slack`` = 2·k·ε·‖M/scale‖_F², with k = max(T, S) and ε = 2⁻⁵². A quarter of the slack covers the rounded
    matrix product fl(M Mᵀ): |fl(M Mᵀ) − M Mᵀ| ≤ k·(ε/2)·|M||M|ᵀ (Higham, "Accuracy and Stability of Numerical
    Algorithms", Section 3.5). The other three quarters are assumed to cover the eigensolver. LAPACK is
    backward stable up to a modest multiple of ε·‖G‖ (Users' Guide, Section 4.7). cuSOLVER uses backward
    stable methods too, but its constant is not published.
    """

    eigenvalues: Float64[Tensor, "N R"]
    """Eigenvalues λ̂ of G, descending, clamped at 0. The error of √λ̂ is at most min(√slack, slack/√λ̂)."""
    slack: Float64[Tensor, " N"]
    scale: Float64[Tensor, " N"]
    """Power of two by which M is divided."""

    def decides_count(self, delta: float) -> Bool[Tensor, " N"]:
        """Return True for each matrix where rounding moves no eigenvalue across δ² (Weyl's inequality)."""
        threshold = (delta / self.scale).square()[:, None]
        return ((self.eigenvalues - threshold).abs() > self.slack[:, None]).all(-1)

    def decides_relative_count(self, delta: float) -> Bool[Tensor, " N"]:
        """Return True for each matrix in which rounding cannot move an eigenvalue across δ²λ_1.

        The rounding error of the largest eigenvalue λ_1 is included. The result for a zero matrix is True.
        """
        threshold = delta * delta * self.eigenvalues[:, :1]
        away = (self.eigenvalues - threshold).abs() > (1 + delta * delta) * self.slack[:, None]
        away[:, 0] = True
        return away.all(-1) | (self.eigenvalues[:, 0] == 0)

    def effective_rank_error(self) -> Float64[Tensor, " N"]:
        """Return a bound on the relative error of the effective rank, exp(entropy of σ/Σσ), per matrix.

        λ̂ are the n computed eigenvalues, λ the exact eigenvalues, σ̂ = √λ̂ and σ = √λ. Then Σ|λ̂_i − λ_i|² ≤
        slack² (Hoffman and Wielandt), and |σ̂ − σ| ≤ min(√|λ̂ − λ|, |λ̂ − λ|/σ̂). The n' values with
        λ̂ ≤ slack have errors of σ that sum to at most n'^¾·√slack (Hölder). The errors of all other σ sum
        to at most slack·√(Σ 1/λ̂) (Cauchy and Schwarz). The total of both sums, divided by Σσ̂, bounds the
        total variation distance d between the computed and the exact distribution σ/Σσ. So the entropies
        differ by at most h = d·log n + d·(1 − log d) (K. Audenaert, "A sharp continuity estimate for the von
        Neumann entropy", 2007). The bound is exp(h) − 1, or infinity if d ≥ ½.
        """
        values, slack = self.eigenvalues, self.slack[:, None]
        large = values > slack
        inverse = torch.where(large, 1 / torch.where(large, values, 1.0), 0.0).sum(-1).sqrt()
        off = (~large).sum(-1) ** 0.75 * self.slack.sqrt() + self.slack * inverse
        distance = ratio(off, values.sqrt().sum(-1))
        moved = distance * (math.log(values.shape[-1]) + 1) + torch.special.entr(distance)
        return torch.where(distance < 0.5, moved.expm1(), torch.inf)


def gram_spectrum(matrices: Float64[Tensor, "N T S"]) -> GramSpectrum:
    """Return eigenvalues of the min(T, S)-sized Gram matrix of finite matrices, with an error bound.

    Cost: T S min(T, S) + (4/3)·min(T, S)³ operations, less than half the time of an SVD.
    """
    scaled, scale = to_range(matrices)
    gram = lower_gram(scaled)
    energy = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    eigenvalues = torch.linalg.eigvalsh(gram, UPLO="L").flip(-1).clamp(min=0)
    return GramSpectrum(eigenvalues, 2 * max(matrices.shape[1:]) * EPS * energy, scale)


def lower_gram(matrices: Float64[Tensor, "N T S"]) -> Float64[Tensor, "N R R"]:
    """Return the lower half of the min(T, S)-sized Gram matrix, in the column-major order of LAPACK.

    Entries above the diagonal are undefined.
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    rows = wide.shape[-2]
    upper = wide.new_empty(wide.shape[0], rows, rows)
    step = -(-rows // ROW_BLOCKS)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block, reach = wide[:, start:stop], wide.shape[-1]
        if stop < reach and not bool(torch.linalg.vector_norm(block[..., stop:])):
            reach = stop  # a causal matrix is 0 right of the diagonal
        torch.matmul(block[..., :reach], wide[:, start:, :reach].mT, out=upper[:, start:stop, start:])
    return upper.mT


def map_parts(mixing: Mixing, subject: str, function: PartFunction) -> tuple[Tensor, ...]:
    """Apply a function to one part (a few matrices) at a time, and concatenate the results.

    A matrix with NaN or infinity is replaced by 0 before the call, and its results are set to NaN afterwards.
    So the matrix does not affect the rest of the part. Memory: `PARALLEL_BYTES`, or one larger matrix.
    """
    check_matrices(mixing, subject)
    lead, bytes_each = mixing.shape[:-2], 8 * math.prod(mixing.shape[-2:])
    per_part = max(1, PART_BYTES.get(mixing.device.type, DEVICE_PART_BYTES) // bytes_each)

    def apply(index: tuple[slice, ...]) -> list[Tensor]:
        matrices = as_matrices(mixing[index] if index else mixing, subject)
        batch = matrices.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:])
        finite = all_finite(batch)
        if bool(finite.all()):
            return list(function(batch))
        return [
            numbers.masked_fill(~finite.view(-1, *[1] * (numbers.ndim - 1)), math.nan)
            for numbers in function(batch.masked_fill(~finite[:, None, None], 0))
        ]

    # Parts run one by one on an accelerator, and for autograd, which records a graph on one thread only.
    alone = mixing.device.type != "cpu" or (isinstance(mixing, Tensor) and mixing.requires_grad)
    at_once = 1 if alone else max(1, PARALLEL_BYTES // (per_part * bytes_each))
    results = map_threads(apply, _part_indices(lead, per_part), at_once)
    joined = (torch.cat(numbers) for numbers in zip(*results, strict=True))
    return tuple(numbers.reshape(lead + numbers.shape[1:]) for numbers in joined)


def _part_indices(lead: torch.Size, per_part: int) -> list[tuple[slice, ...]]:
    """Return index tuples that split the leading axes into parts of at most ``per_part`` matrices."""
    steps = [max(1, per_part // max(1, math.prod(lead[axis + 1 :]))) for axis in range(len(lead))]
    slices = (
        [slice(start, start + step) for start in range(0, max(1, length), step)]
        for length, step in zip(lead, steps, strict=True)
    )
    return list(itertools.product(*slices))
