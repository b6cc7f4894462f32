"""Gated delta rule: mixing matrices (operators) of DeltaNet, Gated DeltaNet and Kimi Delta Attention."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import compute_dtype
from rankwise.operators.scan import CHUNK, CausalScanMixing, log_weights

CHANNEL_CHUNK = 16
"""Tokens per chunk if each feature has its own decay. The chunk is small, because the products within a chunk
then take memory for CHANNEL_CHUNK² · K numbers."""


class GatedDeltaMixing(CausalScanMixing):
    """Gated delta rule: a linear memory in which each write first removes the value stored at its key.

    Token t has query q_t, key k_t, value v_t, write strength β_t and decay a_t. The memory S_t is a K×V
    matrix with ``S_0 = 0``. The output is ``o_t = S_tᵀ q_t``, where ``S_t = P_t S_{t−1} + β_t k_t v_tᵀ`` and
    ``P_t = (I − β_t k_t k_tᵀ) diag(a_t)``. So ``M[t, s] = β_s q_tᵀ P_t P_{t−1} … P_{s+1} k_s`` for s ≤ t,
    else 0; T = S.

    Any block on or below the diagonal has rank at most K. DeltaNet has no decay, Gated DeltaNet one decay per
    token, and Kimi Delta Attention (KDA) one decay per token and feature. Entries may have either sign, and
    rows need not sum to 1. Layers keep ‖k‖ = 1 and β in [0, 2], so that P_t never increases the norm of the
    memory. If ``β_t ‖k_t‖² > 2``, the memory can grow without bound.

    `M @ V`, Mᵀ U and `rows` (Mᵀ applied to unit vectors) run over chunks of tokens: O(T K V) time and O(T (K
    + V)) memory per head. V is the width of the values; for `rows`, V is the number of rows.

    Source: S. Yang, B. Wang, Y. Zhang, Y. Shen and Y. Kim, "Parallelizing Linear Transformers with the Delta
    Rule over Sequence Length", NeurIPS 2024, section 3; S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta
    Networks: Improving Mamba2 with Delta Rule", ICLR 2025, section 3; Kimi Team, "Kimi Linear", 2025.

    Args:
        query: q, (..., H, T, K), already multiplied by the scale of the layer.
        key: k, (..., H, T, K).
        beta: β, (..., H, T).
        log_decay: log a in [−inf, 0]: (..., H, T), or (..., H, T, K) for one decay per feature. None means
            a = 1. The decay of the first token has no effect.

    Raises:
        ShapeError: if the shapes of the tensors do not fit together.

    Examples:
        >>> import torch
        >>> one = torch.ones(1, 3, 1)
        >>> GatedDeltaMixing(one, one, torch.full((1, 3), 0.5)).dense()[0].tolist()
        [[0.5, 0.0, 0.0], [0.25, 0.5, 0.0], [0.125, 0.25, 0.5]]
    """

    kind = "gated delta"
    held = ("query", "key", "beta", "log_decay")

    def __init__(
        self,
        query: Float[Tensor, "*heads T K"],
        key: Float[Tensor, "*heads T K"],
        beta: Float[Tensor, "*heads T"],
        log_decay: Float[Tensor, "..."] | None = None,
    ) -> None:
        fits = (
            query.ndim >= 2
            and query.shape == key.shape
            and 0 not in query.shape[-2:]
            and beta.shape == query.shape[:-1]
            and (log_decay is None or log_decay.shape in (beta.shape, query.shape))
        )
        if not fits:
            decay = "" if log_decay is None else f", log_decay {tuple(log_decay.shape)}"
            raise ShapeError(
                "`GatedDeltaMixing`",
                expected="query and key (..., H, T, K), beta (..., H, T), log_decay (..., H, T) or "
                "(..., H, T, K), T and K ≥ 1",
                got=f"query {tuple(query.shape)}, key {tuple(key.shape)}, beta {tuple(beta.shape)}{decay}",
                fix="Move the heads before the tokens, and repeat key heads that several value heads share.",
            )
        self.query, self.key, self.beta, self.log_decay = query, key, beta, log_decay

    @property
    def shape(self) -> torch.Size:
        """Shape (..., H, T, T) for H heads and T tokens."""
        return torch.Size([*self.beta.shape, self.beta.shape[-1]])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of M by applying Mᵀ to unit vectors: O(stop (stop − start) K) time."""
        work = compute_dtype(self.dtype)
        if stop <= start:
            return self.beta.new_zeros((*self.shape[:-2], 0, self.shape[-1]), dtype=work)
        unit = torch.eye(stop, dtype=work, device=self.device)[:, start:]
        columns = delta_scan_transposed(*self._inputs(work, stop), unit)
        return F.pad(columns.mT, (0, self.shape[-1] - stop))

    def _multiply(self, values: Tensor, transposed: bool) -> Tensor:
        return (delta_scan_transposed if transposed else delta_scan)(*self._inputs(values.dtype), values)

    def _inputs(self, work: torch.dtype, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, β and log a (with a feature axis) of the first ``tokens`` tokens in dtype ``work``."""
        decay = torch.zeros_like(self.beta) if self.log_decay is None else self.log_decay
        decay = decay[..., None] if decay.ndim == self.beta.ndim else decay
        query, key, decay = (tensor[..., :tokens, :].to(work) for tensor in (self.query, self.key, decay))
        return query, key, self.beta[..., :tokens].to(work), decay


@dataclass(frozen=True)
class _Block:
    """Tensors of a chunk of C tokens; D(t, s) is the decay from token s to token t."""

    query: Tensor
    key: Tensor
    beta: Tensor
    """Write strengths β, (..., C, 1)."""
    attend: Tensor
    """Weight q_t · D(t, s) k_s with which token t reads the update of token s ≤ t; 0 for s > t."""
    system: Tensor
    """Matrix of the linear system for the updates: β_t k_t · D(t, s) k_s for s < t. The solver takes the
    diagonal as 1 and ignores entries with s > t."""
    reach: Tensor
    """Decay from the end of the previous chunk to each token; (..., C, 1 or K)."""
    tail: Tensor
    """Decay from each token to the last token of the chunk; (..., C, 1 or K)."""


def delta_scan(
    query: Float[Tensor, "*batch T K"],
    key: Float[Tensor, "*batch T K"],
    beta: Float[Tensor, "*batch T"],
    log_decay: Float[Tensor, "*batch T F"],
    values: Float[Tensor, "*values T V"],
    chunk: int | None = None,
) -> Float[Tensor, "*out T V"]:
    """Compute the output of the gated delta rule at every token: o_t = S_tᵀ q_t.

    The memory is S_t = (I − β_t k_t k_tᵀ) diag(a_t) S_{t−1} + β_t k_t v_tᵀ, S_0 = 0. The updates of a chunk,
    u_t = β_t (v_t − S_{t−1}ᵀ diag(a_t) k_t), are the solution of one triangular system, so a chunk takes only
    a few matrix products. The memory, K×V numbers, is passed from chunk to chunk.

    Cost per sequence and head: O(T (K V + chunk (K + V))) time and O(T V + chunk² + K V) memory. If each
    feature has its own decay, replace chunk² by chunk² K. No decay exceeds 1, and nothing is divided by a
    decay, so decays cause no overflow.

    Args:
        query: q, vectors that read the memory.
        key: k, vectors along which the memory is written and corrected.
        beta: β, strength of each write.
        log_decay: log a, in [−inf, 0]; F is 1 or K. The decay of the first token has no effect.
        values: v; the leading axes broadcast with the leading axes of q, k and β.
        chunk: tokens per chunk, by default 64, or 16 if each feature has its own decay. The choice affects
            only rounding and time.

    Examples:
        >>> one = torch.ones(3, 1)
        >>> delta_scan(one, one, torch.full((3,), 0.5), torch.zeros(3, 1), one).flatten().tolist()
        [0.5, 0.75, 0.875]
    """
    state, outputs = None, []
    for span in _spans(log_decay, chunk):
        block, v = _block(query, key, beta, log_decay, span), values[..., span, :]
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
    """Return Mᵀ U for the mixing matrix M that `delta_scan` applies, from the last chunk to the first.

    Examples:
        >>> one = torch.ones(3, 1)
        >>> delta_scan_transposed(one, one, torch.full((3,), 0.5), torch.zeros(3, 1), one).flatten().tolist()
        [0.875, 0.75, 0.5]
    """
    state, outputs = None, []
    for span in reversed(_spans(log_decay, chunk)):
        block, w = _block(query, key, beta, log_decay, span), values[..., span, :]
        wanted = block.attend.mT @ w
        wanted = wanted if state is None else wanted + (block.key * block.tail) @ state
        solved = torch.linalg.solve_triangular(block.system.mT, wanted, upper=True, unitriangular=True)
        output = block.beta * solved
        added = (block.query * block.reach).mT @ w - (block.key * block.reach).mT @ output
        state = added if state is None else block.reach[..., -1, :, None] * state + added
        outputs.append(output)
    return torch.cat(outputs[::-1], dim=-2)


def _spans(log_decay: Tensor, chunk: int | None) -> list[slice]:
    """Return the chunks of tokens as slices, from the first chunk to the last."""
    tokens, features = log_decay.shape[-2:]
    chunk = chunk or (CHUNK if features == 1 else CHANNEL_CHUNK)
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def _block(query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor, span: slice) -> _Block:
    q, k, decay = query[..., span, :], key[..., span, :], log_decay[..., span, :]
    weights = log_weights(decay.mT).exp()  # shape (..., F, C, C)
    b = beta[..., span, None]
    if decay.shape[-1] == 1:
        attend, system = (q @ k.mT) * weights[..., 0, :, :], (k @ k.mT) * weights[..., 0, :, :]
    else:
        decayed = weights * k.mT[..., None, :]
        attend, system = ((left.mT[..., None] * decayed).sum(-3) for left in (q, k))
    return _Block(q, k, b, attend, b * system, decay.cumsum(-2).exp(), weights[..., -1, :].mT)
