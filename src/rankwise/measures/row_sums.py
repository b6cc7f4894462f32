"""One walk over the rows of mixing matrices, a block at a time, and the sums it gathers for each measure.

A measure of rows is a function marked by `row_measure`, which names the sums it is made of. It takes an
operator, which it walks, or a walk that measures share: audits walk once for all of them. None forms M.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import MATRIX, norm, ratio, unit_scale
from rankwise.measures.inputs import Mixing, as_operator
from rankwise.measures.laws import measure_of
from rankwise.operators import MixingOperator

BLOCK_BYTES = {"cpu": 2**22}
"""Float64 rows held at once, whatever S: they stay in a CPU's cache."""
DEVICE_BLOCK_BYTES = 2**28
"""The same on an accelerator, which wants many."""
FAR, FAR_UNIT = 2.0**900, 2.0**64
"""A matrix is divided by the second if its largest entry is above the first, and multiplied by it if that
is below the inverse of the first: sums and means of its entries stay among the normal numbers."""

Rows = Float64[Tensor, "*batch R S"]


class Sums:
    """What one measure adds up over blocks of rows."""

    def __init__(self, operator: MixingOperator, unit: Float64[Tensor, "*batch 1 1"]) -> None:
        raise NotImplementedError

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Take rows ``start`` and after, as they are and divided by the unit."""
        raise NotImplementedError


Kind = TypeVar("Kind", bound=Sums)
MeasureT = TypeVar("MeasureT", bound=Callable[..., Any])


class RowMeasure(NamedTuple):
    """A measure of rows, and the sums it is made of."""

    function: Callable[..., Any]
    kinds: tuple[type[Sums], ...]


ROW_MEASURES: dict[str, RowMeasure] = {}
"""By the name of the function."""


def row_measure(*kinds: type[Sums], degree: int | None) -> Callable[[MeasureT], MeasureT]:
    """Mark a function as a measure of rows, which takes `walk` of what it is given.

    Args:
        kinds: which sums it is made of.
        degree: as in `Law`.
    """

    def note(function: MeasureT) -> MeasureT:
        ROW_MEASURES[function.__name__] = RowMeasure(function, kinds)
        return measure_of("matrices", degree=degree)(function)

    return note


class Walk:
    """One walk over an operator, and the sums it filled.

    Args:
        operator: its rows.
        kinds: which sums to fill.
        unit: a power of two that each matrix is divided by.
    """

    def __init__(
        self, operator: MixingOperator, kinds: tuple[type[Sums], ...], unit: Float64[Tensor, "*batch 1 1"]
    ) -> None:
        self.unit, self.tokens = unit, operator.shape[-2]
        self.sums = [kind(operator, unit) for kind in kinds]
        self.largest = torch.zeros_like(unit[..., 0, 0])
        """The largest magnitude of each matrix; NaN or infinity where it holds one."""
        self.size = torch.zeros_like(self.largest)
        """‖M‖_F in its unit."""
        plain = bool((unit == 1).all())
        for start, rows in _blocks(operator):
            scaled = rows if plain else rows / unit
            self.largest = torch.maximum(self.largest, rows.detach().abs().amax(MATRIX))
            self.size = torch.hypot(self.size, norm(scaled, MATRIX))
            for sums in self.sums:
                sums.add(start, rows, scaled)

    @property
    def finite(self) -> Bool[Tensor, "*batch"]:
        """Which matrices hold neither NaN nor infinity."""
        return self.largest.isfinite()

    def of(self, kind: type[Kind]) -> Kind:
        """The sums of a kind."""
        return next(sums for sums in self.sums if isinstance(sums, kind))

    def known(self, numbers: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
        """The numbers, NaN where a matrix is not finite."""
        return numbers.masked_fill(~self.finite, math.nan)


def shares(rows: Rows) -> Rows:
    """|m_ij|/Σ_j|m_ij|, in a unit of each row: it may be tiny beside the others. Zero rows stay zero."""
    weights = rows.abs() / unit_scale(rows, (-1,))
    return ratio(weights, weights.sum(-1, keepdim=True).expand_as(weights))


class Shares(Sums):
    """Of |m_ij|/Σ_j|m_ij|: the entropies of rows and the sums of columns; and how many rows are not zero."""

    def __init__(self, operator: MixingOperator, unit: Float64[Tensor, "*batch 1 1"]) -> None:
        self.entropy = torch.zeros_like(unit[..., 0, 0])
        self.live = torch.zeros_like(self.entropy)
        self.mass = unit.new_zeros(*operator.shape[:-2], operator.shape[-1])

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Take the shares of each row."""
        share = shares(rows)
        self.entropy = self.entropy + torch.special.entr(share).sum(MATRIX)
        self.live = self.live + (rows != 0).any(-1).sum(-1)
        self.mass = self.mass + share.sum(-2)


