"""How many eigenvalues lie above a threshold, as far as a Krylov space can tell."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.quadrature import ROUNDING, Bracket, Nodes, TraceEstimator

CONVERGED = 1e-6
"""A Ritz value with a residual below this share of it is an eigenvalue of its own."""

SHARP = 0.05
"""A count is a number, and not only an interval, if quadrature leaves at most this share of it open."""


class Counter:
    """Counts eigenvalues of A = MᵀM above any threshold, from the estimator of its traces.

    A count is the trace of a step, which no polynomial follows. Two brackets hold without smoothness:

    - By energy: at least as many eigenvalues as Ritz values lie above t (Cauchy); every further one
      lifts a Ritz value to t, and the energy that is missing pays for it.
    - By probes: for each probe the Chebyshev–Markov–Stieltjes inequalities bound the weight above t by the
      Gauss rule with a node at t. Converged Ritz values are taken out first; they need no bound.

    Source: N. Akhiezer, "The Classical Moment Problem", 1965; Golub and Meurant 2010 for the rule with a node
    at t.

    Args:
        estimator: what is known of A.
        steps: products with A that its quadrature is good for.
    """

    def __init__(self, estimator: TraceEstimator, steps: int) -> None:
        self.estimator = estimator
        values, weights = estimator.upper
        settled = estimator.residuals <= CONVERGED * values
        settled |= values <= estimator.rounding  # zero, as far as any threshold can tell
        self.settled = Nodes(values[settled], weights[settled])
        spent = math.ceil(int(settled.sum()) / weights.shape[1])  # a step settles a value for each probe
        self.rule = _scalar_rule(Nodes(values[~settled], weights[~settled]), max(steps - spent, 1))

    def count(self, threshold: float, quantile: float) -> tuple[float, float, float, float]:
        """The count, its standard error, and the ends of its interval; both NaN where it is not sharp.

        Args:
            threshold: t.
            quantile: standard errors to the end of an interval.
        """
        fewest, most = self.by_energy(threshold)
        bracket = self.by_probes(threshold)
        reach = bracket.reach(quantile) + CONVERGED * (1 + abs(bracket.value))
        low = max(fewest, math.ceil(bracket.value - reach))
        high = min(most, math.floor(bracket.value + reach))
        if low > high or most - fewest <= 2 * reach:  # energy is never wrong
            low, high, bracket = fewest, most, Bracket((fewest + most) / 2, (most - fewest) / 2, 0.0)
        value = float(min(max(bracket.value, low), high))
        if bracket.half_width > max(0.5, SHARP * value):
            return math.nan, math.nan, float(low), float(high)
        return value, math.hypot(bracket.half_width, bracket.stderr), float(low), float(high)

    def by_energy(self, threshold: float) -> tuple[int, int]:
        """The fewest and the most eigenvalues at or above the threshold: a certainty, up to rounding.

        Args:
            threshold: t.
        """
        estimator = self.estimator
        values = estimator.upper.values.flip(0)
        fewest = int((values >= threshold + estimator.rounding).sum())
        candidates = torch.cat([values[fewest:], values.new_zeros(estimator.rest)])
        price = (threshold - candidates).clamp(min=0).cumsum(0)
        affordable = price <= estimator.missing + estimator.rounding * (1 + len(values)) ** 0.5
        return fewest, min(fewest + int(affordable.sum()), estimator.limit)

    def by_probes(self, threshold: float) -> Bracket:
        """The count by the mean over probes, between the bounds for each.

        Args:
            threshold: t.
        """

        def step(x: Tensor) -> Tensor:
            return (x >= threshold).to(x.dtype)

        sure = step(self.settled.values) @ self.settled.weights + self.estimator.deflation(step)
        low, high = _weight_above(self.rule, threshold)
        return self.estimator.between(sure + low, sure + high)


class ScalarRule(NamedTuple):
    """A Gauss rule for each probe, as the Jacobi matrix of its weight."""

    jacobi: Float64[Tensor, "P N N"]
    mass: Float64[Tensor, " P"]


def _scalar_rule(nodes: Nodes, steps: int) -> ScalarRule:
    """Lanczos on each probe's own discrete weight; fully reorthogonalised."""
    values, weights = nodes
    mass = weights.sum(0)
    vector = (weights / mass.clamp(min=torch.finfo(mass.dtype).tiny)).sqrt().mT
    count = min(steps, len(values))
    jacobi = weights.new_zeros(len(mass), count, count)
    basis = weights.new_zeros(len(mass), len(values), count)
    for at in range(count):
        basis[..., at] = vector
        image = values * vector
        jacobi[:, at, at] = (image * vector).sum(-1)
        for _ in range(2):
            image = image - (basis @ (basis.mT @ image[..., None]))[..., 0]
        length = image.norm(dim=-1, keepdim=True)
        length = torch.where(length > ROUNDING * values.max(), length, 0.0)
        vector = torch.where(length > 0, image / length, 0.0)
        if at + 1 < count:
            jacobi[:, at, at + 1] = jacobi[:, at + 1, at] = length[:, 0]
    return ScalarRule(jacobi, mass)


def _weight_above(rule: ScalarRule, threshold: float) -> tuple[Tensor, Tensor]:
    """Bounds of each probe's weight above t: what the rule with a node at t has beyond it, and from it on."""
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
