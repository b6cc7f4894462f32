"""Estimates of traces tr f(A) and of eigenvalue counts of A = MᵀM, with error estimates.

All estimates use A compressed to a Krylov space: span(X, A X, A² X, …) for a block X of random vectors.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.krylov import Krylov, block_lanczos

Function = Callable[[Tensor], Tensor]
"""Elementwise function f of eigenvalues λ, with f(0) = 0."""
Numbers = tuple[float, float, float, float]
"""Value, standard error, and the lower and upper ends of the interval."""

ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Fraction of tr A below which an eigenvalue, or a coupling of Krylov vectors, counts as a rounding error."""
NO_SPREAD = 1e-10
"""A control variate is used if the standard deviation of xᵀ A x over probes x exceeds this share of tr A."""
SAME = 0.999
"""Squared cosine above which Ritz vectors (approximate eigenvectors) from two sets of probes are the same."""
CONVERGED = 1e-6
"""Relative residual below which a Ritz value (approximate eigenvalue) counts as an eigenvalue."""
SHARP = 0.05
"""A count is NaN, and only its interval is known, if the quadrature error exceeds 0.5 and this share."""


class Nodes(NamedTuple):
    """Quadrature rule per starting vector x (P vectors, N nodes): Σ f(values) · weights ≈ xᵀ f(A) x."""

    values: Float64[Tensor, " N"]
    weights: Float64[Tensor, "N P"]


class Bracket(NamedTuple):
    """Interval around a number, from a quadrature error and a statistical error."""

    value: float
    half_width: float
    """Quadrature error: for these probes, the exact number is within ``value`` ± ``half_width``."""
    stderr: float
    """Standard error over probes; 0 if no probe was used."""

    def reach(self, quantile: float) -> float:
        """Return half the width of the interval: quadrature error plus ``quantile`` · ``stderr``."""
        return self.half_width + quantile * self.stderr


class ConfirmedPairs(NamedTuple):
    """Ritz pairs (θ, y), approximate eigenpairs, found by both halves of the probes independently."""

    values: Float64[Tensor, " R"]
    squares: Float64[Tensor, "R Q"]
    """(yᵀx)² for R Ritz vectors y from one half and Q probes x of the other half; the expected value is 1."""


