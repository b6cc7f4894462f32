"""From a Krylov space of random probes to traces of functions of a matrix, each with its two errors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.krylov import Krylov, block_lanczos

Function = Callable[[Tensor], Tensor]
"""f(λ), elementwise, with f(0) = 0."""

ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Eigenvalues of A, and couplings between vectors, below this share of its trace are rounding."""

NO_SPREAD = 1e-10
"""A control that differs less than this share of tr A between probes is constant."""

SAME = 0.999
"""A Ritz vector of one half of the probes counts as found by the other half too from this cos² on."""


class Nodes(NamedTuple):
    """A quadrature rule for each starting vector x: Σ f(values) · weights ≈ xᵀ f(A) x."""

    values: Float64[Tensor, " N"]
    weights: Float64[Tensor, "N P"]


class Bracket(NamedTuple):
    """A number that is known up to quadrature, and up to chance."""

    value: float
    half_width: float
    """Quadrature: the truth of these probes lies within value ± half_width."""
    stderr: float
    """Chance: the standard error over probes. 0: no probe was needed."""

    def reach(self, quantile: float) -> float:
        """Half the width of the interval that covers both."""
        return self.half_width + quantile * self.stderr


class Found(NamedTuple):
    """Ritz pairs found by one half of the probes and confirmed by the other, on which they are used."""

    values: Float64[Tensor, " R"]
    squares: Float64[Tensor, "R Q"]
    """(yᵀx)², y of one half, x of the other: 1 on average."""


class TraceEstimator:
    r"""Estimates tr f(A) for A = MᵀM from its compression to a Krylov space of Rademacher probes.

    For each probe x, xᵀ f(A) x has mean tr f(A). Three things make the spread over probes small, and none
    of them adds a bias:

    - A Ritz vector y of one half of the probes has E (yᵀx)² = 1 for a probe x of the other half:
      f(θ) (1 − (yᵀx)²) is added. This takes out what the strongest directions contribute (Hutch++,
      Krylov-aware trace estimation).
    - xᵀ A x has mean ‖M‖_F², which is known: what is left is regressed on what is left of that.
    - Where the space holds all of the energy, Σ f(θ) is the trace, and no probe is asked.

    Source: T. Chen and E. Hallman, "Krylov-aware stochastic trace estimation", SIAM J. Matrix Anal. Appl.
    2023; R. Meyer et al., "Hutch++", SOSA 2021; S. Ubaru et al., "Fast estimation of tr(f(A)) via stochastic
    Lanczos quadrature", SIAM J. Matrix Anal. Appl. 2017.

    Args:
        krylov: A compressed to the Krylov space of all probes.
        energy: tr A.
        limit: no more than this many eigenvalues are not zero.
    """

    def __init__(self, krylov: Krylov, energy: float, limit: int) -> None:
        self.energy = energy
        self.rounding = ROUNDING * energy
        self.lower, self.upper, self.residuals = rules(krylov, self.rounding)
        self.probes, self.limit = krylov.start.shape[1], limit
        self.rest = max(limit - len(krylov.matrix), 0)
        self.missing = max(energy - float(self.upper.values.sum()), 0.0)
        exhausted = self.rest == 0 or self.missing <= self.rounding
        self.found = [] if exhausted else _found_twice(krylov, energy)
        excess = self._corrected(lambda x: x, self.upper) - energy
        # Where A is diagonal every probe has the same: no slope can be read off rounding.
        flat = float(excess.std()) < NO_SPREAD * energy
        self._control = torch.zeros_like(excess) if flat else excess

    def by_probes(self, function: Function) -> Bracket:
        """The mean over probes, between the lower and the upper quadrature rule."""
        return self.between(
            self._corrected(self._floored(function), self.lower), self._corrected(function, self.upper)
        )

    def by_ritz(self, function: Function) -> Bracket:
        """Between Σ f(θ) over all Ritz values and that plus all that the missing energy can add.

        For a concave f ≥ 0: the eigenvalues of a matrix majorise those of its diagonal blocks.
        """
        values = self.upper.values
        low, high = float(self._floored(function)(values).sum()), float(function(values).sum())
        if self.rest:
            share = torch.tensor((self.missing + self.rounding) / self.rest, dtype=torch.float64)
            high += self.rest * float(function(share))
        return Bracket((low + high) / 2, abs(high - low) / 2, 0.0)

    def between(self, low: Float64[Tensor, " P"], high: Float64[Tensor, " P"]) -> Bracket:
        """Mean of each of two numbers per probe, each regressed on the excess of xᵀ A x."""
        low_mean, low_error = _intercept(low, self._control)
        high_mean, high_error = _intercept(high, self._control)
        return Bracket((low_mean + high_mean) / 2, abs(high_mean - low_mean) / 2, max(low_error, high_error))

    def deflation(self, function: Function) -> Float64[Tensor, " P"]:
        """For each probe, f(θ) (1 − (yᵀx)²) summed over the Ritz pairs of the other half."""
        if not self.found:
            return self.upper.weights.new_zeros(self.probes)
        return torch.cat([function(pairs.values) @ (1 - pairs.squares) for pairs in self.found])

    def _corrected(self, function: Function, rule: Nodes) -> Tensor:
        return function(rule.values) @ rule.weights + self.deflation(function)

    def _floored(self, function: Function) -> Function:
        return lambda x: function(torch.where(x > self.rounding, x, 0.0))


