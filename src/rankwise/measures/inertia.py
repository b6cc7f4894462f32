"""How many singular values are at least δ, from one triangular factorisation (Sylvester's law of inertia)."""

import math

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from rankwise.measures.dense_gram import EPS, in_range, lower_gram

PROBES = 16
"""Random right-hand sides that tell how near H is to singular."""
MISS = 10.0
"""‖H⁻¹‖ ≤ MISS·√(2/π)·max‖H⁻¹ω‖ but for a chance of MISS^−PROBES = 1e-16 (Halko, Martinsson and Tropp,
SIAM Review 2011, Lemma 4.1)."""


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
