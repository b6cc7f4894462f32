"""One pass over the rows of mixing matrices (operators), block by block, for all measures of rows.

Each measure of rows declares which row statistics it reads. A measure is called with an operator, or with a
`RowWalk`, which is one pass that fills the statistics of several measures. No whole matrix is formed. Sums
of entries stay within the range of float64 if the norm of a matrix is between 2^−900 and 2^900.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import MATRIX, has_plain_squares, no_cancellation, norm, unit_scale
from rankwise._internals.threads import PARALLEL_BYTES, map_threads
from rankwise.errors import ShapeError
from rankwise.measures.registry import MEASURES, Mixing, Rows, RowStatistic, as_operator
from rankwise.operators import MixingOperator

BLOCK_BYTES = {"cpu": 2**21}
"""Bytes of float64 rows per block on a CPU, so that a block fits into the CPU cache."""
DEVICE_BLOCK_BYTES = 2**28
"""Bytes of float64 rows per block on an accelerator."""
TINY = torch.finfo(torch.float64).tiny

__all__ = ["compute_measures"]

Statistic = TypeVar("Statistic", bound=RowStatistic)


class RowWalk:
    """One pass over the rows of an operator, which fills row statistics."""

    def __init__(self, operator: MixingOperator, statistics: Iterable[type[RowStatistic]]) -> None:
        self.tokens = operator.shape[-2]
        self.statistics = [statistic(operator) for statistic in statistics]
        self.size = zeros(operator)
        """Frobenius norm ‖M‖_F of each matrix M; NaN or infinity if M is not finite."""
        self.largest_logit = torch.full_like(self.size, -math.inf)
        """Largest logit of each matrix; NaN if the operator has no logits, −∞ if masks hide all of them."""
        for start, rows, logits in row_blocks(operator):
            self.largest_logit = torch.maximum(self.largest_logit, logits.amax(MATRIX))
            self.size = torch.hypot(self.size, norm(rows, MATRIX))
            for statistic in self.statistics:
                statistic.add(start, rows)

    @property
    def finite(self) -> Bool[Tensor, "*batch"]:
        """True for each matrix that contains neither NaN nor infinity."""
        return self.size.isfinite()

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
    walk = RowWalk(operator, {kind: None for name in names for kind in MEASURES[name].statistics})
    return {name: MEASURES[name].function(walk) for name in names}


def walk_rows(op: "Mixing | RowWalk", name: str) -> RowWalk:
    """Return a pass over the rows for the measure ``name``; return ``op`` itself if it is a `RowWalk`."""
    return op if isinstance(op, RowWalk) else RowWalk(as_operator(op, f"`{name}`"), MEASURES[name].statistics)


def zeros(operator: MixingOperator) -> Float64[Tensor, "*batch"]:
    """Return zero in float64 for each matrix of an operator."""
    return torch.zeros(operator.shape[:-2], dtype=torch.float64, device=operator.device)


def row_blocks(operator: MixingOperator) -> Iterator[tuple[int, Rows, Tensor]]:
    """Yield the first row, the rows and the logits of each block of rows, in float64."""
    *batch, tokens, sources = operator.shape
    limit = BLOCK_BYTES.get(operator.device.type, DEVICE_BLOCK_BYTES)
    step = max(1, limit // (8 * max(math.prod(batch), 1) * sources))
    for start in range(0, tokens, step):
        rows, logits = operator.rows_with_logits(start, min(start + step, tokens))
        logits = logits if logits.stride(-1) else logits[..., :1]  # an expanded column, slow to reduce
        yield start, rows.to(torch.float64), logits.to(torch.float64)


def row_shares(rows: Rows) -> Rows:
    """Return rows |m_ij|/Σ_j|m_ij|, which sum to 1, without overflow; rows of zeros stay zero."""
    weights = rows.abs()
    total = weights.sum(-1, keepdim=True)
    if not has_plain_squares(total):
        weights = weights / unit_scale(rows, (-1,))
        total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


class RowShares:
    """Entropy and column sums of the normalized rows |m_ij|/Σ_j|m_ij|, and the number of nonzero rows."""

    def __init__(self, operator: MixingOperator) -> None:
        self.entropy = self.nonzero_rows = zeros(operator)
        self.mass = self.entropy.new_zeros(*operator.shape[:-2], operator.shape[-1])

    def add(self, start: int, rows: Rows) -> None:
        """Add the entropies, column sums and number of nonzero rows of a block."""
        shares = row_shares(rows)
        # 0 log 0 = 0; a product with the logarithm takes half of the time of `torch.special.entr`
        self.entropy = self.entropy - (shares * shares.clamp(min=TINY).log()).sum(MATRIX)
        self.nonzero_rows = self.nonzero_rows + (shares.sum(-1) > 0).sum(-1)
        self.mass = self.mass + shares.sum(-2)


class DistanceToMeanRow:
    """Distance ‖M − 1m̄ᵀ‖_F of a mixing matrix M from its mean row m̄.

    The squared distance of a block with r rows B is ‖B‖² − r‖b̄‖². Where this cancels, the first row is
    subtracted from all rows, so that nearly equal rows keep full precision. Blocks of rows are combined as in
    parallel variance algorithms (Chan, Golub and LeVeque 1983).
    """

    def __init__(self, operator: MixingOperator) -> None:
        self.distance = zeros(operator)
        self.first = self.mean = self.distance.new_zeros(*operator.shape[:-2], 1, operator.shape[-1])
        self.rows = 0

    def add(self, start: int, rows: Rows) -> None:
        """Combine the distance and the mean of a block with the results of earlier blocks."""
        self.first = self.first if self.rows else rows[..., :1, :].clone()
        mean, count = rows.mean(-2, keepdim=True), rows.shape[-2]
        whole = _energy(rows)
        square = whole - count * _energy(mean)
        plain = no_cancellation(square, 2 * whole, math.prod(rows.shape[-2:]))
        within, mean = square.where(plain, 1.0).sqrt(), mean - self.first
        if not bool(plain.all()):
            shifted = rows - self.first
            center = shifted.mean(-2, keepdim=True)
            within = torch.where(plain, within, norm(shifted - center, MATRIX))
            mean = torch.where(plain[..., None, None], mean, center)
        step, before = mean - self.mean, self.rows
        self.rows += count
        between = norm(step, MATRIX) * math.sqrt(before * count / self.rows)
        self.distance = torch.hypot(torch.hypot(self.distance, within), between)
        self.mean = self.mean + step * (count / self.rows)


class DistanceToIdentity:
    """Distance ‖M − I‖_F of a mixing matrix M from the identity; NaN if M is not square.

    The squared distance is ‖M‖² − 2 tr M + T. Where this cancels, the identity is subtracted first.
    """

    def __init__(self, operator: MixingOperator) -> None:
        tokens, sources = operator.shape[-2:]
        self.distance = zeros(operator) if tokens == sources else torch.full_like(zeros(operator), math.nan)

    def add(self, start: int, rows: Rows) -> None:
        """Combine the distance of a block from rows of the identity with the distance so far."""
        trace = rows.diagonal(offset=start, dim1=-2, dim2=-1).sum(-1)
        whole = _energy(rows) + rows.shape[-2]
        square = whole - 2 * trace
        plain = no_cancellation(square, 2 * whole, math.prod(rows.shape[-2:]))
        distance = square.where(plain, 1.0).sqrt()
        if not bool(plain.all()):
            difference = rows.clone()
            difference.diagonal(offset=start, dim1=-2, dim2=-1).sub_(1)
            distance = torch.where(plain, distance, norm(difference, MATRIX))
        self.distance = torch.hypot(self.distance, distance)


class PairwiseDistances:
    """Distance ‖A − B‖_F of each pair of heads A and B.

    The squared distance is ‖A‖² + ‖B‖² − 2⟨A, B⟩, from one matrix product for all pairs. Its rounding error
    would hide the small distances of redundant heads, so where it cancels, differences are summed directly.
    """

    def __init__(self, operator: MixingOperator) -> None:
        if len(operator.shape) < 3:
            raise ShapeError(
                "`head_distance`",
                expected="shape (..., H, T, S)",
                got=str(tuple(operator.shape)),
                fix="Stack the heads of a layer on the axis before T.",
            )
        *batch, heads = operator.shape[:-2]
        self.distance = torch.zeros(*batch, heads, heads, dtype=torch.float64, device=operator.device)

    def add(self, start: int, rows: Rows) -> None:
        """Add the squared differences over a block of rows to the distance of each pair of heads."""
        heads = rows.flatten(-2)
        products = heads @ heads.mT
        energy = products.diagonal(dim1=-2, dim2=-1)
        whole = energy[..., None] + energy[..., None, :]
        square = whole - 2 * products
        plain = no_cancellation(square, 2 * whole, heads.shape[-1])
        distance = square.where(plain, 1.0).sqrt()
        pairs = (~plain).triu(1).reshape(-1, *plain.shape[-2:]).any(0)
        for head in pairs.any(-1).nonzero()[:, 0].tolist():
            others = pairs[head].nonzero()[:, 0]
            difference = rows[..., others, :, :] - rows[..., head : head + 1, :, :]
            direct = norm(difference, MATRIX)
            distance[..., head, others] = direct.where(~plain[..., head, others], distance[..., head, others])
        self.distance = torch.hypot(self.distance, distance.triu(1))


def _energy(rows: Rows) -> Float64[Tensor, "*batch"]:
    """Return the squared Frobenius norm, which may overflow or underflow."""
    return torch.linalg.vector_norm(rows, dim=MATRIX).square()
