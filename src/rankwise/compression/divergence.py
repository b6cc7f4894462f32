r"""How far attention moves when its logits change: KL(M ‖ M') in nats, averaged over rows."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.operators import MixingOperator

CHUNK = 2**24
"""Entries of attention matrices formed at once."""


@dataclass(frozen=True)
class Sample:
    """Queries and keys of some sequences, as attention got them, and the attention it gave."""

    operator: MixingOperator
    """Shape (B, H, T, S)."""
    query: Float[Tensor, "B H T K"]
    """Times the scale of the logits, so that query·keyᵀ are the logits but for masks and biases."""
    key: Float[Tensor, "B G S K"]
    tokens: Bool[Tensor, "B T"]
    """Rows that count: those of real tokens."""

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]

    def keys(self, first: int, last: int) -> Float[Tensor, "B h S K"]:
        """Keys of query heads ``first`` to ``last``."""
        heads = torch.arange(first, last, device=self.key.device) // self.groups
        return self.key[:, heads]


def divergence(
    matrix: Float[Tensor, "*batch T S"], change: Float[Tensor, "*batch T S"]
) -> Float[Tensor, "*batch T"]:
    """KL(M ‖ M') of each row, where M' has the logits of M plus a change.

    Formula: log Σ_j m_j·exp(c_j) − Σ_j m_j c_j. What is masked, m_j = 0, stays so and needs no logit.
    Range: [0, ∞) nats.

    Args:
        matrix: M, rows that sum to 1.
        change: what is added to its logits.
    """
    seen = matrix > 0
    mean = (matrix * change).sum(-1, keepdim=True)
    away = (change - mean).masked_fill(~seen, -torch.inf)  # around the mean: no cancellation in the logarithm
    top = away.amax(-1, keepdim=True).clamp(min=0)
    whole = (matrix * (away - top).exp()).sum(-1)
    return whole.clamp(min=torch.finfo(matrix.dtype).tiny).log() + top.squeeze(-1)


def head_divergence(
    samples: list[Sample], narrow_query: list[Float[Tensor, "K _"]], narrow_key: list[Float[Tensor, "K _"]]
) -> Float[Tensor, "H"]:
    """Mean KL(M ‖ M') over all real rows, for each query head; M' has the logits (Q A)(K B)ᵀ.

    Args:
        samples: sequences.
        narrow_query: A of each query head.
        narrow_key: B of each query head.
    """
    heads = len(narrow_query)
    total, rows = torch.zeros(heads, dtype=torch.float64), 0
    for sample in samples:
        for head in range(heads):
            query, key, matrix = head_parts(sample, head)
            A, B = narrow_query[head].to(query), narrow_key[head].to(query)
            change = (query @ A) @ (key @ B).mT - query @ key.mT
            total[head] += divergence(matrix, change)[sample.tokens].double().sum().cpu()
        rows += int(sample.tokens.sum())
    return total / max(rows, 1)


def width_curves(
    samples: list[Sample],
    query: list[Float[Tensor, "K K"]],
    key: list[Float[Tensor, "K K"]],
    widths: list[int],
) -> Float[Tensor, "H W"]:
    """`head_divergence` at several widths, of which each takes that many columns of the bases.

    Args:
        samples: sequences.
        query: a basis for each query head, best directions first.
        key: likewise.
        widths: ascending.

    Returns:
        In float64, one row for each query head.
    """
    heads = len(query)
    total, rows = torch.zeros(heads, len(widths), dtype=torch.float64), 0
    for sample in samples:
        for head in range(heads):
            q, k, matrix = head_parts(sample, head)
            turned_q, turned_k = q @ query[head].to(q), k @ key[head].to(k)
            change, done = -(q @ k.mT), 0
            for at, width in enumerate(widths):
                change = change + turned_q[..., done:width] @ turned_k[..., done:width].mT
                done = width
                total[head, at] += divergence(matrix, change)[sample.tokens].double().sum().cpu()
        rows += int(sample.tokens.sum())
    return total / max(rows, 1)


def head_parts(sample: Sample, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and attention of one head, (B, T, K), (B, S, K), (B, T, S), in float32 at least.

    Args:
        sample: the sequences.
        head: of the queries.
    """
    matrix = sample.operator[:, head : head + 1].dense()[:, 0]
    dtype = torch.promote_types(sample.query.dtype, torch.float32)
    key = sample.key[:, head // sample.groups]
    return sample.query[:, head].to(dtype), key.to(dtype), matrix.to(dtype)
