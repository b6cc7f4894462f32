"""The ranks of a matrix that is never formed, from products with it, each with its error."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from rankwise._internals.statistics import t_quantile
from rankwise._internals.threads import map_threads
from rankwise.errors import RankwiseError, ShapeError
from rankwise.measures.counting import Counter
from rankwise.measures.krylov import Gram, Krylov, block_lanczos
from rankwise.measures.quadrature import ROUNDING, Bracket, Function, TraceEstimator
from rankwise.measures.rank import Estimate, RankEstimates, check_delta
from rankwise.measures.registry import Mixing, to_float64
from rankwise.operators import DenseMixing, MixingOperator

__all__ = [
    "SpectrumEstimate",
    "estimate_spectrum",
]

Numbers = tuple[float, float, float, float]
"""Value, standard error, and the ends of the interval."""

SURE_STEPS = 16
"""From so many steps on a block of 8 vectors has found the largest eigenvalue, if not to all digits: one
vector alone is within 9 % of λ_1 at T = 2,048 but for a chance of 1 %. Source: J. Kuczyński and
H. Woźniakowski, SIAM J. Matrix Anal. Appl. 1992."""

UNDER_WAY_BYTES = 2**29
"""Of Krylov spaces beside each other, or of one where that is more: then it has all threads."""

NOTHING: Numbers = (math.nan, math.nan, math.nan, math.nan)
ZERO: Numbers = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SpectrumEstimate:
    """What `estimate_spectrum` found, for each matrix of the operator's leading axes."""

    effective_rank: Estimate
    """exp(−Σ p_i log p_i) with p = σ/Σσ."""
    stable_rank: Estimate
    """‖M‖_F²/σ_1²."""
    sigma_max: Estimate
    """σ_1."""
    products: Int64[Tensor, "*batch"]
    """Products of M or Mᵀ with one vector that were made."""
    probes: int
    steps: int
    seed: int
    _heads: list["_Head | None"] = field(repr=False)

    def count(self, delta: float) -> Estimate:
        """How many singular values are at least δ, as far as the products made can tell.

        The value is a number where quadrature leaves at most a twentieth of it open (or half of one); where
        more singular values lie too near to δ to be told apart, it is NaN, and the interval is the answer.
        Cost: no product; decompositions of order ``steps``, ``probes`` of them, for each matrix.

        Args:
            delta: the threshold, absolute as in `numerical_rank`.

        Raises:
            RankwiseError: if ``delta`` is not finite and positive.

        Examples:
            >>> import torch
            >>> spectrum = estimate_spectrum(torch.diag(torch.tensor([1.0, 0.1, 0.001])))
            >>> spectrum.count(0.05).value.item(), spectrum.count(0.5).value.item()
            (2.0, 1.0)
        """
        check_delta(delta)
        return _each(self._heads, self.products, lambda head: head.count(delta))

    def relative_count(self, delta: float) -> Estimate:
        """How many singular values are at least δσ_1: `count` at δ times the estimate of σ_1.

        The interval holds the count for every σ_1 of its own interval.

        Args:
            delta: the share of σ_1.

        Raises:
            RankwiseError: if ``delta`` is not finite and positive.

        Examples:
            >>> import torch
            >>> spectrum = estimate_spectrum(torch.diag(torch.tensor([100.0, 10.0, 0.1])))
            >>> spectrum.relative_count(0.05).value.item()
            2.0
        """
        check_delta(delta)
        return _each(self._heads, self.products, lambda head: head.relative_count(delta))

    def estimates(self, deltas: Sequence[float]) -> RankEstimates:
        """Return all ranks: `count` at each threshold, and `relative_count` at the first."""
        return RankEstimates(
            tuple(self.count(delta) for delta in deltas),
            self.relative_count(deltas[0]),
            self.effective_rank,
            self.stable_rank,
            self.sigma_max,
        )


