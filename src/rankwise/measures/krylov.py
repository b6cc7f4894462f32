"""Krylov spaces span(X, AX, A²X, …) of A = MᵀM for mixing matrices (operators) M, without forming A."""

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.registry import as_operator
from rankwise.operators import DenseMixing, IndexedMixing, MixingOperator, SoftmaxMixing

Apply = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function that maps X to (A X, Xᵀ A X) for a symmetric positive semidefinite matrix A."""

BLOCK_ENTRIES = {"cpu": 2**18}
"""Entries of M per block of rows on a CPU, so that a block in float64 fits into the CPU cache."""
DEVICE_BLOCK_ENTRIES = 2**23
"""Entries of M per block of rows on an accelerator: 64 MiB in float64."""
KEPT_BYTES = 2**31
"""Bytes of rows that are kept between products: all rows of a causal matrix up to T = 32,768."""

ROW_WALKED = (SoftmaxMixing, DenseMixing)
"""Operators whose products compute rows of M: one pass over the rows then serves both M and Mᵀ.
All other operators have faster products that compute no rows."""


class Gram:
    """Linear map MᵀM/scale² of one mixing matrix M (T×S), in float64; ``scale`` is chosen by `_measure`.

    With ``keep``, rows of softmax attention are computed once, rounded to float32 and kept, up to
    `KEPT_BYTES`; further rows are computed for each product. All products then belong to one matrix M + E
    with ‖E‖_F ≤ ``slack``·‖M‖_F, so no σ changes by more (Weyl's inequality). Products rounded to float32
    would not belong to any matrix: MᵀM would hide the many σ below 3e-4·σ_1.
    """

    def __init__(self, op: MixingOperator, keep: bool) -> None:
        self.operator = op = as_operator(op, "`estimate_spectrum`")
        self.rows, self.columns = op.shape
        self.device = op.device
        self._walked = isinstance(op.operator if isinstance(op, IndexedMixing) else op, ROW_WALKED)
        self._kept: dict[int, Tensor] = {}
        self._room = KEPT_BYTES if keep and self._walked else 0
        self.scale, self.energy = self._measure()
        self.slack = 2.0**-24 if self._kept and not isinstance(op, DenseMixing) else 0.0

    def __call__(
        self, vectors: Float64[Tensor, "S V"]
    ) -> tuple[Float64[Tensor, "S V"], Float64[Tensor, "V V"]]:
        """Return MᵀM X, and Xᵀ MᵀM X computed as (M X)ᵀ(M X), so that it is positive semidefinite."""
        vectors = vectors / self.scale
        if not self._walked:
            image = self.operator @ vectors
            return self.operator.mT @ image / self.scale, image.mT @ image
        product = torch.zeros_like(vectors)
        inner = vectors.new_zeros(vectors.shape[-1], vectors.shape[-1])
        for block in self._blocks():
            seen = block.shape[-1]
            image = block @ vectors[:seen]
            inner.addmm_(image.mT, image)
            product[:seen].addmm_(block.mT, image)
        return product / self.scale, inner

    def _blocks(self) -> Iterator[Float64[Tensor, "R C"]]:
        """Yield blocks of rows. Kept blocks end at their last nonzero column."""
        step = max(1, BLOCK_ENTRIES.get(self.device.type, DEVICE_BLOCK_ENTRIES) // self.columns)
        for start in range(0, self.rows, step):
            block = self._kept.get(start)
            if block is None:
                block = self.operator.rows(start, min(start + step, self.rows))
                if self._room > 0:
                    seen = block.any(0).nonzero()
                    block = block[:, : int(seen[-1]) + 1 if len(seen) else 1]
                    if not isinstance(self.operator, DenseMixing):
                        block = block.to(torch.float32)
                    self._kept[start] = block
                    self._room -= block.nbytes
            yield block.to(torch.float64)

    def _measure(self) -> tuple[float, float]:
        """Return the scale, a power of two near the largest entry of M, and the energy ‖M‖_F²/scale².

        The energy is NaN if M contains NaN or infinity.
        """
        largest, energies = 0.0, []
        for block in self._blocks():
            top = float(block.abs().max())
            if not math.isfinite(top):
                return 1.0, math.nan
            if top > 0:
                energies.append((top, float((block / top).square().sum())))
                largest = max(largest, top)
        # The scale is at least the smallest normal number, so that the inverse is finite.
        scale = max(2.0 ** (math.frexp(largest)[1] - 1), sys.float_info.min) if largest > 0 else 1.0
        return scale, math.fsum(energy * (top / scale) ** 2 for top, energy in energies)


class Krylov(NamedTuple):
    """Symmetric matrix A, compressed to the span of X, A X, …, A^(k−1) X for a block X of P vectors.

    ``matrix`` and ``start`` determine xᵀ f(A) x exactly for each column x of X and each polynomial f of
    degree at most 2k − 1.
    """

    matrix: Float64[Tensor, "N N"]
    """Qᵀ A Q for an orthonormal basis Q of the Krylov space; block tridiagonal."""
    start: Float64[Tensor, "N P"]
    """Starting vectors X in the basis Q: Qᵀ X."""
    tail: Float64[Tensor, "P N"]
    """Part of A Q outside the Krylov space: an approximate eigenvector Q s has the residual ‖tail s‖."""
    steps: int
    """Number of products of A with a block of P vectors."""
    basis: Float64[Tensor, "M N"] | None
    """Basis Q, (M, N) for A of size M×M. None if `block_lanczos` was called without ``keep_basis``."""


def block_lanczos(
    apply: Apply, start: Float64[Tensor, "M P"], steps: int, tolerance: float, keep_basis: bool = False
) -> Krylov:
    """Compress a symmetric matrix A to a Krylov space by block Lanczos, with full reorthogonalization.

    New directions of a length below ``tolerance`` (before normalization) are rounding errors and are dropped.
    The iteration stops early if the space becomes invariant under A.
    Cost: ``steps`` calls of ``apply`` with P vectors, O(M (P steps)²) time, M·P·steps numbers in memory for A
    of size M×M.
    Source: G. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", 2010.
    """
    size, width = start.shape
    basis = start.new_empty(steps * width, size)  # each step writes one contiguous block
    matrix = start.new_zeros((steps + 1) * width, (steps + 1) * width)
    block, first = _orthonormal(start, 1e-10 * float(start.norm()))
    used, kept = 0, []
    for used in range(1, steps + 1):
        here, after = slice((used - 1) * width, used * width), slice(used * width, (used + 1) * width)
        previous = basis[: used * width]
        previous[here] = block.mT
        kept.append(block.square().sum(0) > 0.5)  # a dropped direction is a zero column
        product, inner = apply(block)
        matrix[here, here] = (inner + inner.mT) / 2
        # In exact arithmetic A X has components along the last two blocks only. Normalizing a small remainder
        # amplifies rounding errors along all other blocks, so these are subtracted afterwards.
        block, outer = _orthonormal(_without(product, previous[-2 * width :]), tolerance)
        block, again = _orthonormal(_without(block, previous), 0.5)
        coupling = again @ outer
        matrix[after, here], matrix[here, after] = coupling, coupling.mT
        if not coupling.any():
            break
    there, end = torch.cat(kept), used * width
    first = torch.cat([first, first.new_zeros(end - width, width)])
    return Krylov(
        matrix=matrix[:end, :end][there][:, there],
        start=first[there],
        tail=matrix[end : end + width, :end][:, there],
        steps=used,
        basis=basis[:end][there].mT if keep_basis else None,
    )


def _without(vectors: Tensor, basis: Tensor) -> Tensor:
    """Return vectors minus their projection onto an orthonormal basis (rows)."""
    return torch.addmm(vectors, basis.mT, basis @ vectors, alpha=-1)


def _orthonormal(vectors: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return Q and R with vectors = Q R; columns of Q are zero for directions shorter than the tolerance."""
    orthogonal, triangular = torch.linalg.qr(vectors)
    left, lengths, right = torch.linalg.svd(triangular)
    kept = lengths > tolerance
    return (orthogonal @ left) * kept, (lengths * kept)[:, None] * right
