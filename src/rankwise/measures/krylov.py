"""Krylov spaces of MᵀM, for a matrix that is never formed."""

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.operators import DenseMixing, IndexedMixing, MixingOperator, SoftmaxMixing
from rankwise.operators.base import TransposedMixing

TRIM_BYTES = 2**20
"""Blocks of vectors from this size on leave holes worth giving back: milliseconds, for steps of seconds."""

Apply = Callable[[Tensor], tuple[Tensor, Tensor]]
"""X → (A X, Xᵀ A X) for a symmetric A ≥ 0."""

BLOCK_ENTRIES = {"cpu": 2**18}
"""Entries of M held at once, whatever S: in float64 they stay in a CPU's cache."""
DEVICE_BLOCK_ENTRIES = 2**23
"""The same on an accelerator, which wants many: 64 MiB."""

ROW_WALKED = (SoftmaxMixing, DenseMixing)
"""Kinds whose own products compute the rows of M: one walk over them serves M and Mᵀ alike. The products of
any other kind are its own, and need no rows."""


class Gram:
    """MᵀM of one matrix of an operator, in float64 and in units of ``scale``².

    Everything is float64, the softmax too: MᵀM squares the singular values, so its rounding hides those
    below 1e-8·σ_1; in float32 it would hide those below 3e-4·σ_1, where long tails have much of their mass.

    Args:
        op: an operator of shape (T, S).
    """

    def __init__(self, op: MixingOperator) -> None:
        op = op.operator if isinstance(op, TransposedMixing) else op  # it has the same singular values
        op = op.to("cpu") if op.device.type == "mps" else op  # no float64 there
        # A dense matrix is cast a block at a time, not copied; other kinds are small where they are kept.
        self.operator = op if isinstance(op, DenseMixing) else op.to(torch.float64)
        self.rows, self.columns = op.shape
        self.device = op.device
        self.scale, self.energy = self._measure()

    @property
    def finite(self) -> bool:
        """Whether M holds neither NaN nor infinity."""
        return math.isfinite(self.energy)

    def __call__(
        self, vectors: Float64[Tensor, "S V"]
    ) -> tuple[Float64[Tensor, "S V"], Float64[Tensor, "V V"]]:
        """MᵀM X and Xᵀ MᵀM X, the second as the Gram matrix of M X: rounding cannot make it negative."""
        vectors = vectors / self.scale
        if not _walks_rows(self.operator):
            image = self.operator @ vectors
            return self.operator.mT @ image / self.scale, image.mT @ image
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
        """A power of two near the largest entry, and ‖M‖_F² in units of its square."""
        largest, energies = 0.0, []
        for block in self._blocks():
            top = float(block.abs().max())
            if not math.isfinite(top):
                return 1.0, math.nan
            if top > 0:
                energies.append((top, float((block / top).square().sum())))
                largest = max(largest, top)
        # Not below the smallest normal number, whose inverse is finite.
        scale = max(2.0 ** (math.frexp(largest)[1] - 1), sys.float_info.min) if largest > 0 else 1.0
        return scale, math.fsum(energy * (top / scale) ** 2 for top, energy in energies)


def _walks_rows(operator: MixingOperator) -> bool:
    whole = operator.operator if isinstance(operator, IndexedMixing) else operator
    return isinstance(whole, ROW_WALKED)


class Krylov(NamedTuple):
    """A, compressed to the span of X, A X, …, A^(k−1) X for a block X of P starting vectors.

    Sums Σ_i f(λ_i) (v_iᵀ x)² over the eigenpairs of A are the same for ``matrix`` and ``start`` where f is a
    polynomial of degree at most 2k − 1.
    """

    matrix: Float64[Tensor, "N N"]
    """Qᵀ A Q, block tridiagonal."""
    start: Float64[Tensor, "N P"]
    """Qᵀ X."""
    tail: Float64[Tensor, "P N"]
    """What A takes out of the space: the residual of a Ritz vector Q s is ‖tail s‖. Zero: none."""
    steps: int
    """Products with A and one block of vectors."""
    basis: Float64[Tensor, "M N"] | None
    """Q, if it was asked for."""


def block_lanczos(
    apply: Apply, start: Float64[Tensor, "M P"], steps: int, tolerance: float, keep_basis: bool = False
) -> Krylov:
    """Compress a matrix, every new block made orthogonal to all before it, twice.

    Cost: ``steps`` calls of ``apply`` with P vectors, O(M (P steps)²) for orthogonality, M·P·steps numbers.
    Source: G. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", 2010.

    Args:
        apply: product with the matrix.
        start: the first vectors, P ≤ M of them.
        steps: how often to multiply; fewer if the space becomes invariant.
        tolerance: directions that A couples less strongly than this are rounding, and are left out.
        keep_basis: give Q too, instead of letting its memory go.
    """
    size, width = start.shape
    basis = start.new_empty(steps * width, size)  # a block a step, each in one piece of memory
    matrix = start.new_zeros((steps + 1) * width, (steps + 1) * width)
    block, first = _orthonormal(start, 1e-10 * float(start.norm()))
    used, live = 0, []
    for used in range(1, steps + 1):
        here, after = slice((used - 1) * width, used * width), slice(used * width, (used + 1) * width)
        known = basis[: used * width]
        known[here] = block.mT
        live.append(block.square().sum(0) > 0.5)  # directions left out are zero columns
        product, inner = apply(block)
        matrix[here, here] = (inner + inner.mT) / 2
        block, outer = _orthonormal(_without(product, known), tolerance)
        # A small remainder, scaled up to unit length, has lost its orthogonality: once more.
        block, again = _orthonormal(_without(block, known), 0.5)
        if 8 * block.numel() >= TRIM_BYTES:
            _give_back_holes()
        coupling = again @ outer
        matrix[after, here], matrix[here, after] = coupling, coupling.mT
        if not coupling.any():
            break
    there, end = torch.cat(live), used * width
    first = torch.cat([first, first.new_zeros(end - width, width)])
    return Krylov(
        matrix=matrix[:end, :end][there][:, there],
        start=first[there],
        tail=matrix[end : end + width, :end][:, there],
        steps=used,
        basis=basis[:end][there].mT if keep_basis else None,
    )


def _give_back_holes() -> None:
    """Ask the C library for what it holds and nobody uses, where it can be asked.

    glibc before 2.38 fits no aligned block into the hole that one of the same size left: 64 steps leave as
    much in holes as the basis itself takes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _without(vectors: Tensor, known: Tensor) -> Tensor:
    """Vectors less their part in a basis of rows; twice, because once leaves rounding behind."""
    for _ in range(2):
        vectors = torch.addmm(vectors, known.mT, known @ vectors, alpha=-1)
    return vectors


def _orthonormal(vectors: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Q, R with vectors = Q R; directions shorter than the tolerance become zero columns of Q."""
    orthogonal, triangular = torch.linalg.qr(vectors)
    left, lengths, right = torch.linalg.svd(triangular)
    kept = lengths > tolerance
    return (orthogonal @ left) * kept, (lengths * kept)[:, None] * right