def estimate_spectrum(op: Mixing, probes: int = 16, steps: int = 64, seed: int = 0) -> SpectrumEstimate:
    """Estimate the ranks of matrices that are never formed.

    Block Lanczos on MᵀM from random ±1 vectors, fully reorthogonalised: what the strongest directions
    contribute is found by it, the rest of a trace is a mean over the vectors, corrected by ‖M‖_F², which is
    summed over the rows. How, and from which papers: `TraceEstimator`, and for counts `Counter`.

    Range and direction: those of `effective_rank`, `stable_rank` and `numerical_rank`.
    Errors: each interval holds the exact number for at least 95 % of seeds. Chance falls with 1/√probes, the
    part of quadrature with steps; it is largest for sharp heads, where many σ near 0 stand beside many
    near 1. σ below 1e-7·‖M‖_F is not told from 0. Where S ≤ probes·steps, or where the products exhaust a
    low rank, the answer is exact to rounding.
    Cost: at most 2·probes·steps products with one vector for each matrix; of softmax attention that is
    ``steps`` walks over its rows, O(T S (K + probes)) time each, and one more for ‖M‖_F. Memory is
    8·S·probes·steps bytes and a block of rows for each matrix; on a CPU, as many matrices beside each other
    as 512 MiB hold.
    Randomness: the seed draws the same vectors for every matrix of one S, on any device, so that a matrix
    has one answer, alone or in any batch. The errors of matrices that are nearly alike are therefore alike.

    Args:
        op: an operator, or a tensor (..., T, S).
        probes: random vectors, even and at least 8.
        steps: products with MᵀM, at least 4.
        seed: of the random vectors; torch's own generators are left alone.

    Raises:
        ShapeError: if ``op`` is not (..., T, S) with T, S ≥ 1.
        RankwiseError: if ``probes`` or ``steps`` cannot be used.

    Examples:
        >>> import torch
        >>> from rankwise.measures import effective_rank
        >>> matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).softmax(-1)
        >>> estimate = estimate_spectrum(matrix, probes=8, steps=16).effective_rank
        >>> bool(estimate.low <= effective_rank(matrix) <= estimate.high)
        True
    """
    operator = _operator(op)
    _check_budget(probes, steps)
    batch = operator.shape[:-2]
    with torch.no_grad():
        indices = list(itertools.product(*map(range, batch)))
        needed = 8 * operator.shape[-1] * probes * steps
        heads = map_threads(
            lambda index: _measure(operator[index] if index else operator, probes, steps, seed),
            indices,
            max(1, UNDER_WAY_BYTES // needed) if operator.device.type == "cpu" else 1,
        )
        device = "cpu" if operator.device.type == "mps" else operator.device
        counts = [0 if head is None else head.products for head in heads]
        products = torch.tensor(counts, dtype=torch.int64, device=device).reshape(batch)
        return SpectrumEstimate(
            effective_rank=_each(heads, products, _Head.effective_rank),
            stable_rank=_each(heads, products, _Head.stable_rank),
            sigma_max=_each(heads, products, _Head.sigma_max),
            products=products,
            probes=probes,
            steps=steps,
            seed=seed,
            _heads=heads,
        )


class _Head:
    """What is known of one matrix, as plain numbers in units of ``scale``."""

    def __init__(self, gram: Gram, krylov: Krylov, products: int, steps: int) -> None:
        self.scale, self.energy, self.products, self.steps = gram.scale, gram.energy, products, steps
        self.limit = min(gram.rows, gram.columns)
        self.estimator = TraceEstimator(krylov, self.energy, self.limit)
        self.quantile = t_quantile(krylov.start.shape[1] - 2)
        self._counter: Counter | None = None

    def effective_rank(self) -> Numbers:
        if self.energy == 0:
            return ZERO
        by_ritz, by_probes = self._entropy(self.estimator.by_ritz), self._entropy(self.estimator.by_probes)
        middle, bracket = min(by_ritz, by_probes, key=lambda found: found[1].reach(self.quantile))
        reach = bracket.reach(self.quantile)
        reach += reach * reach + ROUNDING  # the second order, and rounding
        low, value, high = (
            min(max(math.exp(number), 1.0), float(self.limit))
            for number in (middle - reach, middle, middle + reach)
        )
        return value, value * math.hypot(bracket.half_width, bracket.stderr), low, high

    def _entropy(self, trace: Callable[[Function], Bracket]) -> tuple[float, Bracket]:
        """H = log Σσ + Σ(−σ log σ)/Σσ, and the trace on which H depends to first order, for its errors."""
        total, entropy = trace(torch.sqrt).value, trace(_sigma_entropy).value
        slope = 1 - entropy / total

        def change(x: Tensor) -> Tensor:
            return (slope * x.sqrt() + _sigma_entropy(x)) / total

        return math.log(total) + entropy / total, trace(change)

    def stable_rank(self) -> Numbers:
        if self.energy == 0:
            return ZERO
        low, top, high = self._top()
        value = self.energy / top
        return value, value - self.energy / high, max(self.energy / high, 1.0), self.energy / low

    def sigma_max(self) -> Numbers:
        low, top, high = (self.scale * math.sqrt(number) for number in self._top())
        return top, high - top, low, high

    def count(self, delta: float) -> Numbers:
        if self.energy == 0:
            return ZERO
        if self._counter is None:
            self._counter = Counter(self.estimator, self.steps)
        relative = min(delta / self.scale, 1e100)  # no σ reaches that, and its square is finite
        return self._counter.count(relative * relative, self.quantile)

    def relative_count(self, delta: float) -> Numbers:
        top, _, low, high = self.sigma_max()
        if top == 0:
            return ZERO
        value, stderr, _, _ = self.count(delta * top)
        return value, stderr, self.count(delta * high)[2], self.count(delta * low)[3]

    def _top(self) -> tuple[float, float, float]:
        """λ_1: a Ritz value is at most it; the residual, squared over the gap, is how far it may be above.

        That holds if the largest Ritz value is near λ_1 and no other eigenvalue, which few steps do not
        make sure of: then all the energy that no Ritz value holds may belong to it.
        """
        values, residuals = self.estimator.upper.values, self.estimator.residuals
        top, residual = float(values[-1]), float(residuals[-1])
        gap = top - float((values + residuals)[-2]) if len(values) > 1 else math.inf
        error = residual * residual / gap if gap > residual else residual
        rounding = self.estimator.rounding
        if self.steps < SURE_STEPS:
            error = self.estimator.missing
        return max(top - rounding, 0.0), top, top + error + rounding


def _measure(operator: MixingOperator, probes: int, steps: int, seed: int) -> _Head | None:
    gram = Gram(operator)
    if not gram.finite:
        return None
    vectors = _signs(gram.columns, probes, seed).to(gram.device)
    if gram.columns <= probes * steps:
        return _Head(gram, _whole(gram, vectors), 2 * gram.columns, steps)
    krylov = block_lanczos(gram, vectors, steps, ROUNDING * gram.energy)
    return _Head(gram, krylov, 2 * probes * krylov.steps, steps)


def _whole(gram: Gram, vectors: Tensor) -> Krylov:
    """MᵀM itself, where the Krylov space may be the whole space: fewer products, and no smaller matrix."""
    identity = torch.eye(gram.columns, dtype=torch.float64, device=gram.device)
    return Krylov(gram(identity)[1], vectors, torch.zeros_like(vectors.mT), 1, None)


def _signs(size: int, count: int, seed: int) -> Tensor:
    """±1, drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (size, count), generator=generator).to(torch.float64) * 2 - 1


def _sigma_entropy(eigenvalues: Tensor) -> Tensor:
    """−σ log σ of σ = √λ."""
    return torch.special.entr(eigenvalues.sqrt())


def _each(heads: list[_Head | None], like: Tensor, measure: Callable[[_Head], Numbers]) -> Estimate:
    numbers = [NOTHING if head is None else measure(head) for head in heads]
    columns = torch.tensor(numbers, dtype=torch.float64, device=like.device).reshape(*like.shape, 4)
    return Estimate(*columns.unbind(-1))


def _operator(op: Mixing) -> MixingOperator:
    shape = op.shape if isinstance(op, MixingOperator | Tensor) else None
    if shape is None or len(shape) < 2 or 0 in shape[-2:]:
        raise ShapeError(
            "`estimate_spectrum`",
            expected="a MixingOperator or a tensor of shape (..., T, S) with T, S ≥ 1",
            got=type(op).__name__ if shape is None else str(tuple(shape)),
            fix="Wrap an array with torch.as_tensor; give each matrix at least one row and one column.",
        )
    if isinstance(op, MixingOperator):
        return op
    return DenseMixing(op if op.is_floating_point() else to_float64(op, "`estimate_spectrum`"))


def _check_budget(probes: int, steps: int) -> None:
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 8 or probes % 2:
        raise RankwiseError(
            "`probes`",
            expected="an even number, at least 8",
            got=str(probes),
            fix="Each half corrects the other, and fewer may agree by chance; 16 is a good number.",
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 4:
        raise RankwiseError(
            "`steps`",
            expected="a whole number, at least 4",
            got=str(steps),
            fix="Each step is a product with M and one with its transpose; 64 is a good number.",
        )
