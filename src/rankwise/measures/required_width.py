r"""Query/key width that the logits of an attention head require, from second moments of queries and keys.

Let queries Q and keys K have the second moments P = QᵀQ and S = KᵀK. Replacing the logits Q Kᵀ by Q A Kᵀ,
with a matrix A, has the squared error ‖P^½ (A − I) S^½‖_F², summed over all query–key pairs. So the first r
singular directions of P^½ S^½ are the best rank-r approximation (KQ-SVD, arXiv 2512.05916). Compression
projects on these directions. Audits and plans report the width r that is required.
"""

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import float64_device, roots_of
from rankwise._internals.statistics import WIDTH_TOLERANCE
from rankwise.errors import in_range
from rankwise.measures.registry import all_finite
from rankwise.measures.row_moments import RowMoments, float64_blocks
from rankwise.operators import SoftmaxMixing

__all__ = ["WIDTH_TOLERANCE", "LogitMoments", "logit_moments", "required_head_dim"]

RIDGE = 1e-9
"""Ridge added to second moments, relative to their mean eigenvalue, so that inverse roots are finite."""


@dataclass(frozen=True)
class LogitBases:
    """Bases of the query space and the key space of a head of width K; the first columns matter most."""

    query: Float64[Tensor, "K K"]
    key: Float64[Tensor, "K K"]


