"""One pass over the rows of mixing matrices (operators), block by block, for all measures of rows.

Each measure of rows declares which row statistics it reads. A measure is called with an operator, or with a
`RowWalk`, which is one pass that fills the statistics of several measures. No whole matrix is formed.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import MATRIX, norm, ratio, unit_scale
from rankwise._internals.threads import PARALLEL_BYTES, map_threads
from rankwise.errors import ShapeError
from rankwise.measures.registry import MEASURES, Mixing, Rows, RowStatistic, as_operator
from rankwise.operators import MixingOperator

BLOCK_BYTES = {"cpu": 2**22}
"""Bytes of float64 rows per block on a CPU, so that a block fits into the CPU cache."""
DEVICE_BLOCK_BYTES = 2**28
"""Bytes of float64 rows per block on an accelerator."""
FAR, FAR_SCALE = 2.0**900, 2.0**64
"""A matrix with an entry above FAR is divided by FAR_SCALE, and a matrix whose entries are all below 1/FAR is
multiplied by FAR_SCALE. Sums and means of entries then neither overflow nor underflow."""

__all__ = ["compute_measures"]

Statistic = TypeVar("Statistic", bound=RowStatistic)


class RowWalk:
    """One pass over the rows of an operator, which fills row statistics of matrices divided by ``scale``."""

    def __init__(
        self,
        operator: MixingOperator,
        statistics: Iterable[type[RowStatistic]],
        scale: Float64[Tensor, "*batch 1 1"],
    ) -> None:
        self.scale, self.tokens = scale, operator.shape[-2]
        self.statistics = [statistic(operator, scale) for statistic in statistics]
        self.largest = torch.zeros_like(scale[..., 0, 0])
        """Largest magnitude of each matrix; NaN or infinity if the matrix contains NaN or infinity."""
        self.size = torch.zeros_like(self.largest)
        """Frobenius norm ‖M‖_F of each matrix M, divided by ``scale``."""
        self.largest_logit = torch.full_like(self.largest, -math.inf)
        """Largest logit of each matrix; NaN if the operator has no logits, −∞ if masks hide all of them."""
        plain = bool((scale == 1).all())
        for start, rows, logits in _blocks(operator):
            scaled = rows if plain else rows / scale
            self.largest_logit = torch.maximum(self.largest_logit, logits.amax(MATRIX))
            self.largest = torch.maximum(self.largest, rows.detach().abs().amax(MATRIX))
            self.size = torch.hypot(self.size, norm(scaled, MATRIX))
            for statistic in self.statistics:
                statistic.add(start, rows, scaled)

    @property
    def finite(self) -> Bool[Tensor, "*batch"]:
        """True for each matrix that contains neither NaN nor infinity."""
        return self.largest.isfinite()

    def get(self, kind: type[Statistic]) -> Statistic:
        """Return the row statistic of the given type."""
        return next(statistic for statistic in self.statistics if isinstance(statistic, kind))

    def finite_only(self, numbers: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        """Return the numbers, set to NaN for each matrix with NaN or infinity."""
        return numbers.masked_fill(~self.finite, math.nan)


def compute_measures(names: Iterable[str], op: Mixing) -> dict[str, Tensor]:
    """Return values of measures by name; all measures of rows share one pass over the operator's rows.

    On a CPU the sequences of (B, H, T, S) are processed by parallel threads. No gradient is kept. Measures of
    tokens must be called directly: ``MEASURES[name].function(tokens, mask)``. Measures of heads require a
    tensor (..., H, T, S) or an operator.

    Cost: one pass over the rows for all measures of rows (O(H² T S) time with `head_distance`), with memory
    for a block of rows and S numbers per matrix. Each other measure adds the cost in its docstring.

    Examples:
        >>> from rankwise import measures
        >>> compute_measures(["first_token_mass", "stable_rank"], torch.ones(1, 2, 4, 4))["stable_rank"]
        tensor([[1., 1.]], dtype=torch.float64)
    """
    names = list(names)
    of_rows = [name for name in names if MEASURES[name].statistics]
    with torch.no_grad():
        values = {name: MEASURES[name].function(op) for name in names if name not in of_rows}
        if not of_rows:
            return values
        operator = as_operator(op, f"`{of_rows[0]}`")
        if len(operator.shape) < 4 or operator.shape[0] < 2 or operator.device.type != "cpu":
            return values | _measure_rows(of_rows, operator)
        sequences = [operator[index : index + 1] for index in range(operator.shape[0])]
        at_once = max(1, PARALLEL_BYTES // max(1, 8 * math.prod(operator.shape[1:])))
        results = map_threads(lambda sequence: _measure_rows(of_rows, sequence), sequences, at_once)
        return values | {name: torch.cat([result[name] for result in results]) for name in of_rows}


def _measure_rows(names: list[str], operator: MixingOperator) -> dict[str, Tensor]:
    statistics = {kind: None for name in names for kind in MEASURES[name].statistics}
    walk = _walk(operator, statistics)
    return {name: MEASURES[name].function(walk) for name in names}


def walk_rows(op: "Mixing | RowWalk", name: str) -> RowWalk:
    """Return a pass over the rows for the measure ``name``; return ``op`` itself if it is a `RowWalk`."""
    return op if isinstance(op, RowWalk) else _walk(as_operator(op, f"`{name}`"), MEASURES[name].statistics)


def _walk(operator: MixingOperator, statistics: Iterable[type[RowStatistic]]) -> RowWalk:
    """Return a pass over the rows.

    If sums of very large or very small entries may leave the range of float64, the pass is repeated with
    scaled matrices.
    """
    batch = operator.shape[:-2]
    scale = torch.ones(*batch, 1, 1, dtype=torch.float64, device=operator.device)
    walk = RowWalk(operator, statistics, scale)
    huge = walk.finite & (walk.largest > FAR)
    tiny = (walk.largest > 0) & (walk.largest < 1 / FAR)
    if not bool((huge | tiny).any()):
        return walk
    scale = torch.ones_like(walk.largest).masked_fill_(huge, FAR_SCALE).masked_fill_(tiny, 1 / FAR_SCALE)
    return RowWalk(operator, statistics, scale[..., None, None])


def _blocks(operator: MixingOperator) -> Iterator[tuple[int, Rows, Tensor]]:
    *batch, tokens, sources = operator.shape
    limit = BLOCK_BYTES.get(operator.device.type, DEVICE_BLOCK_BYTES)
    step = max(1, limit // (8 * max(math.prod(batch), 1) * sources))
    for start in range(0, tokens, step):
        rows, logits = operator.rows_with_logits(start, min(start + step, tokens))
        logits = logits if logits.stride(-1) else logits[..., :1]  # an expanded column, slow to reduce
        yield start, rows.to(torch.float64), logits.to(torch.float64)


def row_shares(rows: Rows) -> Rows:
    """Return rows |m_ij|/Σ_j|m_ij|, which sum to 1, without overflow; rows of zeros stay zero."""
    weights = rows.abs() / unit_scale(rows, (-1,))
    return ratio(weights, weights.sum(-1, keepdim=True).expand_as(weights))


class RowShares:
    """Entropy and column sums of the normalized rows |m_ij|/Σ_j|m_ij|, and the number of nonzero rows."""

    def __init__(self, operator: MixingOperator, scale: Float64[Tensor, "*batch 1 1"]) -> None:
        self.entropy = torch.zeros_like(scale[..., 0, 0])
        self.nonzero_rows = torch.zeros_like(self.entropy)
        self.mass = scale.new_zeros(*operator.shape[:-2], operator.shape[-1])

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Add the entropies, column sums and number of nonzero rows of a block."""
        shares = row_shares(rows)
        self.entropy = self.entropy + torch.special.entr(shares).sum(MATRIX)
        self.nonzero_rows = self.nonzero_rows + (rows != 0).any(-1).sum(-1)
        self.mass = self.mass + shares.sum(-2)