class TraceEstimator:
    r"""Estimator of tr f(A) for A = MᵀM from Rademacher (±1) probes, with A compressed to their Krylov space.

    For each probe x, xᵀ f(A) x has the mean tr f(A). Three corrections reduce the variance without a bias:

    - Deflation: a Ritz pair (θ, y) from one half of the probes has E (yᵀx)² = 1 for a probe x of the other
      half, so f(θ) (1 − (yᵀx)²) of mean 0 is added. This removes the variance of the strongest directions.
    - Control variate: xᵀ A x has the known mean ‖M‖_F², so estimates are regressed on xᵀ A x − ‖M‖_F².
    - Exhaustion: if the Krylov space contains all energy ‖M‖_F², the trace is Σ f(θ), without any probe.

    Source: T. Chen and E. Hallman, "Krylov-aware stochastic trace estimation", SIAM J. Matrix Anal. Appl.
    2023; R. Meyer et al., "Hutch++", SOSA 2021; S. Ubaru et al., "Fast estimation of tr(f(A)) via stochastic
    Lanczos quadrature", SIAM J. Matrix Anal. Appl. 2017.

    ``energy`` is ‖M‖_F², the trace of A; ``limit`` bounds the number of nonzero eigenvalues.
    """

    def __init__(self, krylov: Krylov, energy: float, limit: int) -> None:
        self.energy = energy
        self.rounding = ROUNDING * energy
        self.lower, self.upper, self.residuals = rules(krylov, self.rounding)
        self.probes, self.limit = krylov.start.shape[1], limit
        self.rest = max(limit - len(krylov.matrix), 0)
        self.missing = max(energy - float(self.upper.values.sum()), 0.0)
        exhausted = self.rest == 0 or self.missing <= self.rounding
        self.confirmed = [] if exhausted else _confirmed_pairs(krylov, energy)
        excess = self._corrected(lambda x: x, self.upper) - energy
        # If A is diagonal, all probes have the same excess: a regression slope would fit rounding errors.
        flat = float(excess.std()) < NO_SPREAD * energy
        self._control = torch.zeros_like(excess) if flat else excess

    def by_probes(self, function: Function) -> Bracket:
        """Return a bracket of tr f(A): the means over probes of the lower and the upper quadrature rule."""
        return self.between(
            self._corrected(self._floored(function), self.lower), self._corrected(function, self.upper)
        )

    def by_ritz(self, function: Function) -> Bracket:
        """Return a bracket of tr f(A) from all Ritz values θ, without probes, for concave f ≥ 0.

        The lower end is Σ f(θ). The upper end adds the most that the energy outside the Krylov space can add.
        Both ends are bounds, because the eigenvalues of A majorize the eigenvalues of its diagonal blocks.
        """
        values = self.upper.values
        low, high = float(self._floored(function)(values).sum()), float(function(values).sum())
        if self.rest:
            share = torch.tensor((self.missing + self.rounding) / self.rest, dtype=torch.float64)
            high += self.rest * float(function(share))
        return Bracket((low + high) / 2, abs(high - low) / 2, 0.0)

    def between(self, low: Float64[Tensor, " P"], high: Float64[Tensor, " P"]) -> Bracket:
        """Return a bracket from mean ``low`` to mean ``high``, both corrected by the control variate."""
        low_mean, low_error = intercept_at_zero(low, self._control)
        high_mean, high_error = intercept_at_zero(high, self._control)
        return Bracket((low_mean + high_mean) / 2, abs(high_mean - low_mean) / 2, max(low_error, high_error))

    def deflation(self, function: Function) -> Float64[Tensor, " P"]:
        """Return, for each probe x, the correction Σ f(θ) (1 − (yᵀx)²) over Ritz pairs of the other half."""
        if not self.confirmed:
            return self.upper.weights.new_zeros(self.probes)
        return torch.cat([function(pairs.values) @ (1 - pairs.squares) for pairs in self.confirmed])

    def _corrected(self, function: Function, rule: Nodes) -> Tensor:
        return function(rule.values) @ rule.weights + self.deflation(function)

    def _floored(self, function: Function) -> Function:
        return lambda x: function(torch.where(x > self.rounding, x, 0.0))


def rules(krylov: Krylov, tolerance: float) -> tuple[Nodes, Nodes, Float64[Tensor, " N"]]:
    """Return the block Gauss–Radau rule with nodes at 0, the block Gauss rule, and residuals at Gauss nodes.

    For a function such as the square root, whose derivatives alternate in sign (+ − + −), the Gauss–Radau
    rule is a lower bound and the Gauss rule an upper bound. Eigenvalues below ``tolerance`` count as 0.
    Source: G. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", 2010.
    """
    values, vectors = torch.linalg.eigh(krylov.matrix)
    upper = Nodes(values.clamp(min=0), (vectors.mT @ krylov.start).square())
    tail = krylov.tail @ vectors
    smallest = max(tolerance, torch.finfo(values.dtype).tiny)
    half = tail / values.clamp(min=smallest).sqrt()  # a Schur complement of 0 adds the node 0
    extended = torch.cat([torch.cat([values.diag(), tail.mT], 1), torch.cat([tail, half @ half.mT], 1)])
    values, mixed = torch.linalg.eigh(extended)
    weights = (mixed[: len(vectors)].mT @ (vectors.mT @ krylov.start)).square()
    return Nodes(values.clamp(min=0), weights), upper, tail.norm(dim=0)


