"""Singular values of mixing matrices (operators), and numerical, effective and stable rank."""

import math
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise._internals.linalg import ratio
from rankwise._internals.statistics import DELTA, check_delta
from rankwise.measures.dense_spectrum import gram_or_svd, map_parts, scaled_svd
from rankwise.measures.registry import Mixing, measure

__all__ = [
    "DELTA",
    "Estimate",
    "RankSummary",
    "effective_rank",
    "numerical_rank",
    "rank_summary",
    "singular_values",
    "stable_rank",
]


class Estimate(NamedTuple):
    """Estimate per matrix: value, standard error and 95 % interval; NaN if the matrix is not finite."""

    value: Float64[Tensor, "*batch"]
    """Estimated value; NaN for a count if only its interval is known."""
    stderr: Float64[Tensor, "*batch"]
    """Standard error from random probes and quadrature; 0 if the value is exact, NaN if the value is NaN."""
    low: Float64[Tensor, "*batch"]
    """Lower end of the 95 % interval."""
    high: Float64[Tensor, "*batch"]
    """Upper end of the 95 % interval."""


class RankSummary(NamedTuple):
    """All ranks of each matrix in a batch, from one decomposition; NaN for a matrix with NaN or infinity."""

    singular_values: Float64[Tensor, "*batch N"]
    """The N = min(T, S) singular values σ_1 ≥ σ_2 ≥ … of each matrix."""
    numerical_rank: Float64[Tensor, "*batch"]
    """Number of singular values ≥ δ."""
    effective_rank: Float64[Tensor, "*batch"]
    """Exponential of the entropy of the normalized singular values σ/Σσ."""
    stable_rank: Float64[Tensor, "*batch"]
    """‖M‖_F²/σ_1² of the mixing matrix M."""
    sigma_max: Float64[Tensor, "*batch"]
    """Largest singular value σ_1, the operator norm."""
    used_svd: Float64[Tensor, "*batch"]
    """1 if the SVD was computed because rounding in the Gram matrix could change a rank, otherwise 0."""
    scale_free_rank: Float64[Tensor, "*batch"]
    """Number of singular values ≥ δσ_1; independent of the scale of M, and 0 for the zero matrix."""


@measure("matrices", degree=1)
def singular_values(op: Mixing) -> Float64[Tensor, "*batch N"]:
    """Return the N = min(T, S) singular values σ_1 ≥ σ_2 ≥ … of each matrix.

    Range: [0, ‖M‖_F]; NaN for a matrix with NaN or infinity. The absolute error in float64 is about
    1e-16·σ_1, so a smaller value cannot be distinguished from zero.
    Cost: a dense decomposition, O(T S min(T, S)) time and O(T S) memory per matrix.

    Examples:
        >>> import torch
        >>> singular_values(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).tolist()
        [2.0, 1.0]
    """
    sigma, scale = map_parts(op, "`singular_values`", scaled_svd)
    return sigma * scale[..., None]


def rank_summary(op: Mixing, delta: float = DELTA, exact: bool = False) -> RankSummary:
    """Compute the singular values and all ranks of each matrix from one decomposition.

    Cost: T S min(T, S) + (4/3)·min(T, S)³ operations and O(T S) memory per matrix, about 40 % of the time of
    `singular_values`. The SVD, which takes the full time, is computed if ``exact`` is True, if min(T, S) <
    96, if a gradient is required, and for each matrix with ``used_svd``.
    Numerics: σ = √λ, where λ are the float64 eigenvalues of the smaller Gram matrix (M Mᵀ or MᵀM). The error
    of λ is at most e = 4·max(T, S)·1e-16·‖M‖_F², and the error of σ at most min(√e, e/σ). If e could move
    some σ across δ or δσ_1, or change the effective rank by 1 %, the SVD of the matrix is computed instead.
    So numerical and scale-free ranks always equal the counts by the SVD. For softmax and hardmax heads up to
    T = 1,024, no effective rank changed by more than 1e-4. Let k = max(T, S), n = min(T, S), ε = 2⁻⁵², and r
    the stable rank. The relative error is at most k·ε·r for σ_1 and 2k·ε·(r + √n) for r, which is below 1e-10
    up to T = S = 460.

    Args:
        op: mixing operator, or tensor (..., T, S) with a row per token and a column per source.
        delta: absolute threshold δ of the numerical rank.
        exact: True to compute the SVD of every matrix; each singular value then has an error of 1e-16·σ_1.

    Raises:
        RankwiseError: if ``delta`` is not finite and positive.

    Examples:
        >>> import torch
        >>> summary = rank_summary(torch.diag(torch.tensor([2.0, 1.0, 0.001])))
        >>> summary.numerical_rank.item(), summary.sigma_max.item(), round(summary.stable_rank.item(), 4)
        (2.0, 2.0, 1.25)
    """
    check_delta(delta)
    if exact:
        sigma, scale = map_parts(op, "`rank_summary`", scaled_svd)
        return _summarize(sigma, scale, delta)
    decompose = partial(gram_or_svd, delta=delta, relative=delta)
    sigma, scale, used_svd = map_parts(op, "`rank_summary`", decompose)
    return _summarize(sigma, scale, delta)._replace(used_svd=used_svd)