class FromMeanRow(Sums):
    """‖M − 1m̄ᵀ‖_F, m̄ the mean row.

    Rows are compared with the first row, so that nearly equal rows lose no digits; that of two blocks
    together is that of each and that of their means (Chan, Golub and LeVeque 1983).
    """

    def __init__(self, operator: MixingOperator, unit: Float64[Tensor, "*batch 1 1"]) -> None:
        self.distance = torch.zeros_like(unit[..., 0, 0])
        self.first = self.mean = unit.new_zeros(*operator.shape[:-2], 1, operator.shape[-1])
        self.rows = 0

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Join the block's spread and mean to those so far."""
        self.first = self.first if self.rows else scaled[..., :1, :].clone()
        shifted = scaled - self.first
        mean, count = shifted.mean(-2, keepdim=True), scaled.shape[-2]
        step, before = mean - self.mean, self.rows
        self.rows += count
        between = norm(step, MATRIX) * math.sqrt(before * count / self.rows)
        self.distance = torch.hypot(torch.hypot(self.distance, norm(shifted - mean, MATRIX)), between)
        self.mean = self.mean + step * (count / self.rows)


class FromIdentity(Sums):
    """‖M − I‖_F; NaN where M is not square."""

    def __init__(self, operator: MixingOperator, unit: Float64[Tensor, "*batch 1 1"]) -> None:
        tokens, sources = operator.shape[-2:]
        self.unit = 1 / unit[..., 0]
        self.distance = torch.full_like(self.unit[..., 0], 0.0 if tokens == sources else math.nan)

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Take 1 off the diagonal."""
        own = scaled.clone()
        own.diagonal(offset=start, dim1=-2, dim2=-1).sub_(self.unit)
        self.distance = torch.hypot(self.distance, norm(own, MATRIX))


class HeadsApart(Sums):
    """‖A − B‖_F of each two heads, in the larger of their units.

    Differences are summed directly. ‖A‖² + ‖B‖² − 2⟨A, B⟩ would be one matrix product, but its rounding
    error of 1e-16·‖A‖² turns every distance below about 1e-8 into noise, just where heads are redundant.
    """

    def __init__(self, operator: MixingOperator, unit: Float64[Tensor, "*batch 1 1"]) -> None:
        self.unit = torch.maximum(unit[..., 0], unit[..., 0].mT)
        self.plain = bool((self.unit == 1).all())
        self.apart = torch.zeros_like(self.unit)

    def add(self, start: int, rows: Rows, scaled: Rows) -> None:
        """Compare each head with those after it."""
        for head in range(rows.shape[-3] - 1):
            first, others = rows[..., head : head + 1, :, :], rows[..., head + 1 :, :, :]
            if not self.plain:
                unit = self.unit[..., head, head + 1 :, None, None]
                first, others = first / unit, others / unit
            known = self.apart[..., head, head + 1 :]
            known.copy_(torch.hypot(known, norm(others - first, MATRIX)))


def walk(op: "Mixing | Walk", name: str) -> Walk:
    """Walk over the rows for a measure, unless that was done.

    Args:
        op: an operator or a tensor, or a walk that filled the sums of this measure.
        name: of the measure: its sums are filled, and an error calls it so.
    """
    return op if isinstance(op, Walk) else walk_over(as_operator(op, f"`{name}`"), *ROW_MEASURES[name].kinds)


def walk_over(operator: MixingOperator, *kinds: type[Sums]) -> Walk:
    """Walk over the rows; a second time if a matrix is so large or small that sums may have left float64.

    Args:
        operator: its rows.
        kinds: which sums to fill.
    """
    batch = operator.shape[:-2]
    found = Walk(operator, kinds, torch.ones(*batch, 1, 1, dtype=torch.float64, device=operator.device))
    huge = found.finite & (found.largest > FAR)
    tiny = (found.largest > 0) & (found.largest < 1 / FAR)
    if not bool((huge | tiny).any()):
        return found
    unit = torch.ones_like(found.largest).masked_fill_(huge, FAR_UNIT).masked_fill_(tiny, 1 / FAR_UNIT)
    return Walk(operator, kinds, unit[..., None, None])


def _blocks(operator: MixingOperator) -> Iterator[tuple[int, Rows]]:
    *batch, tokens, sources = operator.shape
    limit = BLOCK_BYTES.get(operator.device.type, DEVICE_BLOCK_BYTES)
    step = max(1, limit // (8 * max(math.prod(batch), 1) * sources))
    for start in range(0, tokens, step):
        yield start, operator.rows(start, min(start + step, tokens)).to(torch.float64)