def rules(krylov: Krylov, tolerance: float) -> tuple[Nodes, Nodes, Float64[Tensor, " N"]]:
    """Block Gauss–Radau with nodes at 0, block Gauss, and the residual of each Gauss node as an eigenvalue.

    Of a function whose derivatives alternate in sign from the first, + − + −, such as the square root, the
    first is a lower and the second an upper bound.
    Source: G. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", 2010.

    Args:
        krylov: a compressed matrix.
        tolerance: eigenvalues below this are rounding.
    """
    values, vectors = torch.linalg.eigh(krylov.matrix)
    upper = Nodes(values.clamp(min=0), (vectors.mT @ krylov.start).square())
    tail = krylov.tail @ vectors
    smallest = max(tolerance, torch.finfo(values.dtype).tiny)
    half = tail / values.clamp(min=smallest).sqrt()  # Schur complement 0: the extension is singular
    extended = torch.cat([torch.cat([values.diag(), tail.mT], 1), torch.cat([tail, half @ half.mT], 1)])
    values, mixed = torch.linalg.eigh(extended)
    weights = (mixed[: len(vectors)].mT @ (vectors.mT @ krylov.start)).square()
    return Nodes(values.clamp(min=0), weights), upper, tail.norm(dim=0)


def _intercept(values: Tensor, control: Tensor) -> tuple[float, float]:
    """Where values are expected to be where the control, of mean 0, is 0; and its standard error.

    The error leaves each probe out in turn (MacKinnon and White 1985, HC3): the spread of
    few probes is not normal, nor the same whatever the control.
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


def _found_twice(krylov: Krylov, energy: float) -> list[Found]:
    """Ritz pairs that the Krylov space of each half of the probes holds by itself.

    Both lie in the space of all probes, so they are made there, without the operator. Only pairs whose vector
    lies in both spaces are kept: of an eigenvalue with more eigenvectors than a half has probes, each half
    finds a part that depends on its probes, and such a part must not be taken for all of it.
    """
    half = krylov.start.shape[1] // 2

    def apply(block: Tensor) -> tuple[Tensor, Tensor]:
        image = krylov.matrix @ block
        return image, block.mT @ image

    def ritz(start: Tensor) -> tuple[Tensor, Tensor]:
        # Well above rounding: a direction that only noise couples belongs to the other half as well.
        part = block_lanczos(apply, start, krylov.steps, 1e-10 * energy, keep_basis=True)
        values, vectors = torch.linalg.eigh(part.matrix)
        assert part.basis is not None
        return values.clamp(min=0), part.basis @ vectors

    first, second = ritz(krylov.start[:, :half]), ritz(krylov.start[:, half:])
    overlap = (first[1].mT @ second[1]).square()
    by_row, by_column = overlap.sum(1) > SAME, overlap.sum(0) > SAME
    return [
        Found(second[0][by_column], (second[1][:, by_column].mT @ krylov.start[:, :half]).square()),
        Found(first[0][by_row], (first[1][:, by_row].mT @ krylov.start[:, half:]).square()),
    ]
