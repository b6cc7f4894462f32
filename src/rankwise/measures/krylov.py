"""Krylov spaces of MᵀM for matrices that are never formed."""

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.registry import as_operator
from rankwise.operators import DenseMixing, IndexedMixing, MixingOperator, SoftmaxMixing
from rankwise.operators.base import TransposedMixing

TRIM_BYTES = 2**20
"""Size of a block of vectors from which memory is given back: it takes milliseconds, a step takes seconds."""

Apply = Callable[[Tensor], tuple[Tensor, Tensor]]
"""X → (A X, Xᵀ A X) for a symmetric A ≥ 0."""

BLOCK_ENTRIES = {"cpu": 2**18}
"""Entries of M per block of rows on a CPU: in float64 they stay in its cache."""
DEVICE_BLOCK_ENTRIES = 2**23
"""Entries of M per block of rows on an accelerator, 64 MiB."""

ROW_WALKED = (SoftmaxMixing, DenseMixing)
"""Operators whose products compute the rows of M: one walk over the rows serves M and Mᵀ. Products of other
operators need no rows."""


class Gram:
    """MᵀM of one matrix (T, S) of an operator, in float64 and in units of ``scale``².

    All of it is float64, the softmax too: MᵀM squares the singular values, so that rounding hides those below
    1e-8·σ_1. In float32 it would hide those below 3e-4·σ_1, which hold much of the mass of long tails.
    """

    def __init__(self, op: MixingOperator) -> None:
        op = op.operator if isinstance(op, TransposedMixing) else op  # it has the same singular values
        self.operator = as_operator(op, "`estimate_spectrum`")
        self.rows, self.columns = op.shape
        self.device = self.operator.device
        self.scale, self.energy = self._measure()

    @property
    def finite(self) -> bool:
        """True if M has neither NaN nor infinity."""
        return math.isfinite(self.energy)

    def __call__(
        self, vectors: Float64[Tensor, "S V"]
    ) -> tuple[Float64[Tensor, "S V"], Float64[Tensor, "V V"]]:
        """Return MᵀM X, and Xᵀ MᵀM X as the Gram matrix of M X, which rounding cannot make negative."""
        vectors = vectors / self.scale
        op = self.operator
        if not isinstance(op.operator if isinstance(op, IndexedMixing) else op, ROW_WALKED):
            image = op @ vectors
            return op.mT @ image / self.scale, image.mT @ image
        product = torch.zeros_like(vectors)
        inner = vectors.new_zeros(vectors.shape[-1], vectors.shape[-1])
        for block in self._blocks():
            image = block @ vectors
            inner += image.mT @ image
            product += block.mT @ image
        return product / self.scale, inner

    def _blocks(self) -> Iterator[Float64[Tensor, "R S"]]:
        entries = BLOCK_ENTRIES.get(self.device.type, DEVICE_BLOCK_ENTRIES)
        step = max(1, entries // self.columns)
        for start in range(0, self.rows, step):
            yield self.operator.rows(start, min(start + step, self.rows)).to(torch.float64)

    def _measure(self) -> tuple[float, float]:
        """Return a power of two near the largest entry, and ‖M‖_F² in units of its square."""
        largest, energies = 0.0, []
        for block in self._blocks():
            top = float(block.abs().max())
            if not math.isfinite(top):
                return 1.0, math.nan
            if top > 0:
                energies.append((top, float((block / top).square().sum())))
                largest = max(largest, top)
        # At least the smallest normal number, whose inverse is finite.
        scale = max(2.0 ** (math.frexp(largest)[1] - 1), sys.float_info.min) if largest > 0 else 1.0
        return scale, math.fsum(energy * (top / scale) ** 2 for top, energy in energies)


class Krylov(NamedTuple):
    """A compressed to the span of X, A X, …, A^(k−1) X for a block X of P starting vectors.

    Sums Σ_i f(λ_i) (v_iᵀ x)² over the eigenpairs of A are the same for ``matrix`` and ``start`` if f is a
    polynomial of degree at most 2k − 1.
    """

    matrix: Float64[Tensor, "N N"]
    """Qᵀ A Q, block tridiagonal."""
    start: Float64[Tensor, "N P"]
    """Qᵀ X."""
    tail: Float64[Tensor, "P N"]
    """The part of A that leaves the space: the residual of a Ritz vector Q s is ‖tail s‖."""
    steps: int
    """Number of products of A with one block of vectors."""
    basis: Float64[Tensor, "M N"] | None
    """Q, if ``keep_basis``."""


def block_lanczos(
    apply: Apply, start: Float64[Tensor, "M P"], steps: int, tolerance: float, keep_basis: bool = False
) -> Krylov:
    """Compress a matrix to a Krylov space by block Lanczos, fully reorthogonalized.

    Directions that A couples less strongly than ``tolerance`` are rounding errors and are left out. Fewer
    than ``steps`` products are made if the space becomes invariant.
    Cost: ``steps`` calls of ``apply`` with P vectors, O(M (P steps)²) for orthogonality, M·P·steps numbers.
    Source: G. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", 2010.
    """
    size, width = start.shape
    basis = start.new_empty(steps * width, size)  # a block a step, each in one piece of memory
    matrix = start.new_zeros((steps + 1) * width, (steps + 1) * width)
    block, first = _orthonormal(start, 1e-10 * float(start.norm()))
    used, kept = 0, []
    for used in range(1, steps + 1):
        here, after = slice((used - 1) * width, used * width), slice(used * width, (used + 1) * width)
        known = basis[: used * width]
        known[here] = block.mT
        kept.append(block.square().sum(0) > 0.5)  # columns of directions left out are zero
        product, inner = apply(block)
        matrix[here, here] = (inner + inner.mT) / 2
        block, outer = _orthonormal(_without(product, known), tolerance)
        # A small remainder that is scaled up to unit length has lost its orthogonality: do it again.
        block, again = _orthonormal(_without(block, known), 0.5)
        if 8 * block.numel() >= TRIM_BYTES:
            _trim_memory()
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


def _trim_memory() -> None:
    """Ask the C library to return unused memory to the system.

    glibc before 2.38 does not reuse the hole of an aligned block for a block of the same size: after 64 steps
    the holes are as large as the basis.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _without(vectors: Tensor, known: Tensor) -> Tensor:
    """Subtract the part of vectors in a basis of rows, twice because of rounding."""
    for _ in range(2):
        vectors = torch.addmm(vectors, known.mT, known @ vectors, alpha=-1)
    return vectors


def _orthonormal(vectors: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return Q and R with vectors = Q R; directions shorter than the tolerance are zero columns of Q."""
    orthogonal, triangular = torch.linalg.qr(vectors)
    left, lengths, right = torch.linalg.svd(triangular)
    kept = lengths > tolerance
    return (orthogonal @ left) * kept, (lengths * kept)[:, None] * right
