"""Singular values, and three notions of rank, each a function of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise._internals.linalg import ratio
from rankwise._internals.statistics import DELTA
from rankwise.errors import RankwiseError
from rankwise.measures.dense_spectrum import count_at_least, gram_or_svd, measured_in_parts, scaled_svd
from rankwise.measures.registry import Mixing, measure

__all__ = [
    "DELTA",
    "Estimate",
    "RankEstimates",
    "RankSummary",
    "check_delta",
    "effective_rank",
    "numerical_rank",
    "rank_summary",
    "singular_values",
    "stable_rank",
    "summarize_spectrum",
]


class Estimate(NamedTuple):
    """A number per matrix with its error; NaN throughout if the matrix is not finite."""

    value: Float64[Tensor, "*batch"]
    """The number; NaN for a count if only its interval is known."""
    stderr: Float64[Tensor, "*batch"]
    """Standard error: chance (probes) and quadrature (steps) together; 0 if exact, NaN if the value is."""
    low: Float64[Tensor, "*batch"]
    """Lower end of the 95 % interval."""
    high: Float64[Tensor, "*batch"]
    """Upper end of the 95 % interval."""


class RankEstimates(NamedTuple):
    """All ranks of a batch of matrices, exact or estimated."""

    numerical: tuple[Estimate, ...]
    """Numbers of singular values ≥ δ, one per threshold."""
    relative: Estimate
    """Number of singular values ≥ δσ_1 for the first threshold."""
    effective: Estimate
    stable: Estimate
    sigma_max: Estimate


class RankSummary(NamedTuple):
    """Every rank of a batch of matrices, from one decomposition. NaN where a matrix is not finite."""

    singular_values: Float64[Tensor, "*batch N"]
    """σ_1 ≥ σ_2 ≥ …, N = min(T, S)."""
    numerical_rank: Float64[Tensor, "*batch"]
    """Singular values ≥ δ."""
    effective_rank: Float64[Tensor, "*batch"]
    """Exponential of the entropy of σ/Σσ."""
    stable_rank: Float64[Tensor, "*batch"]
    """‖M‖_F²/σ_1²."""
    sigma_max: Float64[Tensor, "*batch"]
    """σ_1, the operator norm."""
    fallback: Float64[Tensor, "*batch"]
    """1 where the Gram matrix could not decide and the SVD had to, 0 elsewhere."""
    relative_rank: Float64[Tensor, "*batch"]
    """Singular values ≥ δσ_1: the numerical rank of M/σ_1, whatever the scale of M; 0 for the zero matrix."""

    def estimates(self, deltas: Sequence[float]) -> RankEstimates:
        """Return the ranks as estimates without error.

        Args:
            deltas: δ of the summary, then any of the thresholds in ``also_at`` of `rank_summary`.
        """
        numerical = tuple(_exactly(_count(self.singular_values, delta)) for delta in deltas)
        others = (self.relative_rank, self.effective_rank, self.stable_rank, self.sigma_max)
        return RankEstimates(numerical, *map(_exactly, others))


@measure("matrices", degree=1)
def singular_values(op: Mixing) -> Float64[Tensor, "*batch N"]:
    """Singular values σ_1 ≥ σ_2 ≥ … of each matrix, N = min(T, S) of them.

    Range: [0, ‖M‖_F]; NaN throughout where a matrix holds NaN or infinity. An error of about 1e-16·σ_1 is
    the best float64 gives, so smaller values mean zero.
    Cost: a dense decomposition, O(T S min(T, S)) time and O(T S) memory for each matrix.

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if it is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> singular_values(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).tolist()
        [2.0, 1.0]
    """
    sigma, scale = scaled_spectrum(op, "`singular_values`")
    return sigma * scale[..., None]


def rank_summary(
    op: Mixing,
    delta: float = DELTA,
    exact: bool = False,
    also_at: Sequence[float] = (),
    relative: bool = False,
) -> RankSummary:
    """Singular values and every rank, for the price of one decomposition.

    Cost: T S min(T, S) + (4/3)·min(T, S)³ operations and O(T S) memory for each matrix, about 0.4 of the time
    of `singular_values`; that of `singular_values` where ``exact``, where the smaller side is below 96, where
    a gradient is wanted, and for each matrix that falls back.
    Numerics: σ = √λ, λ the eigenvalues of the Gram matrix of the shorter side in float64. They are off by at
    most e = 4·max(T, S)·1e-16·‖M‖_F², a singular value by at most min(√e, e/σ). A matrix falls back to the
    SVD where a λ is within e of a δ², so that numerical ranks are always the counts of the SVD; and where e
    may move the effective rank by 1 %; it moved no softmax or hardmax head up to T = 1,024 by more than 1e-4.
    The stable rank and σ_1 are right to 1e-10.

    Args:
        op: an operator, or a tensor (..., T, S).
        delta: absolute threshold of the numerical rank.
        exact: decompose every matrix: singular values right to 1e-16·σ_1, and the effective rank with them.
        also_at: further thresholds, for `RankSummary.estimates`.
        relative: let no singular value cross δσ_1 by rounding either; else the relative rank is counted from
            what the other ranks need. A δ below about 1e-7 then leaves every matrix to the SVD.

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1.
        RankwiseError: if ``delta`` is not finite and positive.

    Examples:
        >>> import torch
        >>> summary = rank_summary(torch.diag(torch.tensor([2.0, 1.0, 0.001])))
        >>> summary.numerical_rank.item(), summary.sigma_max.item(), round(summary.stable_rank.item(), 4)
        (2.0, 2.0, 1.25)
    """
    thresholds = (delta, *also_at)
    for threshold in thresholds:
        check_delta(threshold)
    if exact:
        return _summarize(*scaled_spectrum(op, "`rank_summary`"), delta)
    sigma, scale, fallback = measured_in_parts(
        op, "`rank_summary`", lambda part: gram_or_svd(part, thresholds, relative=delta if relative else None)
    )
    return _summarize(sigma, scale, delta)._replace(fallback=fallback)


def summarize_spectrum(sigma: Float64[Tensor, "*batch N"], delta: float = DELTA) -> RankSummary:
    """Every rank, from singular values that are already there.

    Args:
        sigma: singular values in descending order, as `singular_values` gives them.
        delta: absolute threshold of the numerical rank.

    Raises:
        RankwiseError: if ``delta`` is not finite and positive.

    Examples:
        >>> import torch
        >>> sigma = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
        >>> round(summarize_spectrum(sigma).effective_rank.item(), 6)
        2.0
    """
    check_delta(delta)
    return _summarize(sigma, torch.ones_like(sigma[..., 0]), delta)


@measure("matrices", degree=None)
def numerical_rank(op: Mixing, delta: float = DELTA) -> Float64[Tensor, "*batch"]:
    """How many singular values are at least δ.

    Formula: #{i : σ_i ≥ δ}, δ absolute: it is in the units of the matrix and does not follow its scale.
    Range: whole numbers in [0, min(T, S)], float64 so that a matrix with NaN or infinity can answer NaN;
    falls as δ grows. Never above ‖M‖_F²/δ².
    Cost: T S min(T, S) + min(T, S)³/3 operations and O(T S) memory for each matrix, about a quarter of the
    time of `singular_values`, which is the price of the few that have a singular value too close to δ.
    Numerics: the signs in L D Lᵀ = M Mᵀ − δ²I (Sylvester's law of inertia), or the eigenvalues of M Mᵀ, each
    trusted only where its rounding errors cannot have changed the count; else the SVD.
    Source: rank(M, δ) of "On the Limitation and Redundancy of Transformers: A Rank Perspective".

    Args:
        op: an operator, or a tensor (..., T, S).
        delta: the threshold. A δ below about 1e-16·σ_1 counts rounding errors.

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1.
        RankwiseError: if ``delta`` is not finite and positive.

    Examples:
        >>> import torch
        >>> matrix = torch.diag(torch.tensor([1.0, 0.1, 0.001]))
        >>> numerical_rank(matrix).item(), numerical_rank(matrix, delta=0.5).item()
        (2.0, 1.0)
    """
    check_delta(delta)
    (count,) = measured_in_parts(op, "`numerical_rank`", lambda part: (count_at_least(part, delta),))
    return count


@measure("matrices", degree=0)
def effective_rank(op: Mixing) -> Float64[Tensor, "*batch"]:
    """How many singular values matter, counted smoothly.

    Formula: exp(−Σ p_i log p_i) with p = σ/Σσ; 0 for the zero matrix.
    Range: [1, min(T, S)], at least the stable rank; 1 = rank one, min(T, S) = all singular values equal.
    The scale of the matrix does not matter. NaN where a matrix holds NaN or infinity.
    Cost: that of `singular_values`.
    Source: O. Roy and M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> round(effective_rank(torch.eye(5)).item(), 6), effective_rank(torch.zeros(5, 5)).item()
        (5.0, 0.0)
    """
    return _entropy_rank(scaled_spectrum(op, "`effective_rank`")[0])


@measure("matrices", degree=0)
def stable_rank(op: Mixing) -> Float64[Tensor, "*batch"]:
    """Energy of the matrix over that of its strongest direction.

    Formula: ‖M‖_F²/σ_1² = Σσ_i²/σ_1²; 0 for the zero matrix.
    Range: [1, min(T, S)], at most the effective rank; 1 = rank one (for a row-stochastic M: all rows alike).
    The scale of the matrix does not matter, and small singular values hardly do. NaN where a matrix holds
    NaN or infinity.
    Cost: that of `rank_summary`, whose Gram matrix decides it to 1e-10.
    Source: M. Rudelson and R. Vershynin, "Sampling from large matrices", J. ACM 2007, where it is called
    numerical rank.

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> round(stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))).item(), 6)
        1.5
    """
    sigma, _, _ = measured_in_parts(op, "`stable_rank`", lambda part: gram_or_svd(part, rtol=None))
    return _energy_rank(sigma)


def scaled_spectrum(
    op: Mixing, subject: str
) -> tuple[Float64[Tensor, "*batch N"], Float64[Tensor, "*batch"]]:
    """Singular values in units of a power of two, and that power: their ratios keep all digits.

    Args:
        op: an operator, or a tensor (..., T, S).
        subject: what an error calls it.
    """
    sigma, scale = measured_in_parts(op, subject, scaled_svd)
    return sigma, scale


def _summarize(scaled: Tensor, scale: Tensor, delta: float) -> RankSummary:
    sigma = scaled * scale[..., None]
    return RankSummary(
        singular_values=sigma,
        numerical_rank=_count(sigma, delta),
        effective_rank=_entropy_rank(scaled),
        stable_rank=_energy_rank(scaled),
        sigma_max=sigma[..., 0],
        relative_rank=_relative_count(scaled, delta),
        fallback=torch.zeros_like(sigma[..., 0]).masked_fill(sigma[..., 0].isnan(), math.nan),
    )


def _exactly(value: Tensor) -> Estimate:
    return Estimate(value, torch.zeros_like(value).masked_fill(value.isnan(), math.nan), value, value)


def _count(sigma: Tensor, delta: float) -> Tensor:
    count = (sigma >= delta).sum(-1).to(torch.float64)
    return count.masked_fill(sigma.isnan().any(-1), math.nan)


def _relative_count(sigma: Tensor, delta: float) -> Tensor:
    count = (sigma >= delta * sigma[..., :1]).sum(-1).to(torch.float64)
    return torch.where(sigma[..., 0] == 0, 0.0, count).masked_fill(sigma.isnan().any(-1), math.nan)


def _entropy_rank(sigma: Tensor) -> Tensor:
    relative = _relative(sigma)
    share = relative / relative.sum(-1, keepdim=True)  # at least 1 below: σ_1/σ_1 is in the sum
    return torch.where(sigma[..., 0] == 0, 0.0, torch.special.entr(share).sum(-1).exp())


def _energy_rank(sigma: Tensor) -> Tensor:
    return _relative(sigma).square().sum(-1)


def _relative(sigma: Tensor) -> Tensor:
    """σ/σ_1, all zero where σ_1 is: no square can overflow, and NaN stays NaN."""
    top = sigma[..., :1].expand_as(sigma)
    return torch.where(top.isnan(), top, ratio(sigma, top))


def check_delta(delta: float) -> None:
    """Refuse a threshold that is not finite and positive.

    Args:
        delta: the threshold.

    Raises:
        RankwiseError: if it is not.
    """
    try:
        sound = math.isfinite(delta) and delta > 0
    except TypeError:
        sound = False
    if not sound:
        raise RankwiseError(
            "`delta`",
            expected="a finite number above 0",
            got=str(delta),
            fix="It is the smallest singular value that still counts, such as 0.01.",
        )