def intercept_at_zero(values: Tensor, control: Tensor) -> tuple[float, float]:
    """Return the value of a linear regression on ``control`` at control = 0, and its standard error.

    The control has mean 0 in expectation. The error is the HC3 estimate (MacKinnon and White 1985), which
    leaves out each probe in turn. So the error is valid for few probes, and if the variance depends on the
    control.
    """
    middle = control.mean()
    centred = control - middle
    spread = centred.square().sum()
    share = torch.where(spread > 0, centred / torch.where(spread > 0, spread, 1.0), 0.0)
    slope = share @ values
    residuals = values - values.mean() - slope * centred
    weights = 1 / len(values) - middle * share
    leverage = 1 / len(values) + share * centred
    error = (weights * residuals / (1 - leverage).clamp(min=1e-3)).norm()
    return float(values.mean() - slope * middle), float(error)


def _confirmed_pairs(krylov: Krylov, energy: float) -> list[ConfirmedPairs]:
    """Return the Ritz pairs that are in the Krylov spaces of both halves of the probes.

    Both spaces are subspaces of the space of all probes, so no product with M is needed. If an eigenvalue has
    more eigenvectors than a half has probes, each half finds only a part of its eigenspace. The parts differ
    between the halves, so such pairs are not returned.
    """
    half = krylov.start.shape[1] // 2

    def apply(block: Tensor) -> tuple[Tensor, Tensor]:
        image = krylov.matrix @ block
        return image, block.mT @ image

    def ritz(start: Tensor) -> tuple[Tensor, Tensor]:
        # The tolerance is above rounding, because rounding alone may put a direction into both halves.
        subspace = block_lanczos(apply, start, krylov.steps, 1e-10 * energy, keep_basis=True)
        values, vectors = torch.linalg.eigh(subspace.matrix)
        assert subspace.basis is not None
        return values.clamp(min=0), subspace.basis @ vectors

    first, second = ritz(krylov.start[:, :half]), ritz(krylov.start[:, half:])
    overlap = (first[1].mT @ second[1]).square()
    by_row, by_column = overlap.sum(1) > SAME, overlap.sum(0) > SAME
    return [
        ConfirmedPairs(second[0][by_column], (second[1][:, by_column].mT @ krylov.start[:, :half]).square()),
        ConfirmedPairs(first[0][by_row], (first[1][:, by_row].mT @ krylov.start[:, half:]).square()),
    ]


class EigenvalueCounter:
    """Counter of the eigenvalues of A = MᵀM that are at least a threshold t, from an estimator of traces.

    A count is the trace of a step function, which no low-degree polynomial approximates well. Two methods
    bracket the count without assuming smoothness:

    - By energy: at least as many eigenvalues as Ritz values are above t (Cauchy interlacing). Each further
      eigenvalue above t needs a part of the trace that is not in the Krylov space, which limits their number.
    - By probes: for each probe, a Gauss rule with a node at t bounds the spectral weight above t
      (Chebyshev–Markov–Stieltjes inequalities). Converged Ritz values are counted directly.

    Source: N. Akhiezer, "The Classical Moment Problem", 1965. Golub and Meurant 2010 describe the rule with
    a node at t.
    """

    def __init__(self, estimator: TraceEstimator, steps: int) -> None:
        self.estimator = estimator
        values, weights = estimator.upper
        settled = estimator.residuals <= CONVERGED * values
        settled |= values <= estimator.rounding  # values at rounding level count as 0: they are settled
        self.settled = Nodes(values[settled], weights[settled])
        spent = math.ceil(int(settled.sum()) / weights.shape[1])  # a Lanczos step settles one value per probe
        self.rule = _scalar_rule(Nodes(values[~settled], weights[~settled]), max(steps - spent, 1))

    def count(self, threshold: float, quantile: float) -> Numbers:
        """Return the estimated number of eigenvalues ≥ ``threshold``, its standard error, and its interval.

        The statistical part of the interval is ± ``quantile`` standard errors over probes. Number and error
        are NaN if the quadrature error is too large.
        """
        fewest, most = self.by_energy(threshold)
        bracket = self.by_probes(threshold)
        reach = bracket.reach(quantile) + CONVERGED * (1 + abs(bracket.value))
        low = max(fewest, math.ceil(bracket.value - reach))
        high = min(most, math.floor(bracket.value + reach))
        if low > high or most - fewest <= 2 * reach:  # use bounds by energy, which hold for any probes
            low, high, bracket = fewest, most, Bracket((fewest + most) / 2, (most - fewest) / 2, 0.0)
        value = float(min(max(bracket.value, low), high))
        if bracket.half_width > max(0.5, SHARP * value):
            return math.nan, math.nan, float(low), float(high)
        return value, math.hypot(bracket.half_width, bracket.stderr), float(low), float(high)

    def by_energy(self, threshold: float) -> tuple[int, int]:
        """Return the smallest and largest possible number of eigenvalues ≥ ``threshold``, up to rounding."""
        estimator = self.estimator
        values = estimator.upper.values.flip(0)
        fewest = int((values >= threshold + estimator.rounding).sum())
        candidates = torch.cat([values[fewest:], values.new_zeros(estimator.rest)])
        cost = (threshold - candidates).clamp(min=0).cumsum(0)
        affordable = cost <= estimator.missing + estimator.rounding * (1 + len(values)) ** 0.5
        return fewest, min(fewest + int(affordable.sum()), estimator.limit)

    def by_probes(self, threshold: float) -> Bracket:
        """Return a bracket of the count, from the mean lower bound and the mean upper bound over probes."""

        def step(x: Tensor) -> Tensor:
            return (x >= threshold).to(x.dtype)

        sure = step(self.settled.values) @ self.settled.weights + self.estimator.deflation(step)
        low, high = _weight_above(self.rule, threshold)
        return self.estimator.between(sure + low, sure + high)


