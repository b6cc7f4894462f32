r"""How far attention moves when its logits change: KL(M ‖ M') in nats, averaged over rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankwise._internals.rotary import PairRotation
from rankwise.operators import MixingOperator


@dataclass(frozen=True)
class Sample:
    """Queries and keys of some sequences, and the attention they gave."""

    operator: MixingOperator
    """Shape (B, H, T, S)."""
    query: Float[Tensor, "B H T K"]
    """As attention got them; before the rotation where there is one."""
    key: Float[Tensor, "B G S K"]
    tokens: Bool[Tensor, "B T"]
    """Rows that count: those of real tokens."""
    scale: float = 1.0
    """Of the logits: scale·query·keyᵀ are the logits but for masks and biases."""
    rotation: PairRotation | None = None
    """What turns queries and keys by their position before they meet."""

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.query.shape[1] // self.key.shape[1]

    def of(self, rows: Int[Tensor, "b"]) -> "Sample":
        """Some of the sequences.

        Args:
            rows: which.
        """
        rotation = None if self.rotation is None else self.rotation[rows]
        own = self.operator[rows], self.query[rows], self.key[rows], self.tokens[rows]
        return Sample(*own, self.scale, rotation)

    def turned(self, heads: Float[Tensor, "B h T r"]) -> Float[Tensor, "B h T r"]:
        """Queries or keys as they meet.

        Args:
            heads: before the rotation.
        """
        return heads if self.rotation is None else self.rotation(heads)

    def logit_change(
        self,
        query: Float[Tensor, "B H T K"],
        key: Float[Tensor, "B G S K"],
        a: Float[Tensor, "H K r"],
        b: Float[Tensor, "G K r"],
    ) -> Float[Tensor, "B H T S"]:
        """What factors of some heads add to their logits.

        Args:
            query: of these heads.
            key: those they read.
            a: factors of the queries.
            b: of the keys.
        """
        groups = query.shape[1] // key.shape[1]

        def logits(q: Tensor, k: Tensor) -> Tensor:
            return self.scale * self.turned(q) @ self.turned(k).repeat_interleave(groups, 1).mT

        return logits(query @ a, key @ b) - logits(query, key)


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
    samples: list[Sample], query: Sequence[Float[Tensor, "K _"]], key: Sequence[Float[Tensor, "K _"]]
) -> Float[Tensor, "H"]:
    """Mean KL(M ‖ M') over all real rows, for each query head; M' has the logits (Q A)(K B)ᵀ.

    Args:
        samples: sequences.
        query: A of each query head.
        key: B of each key head.
    """
    heads = len(query)
    total, rows = torch.zeros(heads, dtype=torch.float64), 0
    for sample in samples:
        for head in range(heads):
            own = head // sample.groups
            q, k, matrix = head_parts(sample, head)
            change = sample.logit_change(q, k, query[head].to(q)[None], key[own].to(q)[None])
            total[head] += divergence(matrix, change[:, 0])[sample.tokens].double().sum().cpu()
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
            q, k = sample.scale * q[:, 0], k[:, 0]
            turned_q, turned_k = q @ query[head].to(q), k @ key[head].to(k)
            change, done = -(q @ k.mT), 0
            for at, width in enumerate(widths):
                change = change + turned_q[..., done:width] @ turned_k[..., done:width].mT
                done = width
                total[head, at] += divergence(matrix, change)[sample.tokens].double().sum().cpu()
        rows += int(sample.tokens.sum())
    return total / max(rows, 1)


def head_parts(sample: Sample, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and attention of one head, (B, 1, T, K), (B, 1, S, K), (B, T, S), in float32 at least.

    Args:
        sample: the sequences.
        head: of the queries.
    """
    matrix = sample.operator[:, head : head + 1].dense()[:, 0]
    dtype = torch.promote_types(sample.query.dtype, torch.float32)
    key = sample.key[:, head // sample.groups][:, None]
    return sample.query[:, head : head + 1].to(dtype), key.to(dtype), matrix.to(dtype)