@measure("matrices", degree=None)
def numerical_rank(op: Mixing, delta: float = DELTA) -> Float64[Tensor, "*batch"]:
    """Count the singular values of each matrix that are at least δ.

    Formula: #{i : σ_i ≥ δ}. δ is absolute: it does not scale with the matrix.
    Range: integers in [0, min(T, S)], at most ‖M‖_F²/δ²; a larger δ never returns a larger count. NaN for a
    matrix with NaN or infinity, which is why the dtype is float64.
    Cost: T S min(T, S) + (4/3)·min(T, S)³ operations and O(T S) memory per matrix, about 40 % of the time of
    `singular_values`. A matrix with a singular value too close to δ takes the full time.
    Numerics: eigenvalues of M Mᵀ, as in `rank_summary`; the result always equals the count by the SVD.
    Source: rank(M, δ) of "On the Limitation and Redundancy of Transformers: A Rank Perspective".

    Args:
        op: mixing operator, or tensor (..., T, S) with a row per token and a column per source.
        delta: threshold δ. If δ is below about 1e-16·σ_1, rounding errors are counted too.

    Raises:
        RankwiseError: if ``delta`` is not finite and positive.

    Examples:
        >>> import torch
        >>> matrix = torch.diag(torch.tensor([1.0, 0.1, 0.001]))
        >>> numerical_rank(matrix).item(), numerical_rank(matrix, delta=0.5).item()
        (2.0, 1.0)
    """
    check_delta(delta)
    sigma, scale, _ = map_parts(op, "`numerical_rank`", lambda x: gram_or_svd(x.detach(), delta, None))
    return _count(sigma * scale[..., None], delta)


@measure("matrices", degree=0)
def effective_rank(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Return the effective rank of each matrix, a smooth count of its singular values by their entropy.

    Formula: exp(−Σ p_i log p_i) with p = σ/Σσ; 0 for the zero matrix.
    Range: [1, min(T, S)], at least the stable rank. It is 1 if M has rank 1, and min(T, S) if all singular
    values are equal. Independent of the scale of the matrix. NaN for a matrix with NaN or infinity.
    Cost: the cost of `rank_summary`.
    Numerics: eigenvalues of M Mᵀ with the bound of `rank_summary`, or the SVD.
    Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Examples:
        >>> import torch
        >>> round(effective_rank(torch.eye(5)).item(), 6), effective_rank(torch.zeros(5, 5)).item()
        (5.0, 0.0)
    """
    return entropy_rank(map_parts(op, "`effective_rank`", gram_or_svd)[0])


@measure("matrices", degree=0)
def stable_rank(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Return the stable rank: the squared Frobenius norm divided by the squared largest singular value.

    Formula: ‖M‖_F²/σ_1² = Σσ_i²/σ_1²; 0 for the zero matrix.
    Range: [1, min(T, S)], at most the effective rank. It is 1 if M has rank 1 (all rows are equal if the rows
    also sum to 1). Independent of the scale of the matrix, and almost independent of small singular values.
    NaN for a matrix with NaN or infinity.
    Cost: the cost of `rank_summary`, which has the bound on rounding: 1e-10 of the value up to T = S = 460.
    Source: M. Rudelson and R. Vershynin, "Sampling from large matrices", J. ACM 2007, where it is called
    numerical rank.

    Examples:
        >>> import torch
        >>> round(stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))).item(), 6)
        1.5
    """
    return _energy_rank(map_parts(op, "`stable_rank`", partial(gram_or_svd, rtol=None))[0])


def _summarize(scaled: Tensor, scale: Tensor, delta: float) -> RankSummary:
    sigma = scaled * scale[..., None]
    return RankSummary(
        singular_values=sigma,
        numerical_rank=_count(sigma, delta),
        effective_rank=entropy_rank(scaled),
        stable_rank=_energy_rank(scaled),
        sigma_max=sigma[..., 0],
        scale_free_rank=_relative_count(scaled, delta),
        used_svd=torch.zeros_like(sigma[..., 0]).masked_fill(sigma[..., 0].isnan(), math.nan),
    )


def _count(sigma: Tensor, delta: float) -> Tensor:
    count = (sigma >= delta).sum(-1).to(torch.float64)
    return count.masked_fill(sigma.isnan().any(-1), math.nan)


def _relative_count(sigma: Tensor, delta: float) -> Tensor:
    count = (sigma >= delta * sigma[..., :1]).sum(-1).to(torch.float64)
    return torch.where(sigma[..., 0] == 0, 0.0, count).masked_fill(sigma.isnan().any(-1), math.nan)


def entropy_rank(sigma: Float64[Tensor, "*batch N"]) -> Float64[Tensor, "*batch"]:
    """Return exp(entropy of σ/Σσ) of descending singular values in any unit; 0 if all are 0."""
    relative = _relative(sigma)
    share = relative / relative.sum(-1, keepdim=True)  # the sum is at least 1, because σ_1/σ_1 = 1
    return torch.where(sigma[..., 0] == 0, 0.0, torch.special.entr(share).sum(-1).exp())


def _energy_rank(sigma: Tensor) -> Tensor:
    return _relative(sigma).square().sum(-1)


def _relative(sigma: Tensor) -> Tensor:
    """Return σ/σ_1, or 0 for a zero matrix; the squares of the ratios cannot overflow, and NaN stays NaN."""
    top = sigma[..., :1].expand_as(sigma)
    return torch.where(top.isnan(), top, ratio(sigma, top))