class DistanceToMeanRow:
    """Distance ‖M − 1m̄ᵀ‖_F of a mixing matrix M from its mean row m̄.

    The first row is subtracted from all rows, so that nearly equal rows keep full precision. Blocks of rows
    are combined as in parallel variance algorithms (Chan, Golub and LeVeque 1983).
    """

    def __init__(self, operator: MixingOperator, scale: Float64[Tensor, "*batch 1 1"]) -> None:
        self.distance = torch.zeros_like(scale[..., 0, 0])
        self.first = self.mean = scale.new_zeros(*operator.shape[:-2], 1, operator.shape[-1])
        self.rows = 0

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Combine the distance and the mean of a block with the results of earlier blocks."""
        self.first = self.first if self.rows else scaled[..., :1, :].clone()
        shifted = scaled - self.first
        mean, count = shifted.mean(-2, keepdim=True), scaled.shape[-2]
        step, before = mean - self.mean, self.rows
        self.rows += count
        between = norm(step, MATRIX) * math.sqrt(before * count / self.rows)
        self.distance = torch.hypot(torch.hypot(self.distance, norm(shifted - mean, MATRIX)), between)
        self.mean = self.mean + step * (count / self.rows)


class DistanceToIdentity:
    """Distance ‖M − I‖_F of a mixing matrix M from the identity; NaN if M is not square."""

    def __init__(self, operator: MixingOperator, scale: Float64[Tensor, "*batch 1 1"]) -> None:
        tokens, sources = operator.shape[-2:]
        self.one = 1 / scale[..., 0]
        self.distance = torch.full_like(self.one[..., 0], 0.0 if tokens == sources else math.nan)

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Subtract 1 from the diagonal of a block, and combine the norm of the result with the distance."""
        difference = scaled.clone()
        difference.diagonal(offset=start, dim1=-2, dim2=-1).sub_(self.one)
        self.distance = torch.hypot(self.distance, norm(difference, MATRIX))


class PairwiseDistances:
    """Distance ‖A − B‖_F of each pair of heads A and B, divided by the larger of their scales.

    Differences are summed directly. ‖A‖² + ‖B‖² − 2⟨A, B⟩ would need only one matrix product, but its
    rounding error of 1e-16·‖A‖² would hide relative distances below 1e-8, which redundant heads have.
    """

    def __init__(self, operator: MixingOperator, scale: Float64[Tensor, "*batch 1 1"]) -> None:
        if len(operator.shape) < 3:
            raise ShapeError(
                "`head_distance`",
                expected="shape (..., H, T, S)",
                got=str(tuple(operator.shape)),
                fix="Stack the heads of a layer on the axis before T.",
            )
        self.scale = torch.maximum(scale[..., 0], scale[..., 0].mT)
        self.plain = bool((self.scale == 1).all())
        self.distance = torch.zeros_like(self.scale)

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Add the squared differences over a block of rows to the distance of each pair of heads."""
        for head in range(rows.shape[-3] - 1):
            first, others = rows[..., head : head + 1, :, :], rows[..., head + 1 :, :, :]
            if not self.plain:
                scale = self.scale[..., head, head + 1 :, None, None]
                first, others = first / scale, others / scale
            so_far = self.distance[..., head, head + 1 :]
            so_far.copy_(torch.hypot(so_far, norm(others - first, MATRIX)))
