"""Singular values of dense matrices and their count, by the cheapest way that can tell.

The rule, as measured on a CPU by benchmarks/rank.py (decision 004):

- smaller side below `DIRECT`, or a gradient wanted: the SVD;
- a count alone, on a CPU: the inertia; what that leaves open: the eigenvalues of the Gram matrix;
- a count on another device, or more than a count: the eigenvalues of the Gram matrix;
- what they leave open: the SVD.

Matrices are decomposed a few at a time, so that what is formed on the way stays small; on a CPU each part on
one thread, several beside each other (`rankwise._internals.threads`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from rankwise._internals.linalg import MATRIX, ratio, unit_scale
from rankwise._internals.threads import map_threads, numpy_is_on_one_thread
from rankwise.measures.registry import Mixing, as_matrices
from rankwise.operators import MixingOperator

DIRECT = 96
"""Fewer rows or columns than this go straight to the SVD, which is about as fast there."""
EFFECTIVE_RTOL = 1e-2
"""Relative error the effective rank may have where the SVD is spared."""
PART_BYTES = {"cpu": 2**20}
"""Float64 matrices measured together: few enough for a CPU's cache, and for other parts beside them."""
DEVICE_PART_BYTES = 2**29
"""The same on an accelerator, which wants many."""
UNDER_WAY_BYTES = 2**29
"""Float64 matrices decomposed beside each other, or one where that takes more."""

PartMeasure = Callable[[Tensor], tuple[Tensor, ...]]
"""A function of finite float64 matrices (N, T, S) that answers with tensors (N, ...)."""
FormPart = Callable[[], Tensor]
"""Forms a part of the matrices, (N, T, S)."""

