"""Every measure of rows in a few walks over them, whatever the size of the matrix."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.measures._inputs import Mixing, ratio, to_float64, unit_scale
from rankwise.operators import DenseMixing, MixingOperator

BLOCK_BYTES = {"cpu": 2**22}
"""Float64 rows held at once, whatever S: they stay in a CPU's cache."""
DEVICE_BLOCK_BYTES = 2**28
"""The same on an accelerator, which wants many."""
SUBJECT = "`row_summary`"


class RowSummary(NamedTuple):
    """What the rows of each matrix do. NaN where a matrix is not finite."""

    row_entropy: Float64[Tensor, "*batch"]
    sink_mass: Float64[Tensor, "*batch"]
    peak_mass: Float64[Tensor, "*batch"]
    row_distance: Float64[Tensor, "*batch"]
    identity_distance: Float64[Tensor, "*batch"]
    head_distance: Float64[Tensor, "*batch H"]


def row_summary(op: MixingOperator | Mixing) -> RowSummary:
    """Every measure of rows at once: `row_entropy`, `sink_mass`, `peak_mass`, the three distances.

    The matrix is not formed: each is a sum over rows, and rows come in blocks.

    Range: that of each measure.
    Cost: three walks over the rows, O(H² T S) time for the distances of H heads; memory of a block of rows
    and of S numbers for each matrix.

    Args:
        op: an operator, or a tensor (..., H, T, S).

    Raises:
        ShapeError: if ``op`` is not (..., H, T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> summary = row_summary(torch.eye(4).expand(2, 4, 4))
        >>> summary.identity_distance.tolist(), summary.head_distance.tolist()
        ([0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]])
    """
    operator = _operator(op)
    with torch.no_grad():
        first = _First.of(operator)
        return _Second(operator, first).summary()


class _First(NamedTuple):
    """What the second walk must know beforehand."""

    finite: Bool[Tensor, "*batch"]
    scale: Float64[Tensor, "*batch 1 1"]
    """Power of two at or below the largest entry."""
    start: Float64[Tensor, "*batch 1 S"]
    """The first row: others are compared with it before they are centred; nearly equal ones keep digits."""
    mean: Float64[Tensor, "*batch 1 S"]
    """Mean of what is left of the rows then."""

    @staticmethod
    def of(operator: MixingOperator) -> "_First":
        largest: Tensor | None = None
        for _, block in _blocks(operator):
            top = block.abs().amax((-2, -1), keepdim=True)  # NaN stays NaN
            largest = top if largest is None else torch.maximum(largest, top)
        assert largest is not None  # an operator has at least one row
        finite = largest.isfinite()
        scale = unit_scale(torch.where(finite, largest, 0.0), (-2, -1))
        start, total = None, None
        for _, block in _blocks(operator):
            block = _cleaned(block, finite, scale)
            start = block[..., :1, :].clone() if start is None else start
            part = (block - start).sum(-2, keepdim=True)
            total = part if total is None else total + part
        assert start is not None
        assert total is not None
        return _First(finite[..., 0, 0], scale, start, total / operator.shape[-2])


class _Second:
    """The sums of the second walk."""

    def __init__(self, operator: MixingOperator, first: _First) -> None:
        self.operator, self.first = operator, first
        batch, (tokens, sources) = operator.shape[:-2], operator.shape[-2:]
        zeros = first.scale.new_zeros
        self.square = tokens == sources
        self.share = first.scale / first.scale.amax(-3, keepdim=True)  # heads are compared in one unit
        self.entropy, self.live, self.energy, self.centred, self.off = (zeros(batch) for _ in range(5))
        self.mass = zeros(*batch, sources)
        self.apart = zeros(*batch, batch[-1])
        for start, block in _blocks(operator):
            self._take(start, _cleaned(block, first.finite[..., None, None], first.scale))

    def _take(self, start: int, block: Float64[Tensor, "*batch R S"]) -> None:
        weights = block.abs() / unit_scale(block, (-1,))
        share = ratio(weights, weights.sum(-1, keepdim=True).expand_as(weights))
        self.entropy += torch.special.entr(share).sum((-2, -1))
        self.live += (block != 0).any(-1).sum(-1)
        self.mass += share.sum(-2)
        self.energy += block.square().sum((-2, -1))
        self.centred += (block - self.first.start - self.first.mean).square().sum((-2, -1))
        flat = (block * self.share).flatten(-2)
        self.apart += torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
        if self.square:
            own = torch.zeros_like(block)
            own.diagonal(offset=start, dim1=-2, dim2=-1).fill_(1)
            # Entries may be huge or tiny: the larger of M and I sets the unit.
            unit = self.first.scale.clamp(min=1)
            self.off += (block * (self.first.scale / unit) - own / unit).square().sum((-2, -1))

    def summary(self) -> RowSummary:
        scale = self.first.scale[..., 0, 0]
        norm = self.energy.sqrt()
        mass = self.mass / self.live[..., None]
        if self.square:
            unit = scale.clamp(min=1)
            whole = torch.hypot(norm * (scale / unit), math.sqrt(self.operator.shape[-1]) / unit)
            identity = self.off.sqrt() / whole
        else:
            identity = torch.full_like(norm, math.nan)
        return RowSummary(
            row_entropy=self._known(self.entropy / self.live),
            sink_mass=self._known(mass[..., 0]),
            peak_mass=self._known(mass.amax(-1)),
            row_distance=self._known(ratio(self.centred.sqrt(), norm).clamp(max=1)),
            identity_distance=self._known(identity),
            head_distance=self._head_distance(norm),
        )

    def _known(self, numbers: Tensor) -> Tensor:
        return numbers.masked_fill(~self.first.finite, math.nan)

    def _head_distance(self, norm: Tensor) -> Tensor:
        finite, norm = self.first.finite, norm * self.share[..., 0, 0]
        distance = ratio(self.apart.sqrt(), torch.hypot(norm[..., :, None], norm[..., None, :]))
        return distance.masked_fill(~(finite[..., :, None] & finite[..., None, :]), math.nan)


def _blocks(operator: MixingOperator) -> Iterator[tuple[int, Float64[Tensor, "*batch R S"]]]:
    *batch, tokens, sources = operator.shape
    limit = BLOCK_BYTES.get(operator.device.type, DEVICE_BLOCK_BYTES)
    step = max(1, limit // (8 * math.prod(batch) * sources))
    for start in range(0, tokens, step):
        yield start, operator.rows(start, min(start + step, tokens)).to(torch.float64)


def _cleaned(block: Tensor, finite: Tensor, scale: Tensor) -> Tensor:
    return block.masked_fill(~finite, 0) / scale


def _operator(op: MixingOperator | Mixing) -> MixingOperator:
    shape = op.shape if isinstance(op, MixingOperator | Tensor) else None
    if shape is None or len(shape) < 3 or 0 in shape[-3:]:
        raise ShapeError(
            SUBJECT,
            wanted="a MixingOperator or a tensor of shape (..., H, T, S) with H, T, S ≥ 1",
            got=type(op).__name__ if shape is None else str(tuple(shape)),
            fix="Stack the heads of a layer on the axis before T.",
        )
    if isinstance(op, MixingOperator):
        operator = op.to("cpu") if op.device.type == "mps" else op  # no float64 there
        return operator if isinstance(operator, DenseMixing) else operator.to(torch.float64)
    return DenseMixing(to_float64(op, SUBJECT))
