"""Products with the operator of the gated delta rule and its transpose, chunk by chunk."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankwise.operators.scan import CHUNK, log_weights

CHANNEL_CHUNK = 16
"""Tokens in a block where each feature decays by itself: its products take CHANNEL_CHUNK² · K numbers."""


@dataclass(frozen=True)
class _Block:
    """A run of tokens, and how they meet: D(t, s) is the decay from s to t, D(t) that from before the run."""

    query: Tensor
    key: Tensor
    beta: Tensor
    """(..., C, 1)."""
    attend: Tensor
    """A[t, s] = q_t · D(t, s) k_s for s ≤ t, else 0."""
    system: Tensor
    """β_t k_t · D(t, s) k_s for s ≤ t, else 0; only what lies below the diagonal is read."""
    reach: Tensor
    """D(t), what is left at each token of what came before the run, (..., C, 1 or K)."""
    tail: Tensor
    """What is left of each token at the end of the run, (..., C, 1 or K)."""


def delta_scan(
    query: Float[Tensor, "*batch T K"],
    key: Float[Tensor, "*batch T K"],
    beta: Float[Tensor, "*batch T"],
    log_decay: Float[Tensor, "*batch T F"],
    values: Float[Tensor, "*values T V"],
    chunk: int | None = None,
) -> Float[Tensor, "*out T V"]:
    """What the gated delta rule reads at every token: o_t = S_tᵀ q_t.

    S_t = (I − β_t k_t k_tᵀ) diag(a_t) S_{t−1} + β_t k_t v_tᵀ from S_0 = 0. Within a chunk the updates
    u_t = β_t (v_t − k_tᵀ diag(a_t) S_{t−1}) solve one triangular system, so that the chunk is a few matrix
    products; across chunks there is a state of K×V numbers.

    Cost: O(T (K V + chunk (K + V))) time and O(T V + chunk² + K V) memory for each leading axis; chunk² K in
    place of chunk² where each feature has a decay of its own. No decay is ever above 1 and nothing is divided
    by one.

    Args:
        query: q, what reads the state.
        key: k, what the state is written and corrected along.
        beta: β, how much of it.
        log_decay: log a, in [−inf, 0]; F is 1 or K. That of the first token has no part.
        values: v; their leading axes broadcast with those of the others.
        chunk: tokens in a block; by default 64, or 16 for a decay a feature. It changes rounding and time,
            nothing else.

    Examples:
        >>> one = torch.ones(3, 1)
        >>> delta_scan(one, one, torch.full((3,), 0.5), torch.zeros(3, 1), one).flatten().tolist()
        [0.5, 0.75, 0.875]
    """
    state, outputs = None, []
    for part in _parts(log_decay, chunk):
        block, v = _block(query, key, beta, log_decay, part), values[..., part, :]
        wanted = block.beta * (v if state is None else v - (block.key * block.reach) @ state)
        update = torch.linalg.solve_triangular(block.system, wanted, upper=False, unitriangular=True)
        output, added = block.attend @ update, (block.key * block.tail).mT @ update
        if state is None:
            state = added
        else:
            output = output + (block.query * block.reach) @ state
            state = block.reach[..., -1, :, None] * state + added
        outputs.append(output)
    return torch.cat(outputs, dim=-2)


def delta_scan_transposed(
    query: Float[Tensor, "*batch T K"],
    key: Float[Tensor, "*batch T K"],
    beta: Float[Tensor, "*batch T"],
    log_decay: Float[Tensor, "*batch T F"],
    values: Float[Tensor, "*values T V"],
    chunk: int | None = None,
) -> Float[Tensor, "*out T V"]:
    """The transpose of what `delta_scan` applies, from the end: its adjoint, term by term.

    Args:
        query: as in `delta_scan`.
        key: as in `delta_scan`.
        beta: as in `delta_scan`.
        log_decay: as in `delta_scan`.
        values: one vector a row.
        chunk: as in `delta_scan`.

    Examples:
        >>> one = torch.ones(3, 1)
        >>> delta_scan_transposed(one, one, torch.full((3,), 0.5), torch.zeros(3, 1), one).flatten().tolist()
        [0.875, 0.75, 0.5]
    """
    state, outputs = None, []
    for part in reversed(_parts(log_decay, chunk)):
        block, w = _block(query, key, beta, log_decay, part), values[..., part, :]
        wanted = block.attend.mT @ w
        wanted = wanted if state is None else wanted + (block.key * block.tail) @ state
        solved = torch.linalg.solve_triangular(block.system.mT, wanted, upper=True, unitriangular=True)
        output = block.beta * solved
        added = (block.query * block.reach).mT @ w - (block.key * block.reach).mT @ output
        state = added if state is None else block.reach[..., -1, :, None] * state + added
        outputs.append(output)
    return torch.cat(outputs[::-1], dim=-2)


def _parts(log_decay: Tensor, chunk: int | None) -> list[slice]:
    tokens, features = log_decay.shape[-2:]
    chunk = chunk or (CHUNK if features == 1 else CHANNEL_CHUNK)
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def _block(query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor, part: slice) -> _Block:
    q, k, decay = query[..., part, :], key[..., part, :], log_decay[..., part, :]
    weights = log_weights(decay.mT).exp()  # (..., F, C, C)
    b = beta[..., part, None]
    if decay.shape[-1] == 1:
        attend, system = (q @ k.mT) * weights[..., 0, :, :], (k @ k.mT) * weights[..., 0, :, :]
    else:
        decayed = weights * k.mT[..., None, :]
        attend, system = ((left.mT[..., None] * decayed).sum(-3) for left in (q, k))
    return _Block(q, k, b, attend, b * system, decay.cumsum(-2).exp(), weights[..., -1, :].mT)