EPS = torch.finfo(torch.float64).eps
ROW_BLOCKS = 8
"""Of the Gram matrix: its lower half is formed in this many blocks of rows, 9/16 of the work."""
PLAIN = 2.0**100
"""Nothing is scaled whose largest entry lies between this and its inverse: its squares stay in range."""
PROBES = 16
"""Random right-hand sides that tell how near H is to singular."""
MISS = 10.0
"""‖H⁻¹‖ ≤ MISS·√(2/π)·max‖H⁻¹ω‖ but for a chance of MISS^−PROBES = 1e-16 (Halko, Martinsson and Tropp,
SIAM Review 2011, Lemma 4.1)."""


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
    relative: float | None = None,
) -> tuple[Float64[Tensor, "N R"], Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Singular values as right as they need be.

    Args:
        matrices: finite.
        thresholds: none of them may have crossed one of these by rounding.
        rtol: the relative error they may give the effective rank.
        relative: nor this share of the largest.

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


class GramSpectrum(NamedTuple):
    """Eigenvalues of G = M Mᵀ/scale² and how far rounding may have carried them.

    Computed eigenvalues λ̂ are those of G + E, where ‖E‖_F ≤ ``slack`` = 2·k·ε·‖M/scale‖_F², k = max(T, S),
    ε = 2⁻⁵². A quarter of it covers the product: |fl(M Mᵀ) − M Mᵀ| ≤ k·(ε/2)·|M||M|ᵀ, of Frobenius norm at
    most ‖M‖_F² (Higham, "Accuracy and Stability of Numerical Algorithms", Section 3.5). The rest is left to
    the eigensolver, which is backward stable up to a modest multiple of ε·‖G‖ (LAPACK Users' Guide,
    Section 4.7).
    """

    eigenvalues: Float64[Tensor, "N R"]
    """Largest first, none below 0; in units of scale². √λ̂ is off by at most min(√slack, slack/√λ̂)."""
    slack: Float64[Tensor, " N"]
    scale: Float64[Tensor, " N"]
    """A power of two."""

    def decides_count(self, delta: float) -> Bool[Tensor, " N"]:
        """Whether no eigenvalue lies so near δ² that rounding could carry it across (Weyl)."""
        threshold = (delta / self.scale).square()[:, None]
        return ((self.eigenvalues - threshold).abs() > self.slack[:, None]).all(-1)

    def decides_relative_count(self, delta: float) -> Bool[Tensor, " N"]:
        """The same of δσ_1, which rounding carries too; not asked of σ_1 itself, nor of a matrix of zeros."""
        threshold = delta * delta * self.eigenvalues[:, :1]
        away = (self.eigenvalues - threshold).abs() > (1 + delta * delta) * self.slack[:, None]
        away[:, 0] = True
        return away.all(-1) | (self.eigenvalues[:, 0] == 0)

    def effective_rank_error(self) -> Float64[Tensor, " N"]:
        """Bound on the relative error of exp(entropy of σ/Σσ).

        Σ|λ̂_i − λ_i|² ≤ slack² (Hoffman and Wielandt) and |σ̂ − σ| ≤ min(√|λ̂ − λ|, |λ̂ − λ|/σ̂), so by Hölder
        the n' values with λ̂ ≤ slack are off by at most n'^¾·√slack together, and by Cauchy and Schwarz the
        others by slack·√(Σ 1/λ̂). Over Σσ̂ this is a distance d in total variation, which moves an entropy by
        at most d·log n + d·(1 − log d) (K. Audenaert, "A sharp continuity estimate for the von Neumann
        entropy", 2007).
        """
        values, slack = self.eigenvalues, self.slack[:, None]
        large = values > slack
        inverse = torch.where(large, 1 / torch.where(large, values, 1.0), 0.0).sum(-1).sqrt()
        off = (~large).sum(-1) ** 0.75 * self.slack.sqrt() + self.slack * inverse
        distance = ratio(off, values.sqrt().sum(-1))
        moved = distance * (math.log(values.shape[-1]) + 1) + torch.special.entr(distance)
        return torch.where(distance < 0.5, moved.expm1(), torch.inf)


def gram_spectrum(matrices: Float64[Tensor, "N T S"]) -> GramSpectrum:
    """Eigenvalues of the Gram matrix of the shorter side, with their bound.

    Cost: T S min(T, S) and (4/3)·min(T, S)³ operations: less than half the time of an SVD.

    Args:
        matrices: finite.
    """
    scaled, scale = in_range(matrices)
    gram = lower_gram(scaled)
    energy = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    eigenvalues = _eigenvalues(gram).flip(-1).clamp(min=0)
    return GramSpectrum(eigenvalues, 2 * max(matrices.shape[1:]) * EPS * energy, scale)


def in_range(matrices: Float64[Tensor, "N T S"]) -> tuple[Float64[Tensor, "N T S"], Float64[Tensor, " N"]]:
    """The matrices, and the power of two taken out to keep their squares in range."""
    extremes = torch.stack([matrices.amax(MATRIX), matrices.amin(MATRIX)], dim=-1)
    scale = unit_scale(extremes, (-1,))[:, 0]
    scale = torch.where((scale > 1 / PLAIN) & (scale < PLAIN), 1.0, scale)
    return (matrices if bool((scale == 1).all()) else matrices / scale[:, None, None]), scale


def lower_gram(matrices: Float64[Tensor, "N T S"]) -> Float64[Tensor, "N R R"]:
    """Lower half of the Gram matrix of the shorter side, columns contiguous as LAPACK wants them.

    Above the diagonal is anything.
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    rows = wide.shape[-2]
    upper = wide.new_empty(wide.shape[0], rows, rows)
    step = -(-rows // ROW_BLOCKS)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = wide[:, start:stop]
        seen = block[..., : _reach(block)]
        torch.matmul(seen, wide[:, start:, : seen.shape[-1]].mT, out=upper[:, start:stop, start:])
    return upper.mT


def _reach(block: Float64[Tensor, "N R C"]) -> int:
    """Columns up to the last that is not zero throughout: rows of a causal mask end early."""
    used = ((block.amax(-2) != 0) | (block.amin(-2) != 0)).any(0)
    return int((used * torch.arange(1, len(used) + 1, device=used.device)).amax())


def _eigenvalues(lower: Float64[Tensor, "N R R"]) -> Float64[Tensor, "N R"]:
    """In rising order. On one thread by numpy, whose LAPACK takes 2/3 of torch's time (decision 004)."""
    if lower.device.type == "cpu" and numpy_is_on_one_thread():
        return torch.from_numpy(np.linalg.eigvalsh(lower.numpy(), UPLO="L"))
    return torch.linalg.eigvalsh(lower, UPLO="L")


def inertia_count(
    matrices: Float64[Tensor, "N T S"], delta: float
) -> tuple[Float64[Tensor, " N"], Bool[Tensor, " N"]]:
    """Count the singular values ≥ δ, and say whether rounding can have changed the count.

    H = G − δ²I, G the Gram matrix of the shorter side, has as many positive eigenvalues as G has above δ²,
    and so has D of H = L D Lᵀ (Bunch and Kaufman). Computed factors are exact for H + E with
    ‖E‖ ≤ e = 2·k·ε·(‖M‖_F² + √n·δ² + ‖|L||D||L|ᵀ‖), k = max(T, S), n = min(T, S): the product and the shift
    as in `GramSpectrum`, the factorisation and solves with it by |E| ≤ p(n)·ε·(|H| + |L||D||L|ᵀ), p linear
    (Higham, "Accuracy and Stability of Numerical Algorithms", Theorem 11.3). L may grow: it is looked at, not
    assumed small. The count is right where no eigenvalue of H + E is within e of 0, which random solves tell.

    Cost: T S min(T, S) and min(T, S)³/3 operations.

    Args:
        matrices: finite.
        delta: the threshold, above 0.

    Returns:
        The counts; which of them are certain.
    """
    scaled, scale = in_range(matrices)
    shifted = lower_gram(scaled)
    diagonal = shifted.diagonal(dim1=-2, dim2=-1)
    energy = diagonal.sum(-1)  # ‖M‖_F² ≥ σ_1²
    threshold = (delta / scale).square().clamp(max=4 * energy)
    diagonal -= threshold[:, None]
    factor, pivots, _ = torch.linalg.ldl_factor_ex(shifted)
    d = factor.diagonal(dim1=-2, dim2=-1)
    paired = pivots < 0  # two in a row belong to a block of 2×2, which has one eigenvalue of each sign
    count = ((d > 0) & ~paired).sum(-1) + paired.sum(-1) // 2
    nearness = _inverse_norm(factor, pivots)
    size = energy + d.shape[-1] ** 0.5 * threshold + _growth(factor, paired)
    certain = 2 * max(matrices.shape[1:]) * EPS * size * nearness < 1
    return count.to(torch.float64), certain


def _inverse_norm(factor: Float64[Tensor, "N R R"], pivots: Int[Tensor, "N R"]) -> Float64[Tensor, " N"]:
    """Upper bound on ‖H⁻¹‖, but for a chance of 1e-16; infinite or NaN where H is singular."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(factor.shape[-1], PROBES, dtype=torch.float64, generator=generator)
    solved = torch.linalg.ldl_solve(factor, pivots, probes.to(factor.device).expand(len(factor), -1, -1))
    return MISS * math.sqrt(2 / math.pi) * torch.linalg.vector_norm(solved, dim=-2).amax(-1)


def _growth(factor: Float64[Tensor, "N R R"], paired: Bool[Tensor, "N R"]) -> Float64[Tensor, " N"]:
    """Σ_ij |d_ij|‖l_i‖‖l_j‖ ≥ ‖|L||D||L|ᵀ‖; empties the diagonals of the factor.

    The rows of L are stored out of order, which the norms of its columns do not notice.
    """
    first = paired & (paired.cumsum(-1) % 2 == 1)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    below = factor.diagonal(offset=-1, dim1=-2, dim2=-1)
    beside = torch.zeros_like(diagonal)  # where a block of 2×2 keeps its third number
    beside[:, :-1] = torch.where(first[:, :-1], below.abs(), 0.0)
    weights = diagonal.abs()
    diagonal.zero_()
    below.masked_fill_(first[:, :-1], 0)
    lengths = (1 + torch.linalg.vector_norm(factor, dim=-2).square()).sqrt()
    return (weights * lengths.square() + 2 * beside * lengths * lengths.roll(-1, -1)).sum(-1)


def measured_in_parts(mixing: Mixing, subject: str, measure: PartMeasure) -> tuple[Tensor, ...]:
    """Apply a measure part by part; a matrix that is not finite answers NaN and leaves the others alone.

    Memory: the parts under way, `UNDER_WAY_BYTES` of them, or one matrix where that is more.
    """
    parts, at_once = _parts(mixing, subject)
    answers = map_threads(lambda form: _measure_part(form(), measure), parts, at_once)
    lead = mixing.shape[:-2]
    joined = (torch.cat(numbers) for numbers in zip(*answers, strict=True))
    return tuple(numbers.reshape(lead + numbers.shape[1:]) for numbers in joined)


def _measure_part(part: Float64[Tensor, "N T S"], measure: PartMeasure) -> list[Tensor]:
    finite = part.amax((-2, -1)).isfinite() & part.amin((-2, -1)).isfinite()
    if not bool(finite.all()):
        part = part.masked_fill(~finite[:, None, None], 0)
    numbers = measure(part)
    return [column.masked_fill(~finite.view(-1, *[1] * (column.ndim - 1)), math.nan) for column in numbers]


def _parts(mixing: Mixing, subject: str) -> tuple[list[FormPart], int]:
    """How to form each part, at least one even where there are no matrices; how many at once."""

    def formed(index: tuple[slice, ...]) -> Float64[Tensor, "N T S"]:
        assert isinstance(mixing, MixingOperator | Tensor)
        return as_matrices(mixing[index], subject).flatten(0, -3)

    if not isinstance(mixing, MixingOperator | Tensor) or len(mixing.shape) < 3 or 0 in mixing.shape:
        matrices = as_matrices(mixing, subject)
        flat = matrices.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:])
        together = _together(flat.shape, flat.device)
        parts: list[FormPart] = [
            partial(flat.__getitem__, index) for index in _slices(len(flat), together) or [slice(0, 0)]
        ]
    else:
        together = _together(mixing.shape, mixing.device)
        parts = [partial(formed, index) for index in _indices(mixing.shape[:-2], together)]
    if mixing.device.type != "cpu" or (isinstance(mixing, Tensor) and mixing.requires_grad):
        return parts, 1  # other devices want all of it, and the graph of a gradient one thread
    return parts, max(1, UNDER_WAY_BYTES // (8 * together * math.prod(mixing.shape[-2:])))


def _indices(lead: torch.Size, together: int) -> Iterator[tuple[slice, ...]]:
    """Cut the leading axes: sequences; the heads of each, where those of one are too many; and so on."""
    cut = next(axis for axis in range(len(lead)) if math.prod(lead[axis + 1 :]) <= together)
    steps = [1] * cut + [together // math.prod(lead[cut + 1 :])]
    return itertools.product(*(_slices(lead[axis], step) for axis, step in enumerate(steps)))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, length, step)]


def _together(shape: torch.Size, device: torch.device) -> int:
    """Matrices of one part."""
    limit = PART_BYTES.get(device.type, DEVICE_PART_BYTES)
    return max(1, limit // (8 * math.prod(shape[-2:])))
