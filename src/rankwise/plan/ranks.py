"""Rank of random heads at many widths: one trial."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankwise.plan.states import RandomBlock, Setting, gaussian, token_states, with_rope
from rankwise.theory.random_heads import rank_of_stochastic

BLOCK = 32_767
"""Scores held at once: they stay in a core's cache, and below what torch splits over threads, which on a
busy machine wait for each other longer than they work."""


def trial_ranks(setting: Setting, head_dims: tuple[int, ...], trial: int) -> Float[np.ndarray, "L W"]:
    """Rank/T of one head in every layer at every width, weights drawn anew.

    In layer 1 without rotary positions narrower heads are the first columns of the widest: every width has
    its own law, and differences between widths are less noisy. Elsewhere every width draws its own weights.

    Args:
        setting: what is drawn.
        head_dims: widths K, ascending.
        trial: which trial; the same trial gives the same ranks.

    Returns:
        (layers, widths); head 0 of each layer, for heads of one layer have one law.
    """
    if setting.layers > 1:
        columns = [_through_blocks(setting, width, trial) for width in head_dims]
        return np.stack(columns, axis=1) / setting.tokens
    if setting.positions == "rope":
        states = None if setting.knows_no_width else token_states(setting, trial)
        pairs = [_first_layer(setting, width, trial, states) for width in head_dims]
        found = [head_rank(setting, with_rope(query), with_rope(key)) for query, key in pairs]
        return np.array([found]) / setting.tokens
    query, key = _first_layer(setting, head_dims[-1], trial)
    if setting.temperature == 0:
        found = nested_hardmax_ranks(query, key, head_dims, setting.mask)
    else:
        found = [head_rank(setting, query[:, :width], key[:, :width]) for width in head_dims]
    return np.array([found]) / setting.tokens


def _first_layer(
    setting: Setting, width: int, trial: int, states: Tensor | None = None
) -> tuple[Float[Tensor, "T K"], Float[Tensor, "T K"]]:
    """Queries and keys of one head of the first layer, positions left out."""
    generator = setting.generator(trial, 2)
    if setting.knows_no_width:
        query, key = torch.randn(2, setting.tokens, width, generator=generator)
        return query, key
    if states is None:
        states = token_states(setting, trial)
    if setting.block == "pre":
        states = torch.nn.functional.layer_norm(states, states.shape[-1:])
    # The columns of a wider weight begin with those of a narrower one.
    weights = (gaussian(generator, width, setting.dim) * math.sqrt(width / setting.dim) for _ in range(2))
    query, key = (states @ weight.mT for weight in weights)
    return query, key


def _through_blocks(setting: Setting, width: int, trial: int) -> list[int]:
    """Rank in each layer, for one width."""
    states = token_states(setting, trial)
    block = RandomBlock(setting, width, setting.generator(trial, 3, width))
    found = []
    for layer in range(setting.layers):
        query, key = block.query_key(states)
        found.append(head_rank(setting, query[0], key[0]))
        if layer + 1 < setting.layers:
            states = block.passed(states, block.mixed(states, query, key))
    return found


def head_rank(setting: Setting, query: Float[Tensor, "T K"], key: Float[Tensor, "T K"]) -> int:
    """Rank of one head's matrix: different winners at temperature 0, else singular values ≥ δ."""
    if setting.temperature == 0:
        return _winners(query, key, setting.mask)
    scores = query.double() @ key.double().mT
    if setting.mask == "causal":
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    tau = setting.temperature * math.sqrt(query.shape[-1])
    scores -= scores.amax(-1, keepdim=True)
    return rank_of_stochastic(scores.div_(tau).softmax(-1), setting.delta)


def _winners(query: Tensor, key: Tensor, mask: str) -> int:
    tokens = len(key)
    hit = np.zeros(tokens, dtype=bool)
    for start in range(0, tokens, 512):
        scores = (query[start : start + 512] @ key.mT).numpy()
        if mask == "causal":
            scores[np.arange(tokens) > np.arange(start, start + len(scores))[:, None]] = -np.inf
        hit[scores.argmax(-1)] = True  # numpy's is some ten times as fast as torch's
    return int(hit.sum())


def nested_hardmax_ranks(
    query: Float[Tensor, "T K"], key: Float[Tensor, "T K"], head_dims: tuple[int, ...], mask: str = "full"
) -> list[int]:
    """Hardmax rank of Q_K K_Kᵀ for the first K columns, for many K at once.

    Scores of width K are those of K − 1 and one more product: all widths together cost what the widest
    does, and a search for the largest score of each row.
    Cost: O(T² K_max), O(T) memory beyond the inputs.

    Args:
        query: Q.
        key: the keys.
        head_dims: widths, ascending.
        mask: "full" or "causal".

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 50, 8)
        >>> ranks = nested_hardmax_ranks(q, k, (1, 8))
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
            scores.masked_fill_(ahead, -torch.inf)
        view = scores.numpy()
        for at in range(head_dims[-1]):
            scores.addcmul_(parts[at], columns[at])
            if at + 1 in wanted:
                hit[wanted[at + 1], view.argmax(-1)] = True
    return [int(count) for count in hit.sum(-1)]