def logit_bases(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> LogitBases:
    """Return bases whose first r columns minimize the squared error of the logits over all query–key pairs.

    Formula: A = S^½ V and B = S^−½ V, where P and S are the second moments of queries and keys, and V the
    eigenvectors of S^½ P S^½ in descending order. With the first r columns, logits are (Q A_r)(K B_r)ᵀ. For
    query heads that share one key head, pass the sum of their P: the bases then fit all these heads.
    Cost: two eigendecompositions, O(K³) time.
    """
    root, inverse = roots_of(key, RIDGE)
    vectors = torch.linalg.eigh(root @ query @ root).eigenvectors.flip(-1)
    return LogitBases(root @ vectors, inverse @ vectors)


def logit_energy(
    query: Float64[Tensor, "*batch K K"], key: Float64[Tensor, "*batch K K"]
) -> Float64[Tensor, "*batch K"]:
    """Return σ_i² of P^½ S^½, descending; the best rank-r logits have the squared error Σ_{i>r} σ_i²."""
    trace = key.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    ridge = RIDGE * trace.clamp(min=1e-300) / key.shape[-1]  # above rounding errors of S up to K = 1,000
    # σ² of P^½ L are σ² of P^½ S^½, as S = L Lᵀ
    root = torch.linalg.cholesky(key + torch.diag_embed(ridge.expand_as(key[..., 0])))
    return torch.linalg.eigvalsh(root.mT @ query @ root).flip(-1).clamp(min=0)


@dataclass(frozen=True)
class LogitMoments:
    """Second moments of the queries and keys of attention heads; ``+`` merges two sets of sequences."""

    query: Float64[Tensor, "*batch K K"]
    """Σ s² qqᵀ over all queries q, where s is the factor of the logits (usually 1/√K)."""
    key: Float64[Tensor, "*batch K K"]
    """Σ (k − k̄)(k − k̄)ᵀ over all keys k, where k̄ is the mean key of the sequence."""
    rows: Float64[Tensor, "*batch"]
    """Number of queries."""
    columns: Float64[Tensor, "*batch"]
    """Number of keys."""

    def __add__(self, other: "LogitMoments") -> "LogitMoments":
        """Return the moments of both sets of sequences together."""
        return LogitMoments(
            self.query + other.query,
            self.key + other.key,
            self.rows + other.rows,
            self.columns + other.columns,
        )

    def sum_sequences(self) -> "LogitMoments":
        """Return moments (B, H, …) summed over sequences; a head skips its non-finite sequences."""
        finite = all_finite(self.query) & all_finite(self.key)
        square = finite[..., None, None]
        return LogitMoments(
            self.query.where(square, 0.0).sum(0),
            self.key.where(square, 0.0).sum(0),
            self.rows.where(finite, 0.0).sum(0),
            self.columns.where(finite, 0.0).sum(0),
        )


def logit_moments(
    op: SoftmaxMixing,
    rows: Bool[Tensor, "B T"] | None = None,
    columns: Bool[Tensor, "B S"] | None = None,
) -> LogitMoments:
    """Return second moments of the queries and the centered keys, per sequence and head.

    Cost: O((T + S) K²) time and O(K²) memory per head, plus a float64 copy of 4,096 tokens at a time.

    Args:
        op: softmax attention operator, (..., H, T, S); with a mask, (B, H, T, S).
        rows: True for real queries; by default all queries are real.
        columns: True for real keys; by default all keys are real.

    Examples:
        >>> import torch
        >>> moments = logit_moments(SoftmaxMixing(torch.randn(2, 4, 9, 3), torch.randn(2, 2, 9, 3)))
        >>> moments.query.shape, moments.key.shape
        (torch.Size([2, 4, 3, 3]), torch.Size([2, 4, 3, 3]))
    """
    op = op.to(float64_device(op.device))
    rows, columns = (None if real is None else real[:, None] for real in (rows, columns))
    queries = RowMoments.of(op.query, rows)
    counted = op.key.new_full(op.key.shape[:-2], op.key.shape[-2], dtype=torch.float64)
    if columns is not None:
        counted = columns.sum(-1).to(counted).expand_as(counted)
    total = reduce(torch.add, (block.sum(-2, keepdim=True) for block in float64_blocks(op.key, columns)))
    mean = total / counted.clamp(min=1)[..., None, None]
    key = reduce(torch.add, (block.mT @ block for block in float64_blocks(op.key, columns, mean)))
    if op.heads_per_group > 1:
        key = key.repeat_interleave(op.heads_per_group, -3)
        counted = counted.repeat_interleave(op.heads_per_group, -1)
    return LogitMoments(op.scale**2 * queries.moments, key, queries.count, counted)


def required_head_dim(
    moments: LogitMoments | SoftmaxMixing, tolerance: float | int = WIDTH_TOLERANCE
) -> Float64[Tensor, "*batch"]:
    """Return the smallest query/key width that preserves the attention map of a head, to second order.

    Formula: the smallest r with ½ Σ_{i>r} σ_i² ≤ tolerance. σ_i are the singular values of P^½ S^½, with the
    second moments P = mean s² qqᵀ of scaled queries and S = mean (k − k̄)(k − k̄)ᵀ of centered keys. The left
    side is half of the logit variance per row that the best rank-r logits miss. To second order, it is the
    KL divergence of attention rows with nearly equal weights. Keys are centered, because softmax ignores a
    constant added to all logits of a row. Masks are ignored: all query–key pairs count.
    Range: [0, K]; 0 if the logits are so small that attention is uniform. Invariant to a rotation of queries
    and keys, to scaling to c·q and k/c, and to a vector added to every key. NaN if there is no token, or a
    moment is NaN or infinite. The result cannot exceed the number of tokens, so pass several per channel.
    Accuracy: usually an overestimate for peaked rows (docs/reference/findings.md).
    Cost: O(K³) time in addition to `logit_moments`.
    Source: KQ-SVD, arXiv 2512.05916, for the best rank-r logits. The tolerance in nats is specific to this
    project.

    Args:
        moments: second moments, or a softmax operator from which they are computed.
        tolerance: allowed KL divergence between the original and the narrow attention row, in nats.

    Raises:
        InputError: if the tolerance is not positive and finite.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 64, 2), torch.randn(2, 64, 2)
        >>> wide = torch.nn.functional.pad(torch.stack([q[0], k[0]]), (0, 6))  # 6 of 8 channels are zero
        >>> bool(required_head_dim(SoftmaxMixing(wide[:1], wide[1:])).item() <= 2)
        True
    """
    in_range("`tolerance`", tolerance, "(0, inf)", fix="It is in nats; 0.01 is usual.")
    seen = logit_moments(moments) if isinstance(moments, SoftmaxMixing) else moments
    pairs = seen.rows * seen.columns
    valid = all_finite(seen.query) & all_finite(seen.key) & (pairs > 0)
    square, pairs = valid[..., None, None], pairs.where(valid, 1.0)[..., None]
    energy = logit_energy(seen.query.where(square, 0.0), seen.key.where(square, 0.0)) / pairs
    missed = energy.flip(-1).cumsum(-1).flip(-1) / 2  # half of the variance missed at widths r = 0, 1, …
    width = (missed > tolerance).sum(-1).double()
    return width.masked_fill(~valid, float("nan"))