class ScalarRule(NamedTuple):
    """Gauss rules of the spectral measures of P probes: N×N Jacobi matrices and total weights."""

    jacobi: Float64[Tensor, "P N N"]
    mass: Float64[Tensor, " P"]


def _scalar_rule(nodes: Nodes, steps: int) -> ScalarRule:
    """Return the Gauss rule of each probe's spectral measure (nodes) after ``steps`` Lanczos steps."""
    values, weights = nodes
    mass = weights.sum(0)
    vector = (weights / mass.clamp(min=torch.finfo(mass.dtype).tiny)).sqrt().mT
    count = min(steps, len(values))
    jacobi = weights.new_zeros(len(mass), count, count)
    basis = weights.new_zeros(len(mass), len(values), count)
    for step in range(count):
        basis[..., step] = vector
        image = values * vector
        jacobi[:, step, step] = (image * vector).sum(-1)
        for _ in range(2):
            image = image - (basis @ (basis.mT @ image[..., None]))[..., 0]
        length = image.norm(dim=-1, keepdim=True)
        length = torch.where(length > ROUNDING * values.max(), length, 0.0)
        vector = torch.where(length > 0, image / length, 0.0)
        if step + 1 < count:
            jacobi[:, step, step + 1] = jacobi[:, step + 1, step] = length[:, 0]
    return ScalarRule(jacobi, mass)


def _weight_above(rule: ScalarRule, threshold: float) -> tuple[Tensor, Tensor]:
    """Return a lower and an upper bound of each probe's spectral weight on eigenvalues ≥ ``threshold``."""
    jacobi, mass = rule
    if jacobi.shape[-1] < 2:
        return torch.zeros_like(mass), mass
    shifted = jacobi[:, :-1, :-1].clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(threshold)
    coupling = jacobi[:, -2, -1]
    column = torch.zeros_like(shifted[..., :1])
    column[:, -1, 0] = coupling
    pinned = jacobi.clone()
    pinned[:, -1, -1] = threshold + coupling * torch.linalg.solve(shifted, column)[:, -1, 0]
    values, vectors = torch.linalg.eigh(pinned)
    weights = vectors[:, 0].square() * mass[:, None]
    node = (values - threshold).abs().argmin(-1, keepdim=True)
    beyond = (weights * (values > threshold).scatter(1, node, False)).sum(-1)
    return beyond, beyond + weights.gather(1, node)[:, 0]
