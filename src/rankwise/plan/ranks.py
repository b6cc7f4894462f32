"""Compute the rank of one head with random query and key weights, at many query/key widths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise._internals.linalg import as_float64
from rankwise._internals.rotary import ROPE_BASE, apply_rope, rope_angles
from rankwise.theory.random_heads import rank_of_stochastic

POSITIONS = ("none", "rope")
BLOCK = 32_767
"""Number of scores computed at once: they fit in a core's cache, and torch does not split them over threads,
which wait for each other on a busy machine."""


@dataclass(frozen=True)
class RandomHead:
    """Head with random weights: all settings that determine the distribution of its rank."""

    tokens: int
    states: Float[Tensor, "B T D"] | None = None
    """Token states; trial i reads sequence i mod B. None means orthonormal tokens."""
    mask: str = "full"
    positions: str = "none"
    temperature: float = 0.0
    """Softmax temperature in units of √K (K: query/key width); 0 is hardmax."""
    delta: float = 1e-2
    seed: int = 0

    def trial(self, head_dims: Sequence[int], trial: int) -> Float[np.ndarray, " W"]:
        """Return rank/T for each query/key width (ascending); the same trial number returns the same ranks.

        Without rotary positions, a narrower head uses the first columns of the widest head, so that
        differences between widths are less noisy. With rotary positions, each width draws its own weights.
        """
        if self.positions == "rope":
            rows = torch.arange(self.tokens)
            ranks = []
            for width in head_dims:
                angles = rope_angles(rows, width, ROPE_BASE, torch.float32)
                query, key = (apply_rope(part, *angles, "halves") for part in self._draw(width, trial))
                ranks.append(self.rank(query, key))
        else:
            query, key = self._draw(head_dims[-1], trial)
            if self.temperature == 0:
                ranks = hardmax_ranks(query, key, head_dims, self.mask)
            else:
                ranks = [self.rank(query[:, :width], key[:, :width]) for width in head_dims]
        return np.array(ranks) / self.tokens

    def rank(self, query: Float[Tensor, "T K"], key: Float[Tensor, "T K"]) -> int:
        """Return the number of hardmax winners (tokens) at temperature 0, else of singular values ≥ δ."""
        if self.temperature == 0:
            return _winners(query, key, self.mask)
        scores = as_float64(query) @ as_float64(key).mT
        if self.mask == "causal":
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        scores -= scores.amax(-1, keepdim=True)
        tau = self.temperature * math.sqrt(query.shape[-1])
        return rank_of_stochastic(scores.div_(tau).softmax(-1), self.delta)

    def _draw(self, width: int, trial: int) -> tuple[Float[Tensor, "T K"], Float[Tensor, "T K"]]:
        """Return queries and keys without positions: normalized token states times Gaussian weights."""
        stream = np.random.SeedSequence((self.seed, trial, 2)).generate_state(1)
        generator = torch.Generator().manual_seed(int(stream[0]))
        if self.states is None:  # orthonormal rows times Gaussian weights are Gaussian, whatever D is
            query, key = torch.randn(2, self.tokens, width, generator=generator)
            return query, key
        states = self.states[trial % len(self.states)].float()
        states = F.layer_norm(states / states.square().mean().sqrt(), states.shape[-1:])
        query, key = (states @ _weight(generator, width, states.shape[-1]) for _ in range(2))
        return query, key


def _weight(generator: torch.Generator, width: int, dim: int) -> Float[Tensor, "D K"]:
    """Draw N(0, 1/D) entries column by column: a wider weight starts with the narrower weight."""
    drawn = torch.randn((width, dim), generator=generator) / math.sqrt(width)
    return (drawn * math.sqrt(width / dim)).mT


def _winners(query: Tensor, key: Tensor, mask: str) -> int:
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
    wanted = {width: at for at, width in enumerate(head_dims)}
    columns = key[:, : head_dims[-1]].float().mT.contiguous()
    hit = np.zeros((len(head_dims), tokens), dtype=bool)
    for start in range(0, tokens, rows):
        parts = query[start : start + rows, : head_dims[-1]].float().mT.unsqueeze(-1).contiguous()
        scores = torch.zeros(parts.shape[1], tokens)
        if mask == "causal":
            ahead = torch.arange(tokens) > torch.arange(start, start + len(scores))[:, None]
            scores.masked_fill_(ahead, -torch.inf)  # masked scores stay −∞ when products are added
        view = scores.numpy()
        for at in range(head_dims[-1]):
            scores.addcmul_(parts[at], columns[at])
            if at + 1 in wanted:
                hit[wanted[at + 1], view.argmax(-1)] = True
    return [int(count) for count in hit.sum(-1)]
