"""Second moments of vectors, such as keys or embeddings, and the effective rank of all vectors together."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from rankwise._internals.linalg import as_float64
from rankwise.measures.rank import entropy_rank

STEP = 4096
"""Number of vectors that are cast to float64 at once, to limit memory."""


def float64_blocks(
    rows: Shaped[Tensor, "*batch N D"], real: Tensor | None, mean: Tensor | float = 0.0
) -> Iterator[Float64[Tensor, "*batch R D"]]:
    """Yield blocks of `STEP` rows in float64, minus ``mean``; rows that are not ``real`` are set to 0."""
    for start in range(0, max(rows.shape[-2], 1), STEP):
        block = as_float64(rows[..., start : start + STEP, :]) - mean
        if real is not None:
            block = block.masked_fill(~real[..., start : start + STEP, None].to(block.device), 0.0)
        yield block


@dataclass(frozen=True)
class RowMoments:
    """Second moments YᵀY of the rows of a matrix Y, and their number; ``+`` merges two sets of rows."""

    moments: Float64[Tensor, "*batch D D"]
    count: Float64[Tensor, "*batch"]

    @classmethod
    def of(
        cls, rows: Shaped[Tensor, "*batch N D"], real: Bool[Tensor, "*#batch N"] | None = None
    ) -> "RowMoments":
        """Return the moments of rows; rows that are not ``real`` (padding) are left out.

        Cost: O(N D²) time and O(D²) memory per matrix, plus a float64 copy of 4,096 rows at a time.
        """
        moments = reduce(torch.add, (block.mT @ block for block in float64_blocks(rows.detach(), real)))
        full = moments.new_full(rows.shape[:-2], rows.shape[-2])
        return cls(moments, full if real is None else real.sum(-1).to(full).expand_as(full))

    def __add__(self, other: "RowMoments") -> "RowMoments":
        """Return the moments of both sets of rows together."""
        return RowMoments(self.moments + other.moments, self.count + other.count)

    def every(self, step: int) -> "RowMoments":
        """Return the moments of every ``step``-th matrix."""
        return RowMoments(self.moments[::step], self.count[::step])

    def sum_sequences(self) -> "RowMoments":
        """Return moments (B, …) summed over sequences; a matrix skips its non-finite sequences."""
        finite = self.moments.isfinite().all(-1).all(-1)
        moments = self.moments.where(finite[..., None, None], 0.0)
        return RowMoments(moments.sum(0), self.count.where(finite, 0.0).sum(0))

    def effective_rank(self) -> Float64[Tensor, "*batch"]:
        """Return the effective rank of all rows: `effective_rank` of the N×D matrix Y.

        Formula: exp(−Σ p_i log p_i) with p = σ/Σσ. The σ_i are the singular values of Y, the square roots of
        the eigenvalues of YᵀY, so p is a share of singular values, not of their squares.
        Range: [1, min(N, D)]; 0 if all rows are zero. NaN without a row, or if a moment is not finite.
        Cost: an eigendecomposition, O(D³) time.
        Numerics: rounding hides singular values below √(D·ε)·σ_1 = 4e-7·σ_1 (D = 640), which count as 0.
        """
        width = self.moments.shape[-1]
        valid = self.moments.isfinite().all(-1).all(-1) & (self.count > 0)
        values = torch.linalg.eigvalsh(self.moments.where(valid[..., None, None], 0.0)).flip(-1)
        least = width * torch.finfo(values.dtype).eps * values[..., :1]
        place = torch.arange(width, device=values.device)
        values = values.where((values > least) & (place < self.count[..., None]), 0.0)
        return entropy_rank(values.double().sqrt()).masked_fill(~valid, math.nan)
