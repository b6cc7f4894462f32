"""Compute the rank of one head with random query and key weights, at many query/key widths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankwise._internals.rotary import ROPE_BASE, apply_rope, rope_angles

POSITIONS = ("none", "rope")
BLOCK = 32_767
"""Number of scores computed at once. They fit in a core's cache, and are too few for torch to use several
threads, which would wait for each other on a busy machine."""


@dataclass(frozen=True)
class RandomHead:
    """Hardmax head with random weights on orthonormal tokens."""

    tokens: int
    mask: str = "full"
    positions: str = "none"
    seed: int = 0

    def trial(self, head_dims: Sequence[int], trial: int) -> Float[np.ndarray, " W"]:
        """Return rank/T for each query/key width (ascending). A trial number always returns the same ranks.

        Without rotary positions, a narrower head uses the first columns of the widest head, so that
        differences between widths are less noisy. With rotary positions, each width draws its own weights.
        """
        if self.positions == "none":
            query, key = self._draw(head_dims[-1], trial)
            ranks = hardmax_ranks(query, key, head_dims, self.mask)
        else:
            rows = torch.arange(self.tokens)
            ranks = []
            for head_dim in head_dims:
                angles = rope_angles(rows, head_dim, ROPE_BASE, torch.float32)
                query, key = (apply_rope(x, *angles, "halves") for x in self._draw(head_dim, trial))
                ranks.append(count_winners(query, key, self.mask))
        return np.array(ranks) / self.tokens

    def _draw(self, head_dim: int, trial: int) -> Float[Tensor, "2 T K"]:
        """Draw queries and keys. Orthonormal tokens times Gaussian weights are Gaussian for any D."""
        stream = np.random.SeedSequence((self.seed, trial, 2)).generate_state(1)
        generator = torch.Generator().manual_seed(int(stream[0]))
        return torch.randn(2, self.tokens, head_dim, generator=generator, dtype=torch.float32)


def count_winners(query: Float[Tensor, "T K"], key: Float[Tensor, "T K"], mask: str = "full") -> int:
    """Return the hardmax rank: the number of different winners (tokens with the largest score of a row)."""
    tokens = len(key)
    hit = np.zeros(tokens, dtype=bool)
    for start in range(0, tokens, 512):
        scores = (query[start : start + 512] @ key.mT).numpy()
        if mask == "causal":
            scores[np.arange(tokens) > np.arange(start, start + len(scores))[:, None]] = -np.inf
        hit[scores.argmax(-1)] = True  # argmax of numpy is about ten times as fast as argmax of torch
    return int(hit.sum())


def hardmax_ranks(
    query: Float[Tensor, "T K"], key: Float[Tensor, "T K"], head_dims: Sequence[int], mask: str = "full"
) -> list[int]:
    """Return the hardmax rank (number of different winners) per query/key width, at the cost of the widest.

    Width K uses the first K columns of queries and keys; `head_dims` is ascending. The scores of width K are
    the scores of width K − 1 plus one product.
    Cost: O(T² K_max) time, O(T) memory in addition to the inputs and the widths.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 50, 8)
        >>> ranks = hardmax_ranks(q, k, (1, 8))
        >>> ranks[0] <= 2, ranks[1] > 2
        (True, True)
    """
    tokens = len(key)
    rows = max(1, BLOCK // tokens)
    places = {width: place for place, width in enumerate(head_dims)}
    columns = key[:, : head_dims[-1]].float().mT.contiguous()
    hit = np.zeros((len(head_dims), tokens), dtype=bool)
    for start in range(0, tokens, rows):
        factors = query[start : start + rows, : head_dims[-1]].float().mT.unsqueeze(-1).contiguous()
        scores = torch.zeros(factors.shape[1], tokens, dtype=torch.float32)
        if mask == "causal":
            ahead = torch.arange(tokens) > torch.arange(start, start + len(scores))[:, None]
            scores.masked_fill_(ahead, -torch.inf)  # masked scores stay −∞ when products are added
        view = scores.numpy()
        for width in range(1, head_dims[-1] + 1):
            scores.addcmul_(factors[width - 1], columns[width - 1])
            if width in places:
                hit[places[width], view.argmax(-1)] = True
    return [int(count) for count in hit.sum(-1)]
