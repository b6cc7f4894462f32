"""Softmax attention mixer, whose queries and keys may have a different width than values."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.rotary import ROPE_BASE, apply_rope, rope_angles
from rankwise.errors import InputError, in_range
from rankwise.models.mixers.mixer import Mixer, MixerState, MixingStep, head_dim_of, split_heads
from rankwise.operators import SoftmaxMixing


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention, whose queries and keys may have a different width than values.

    The mixing matrix is M = softmax(Q Kᵀ / √K_qk), with query width K_qk, and 0 at masked entries. A masked
    token reads itself, so that no row is empty.
    Cost: O(T S) time per channel for S source tokens, and O(T S) memory per head. A call without state and
    masked tokens takes only O(S) memory per channel, if PyTorch has a fused kernel for these widths. The
    state grows with the number of tokens.

    Args:
        hidden_size: D, the model width.
        num_heads: H, the number of heads.
        head_dim: width of each head's values; D / H by default.
        query_dim: width of each head's queries and keys; ``head_dim`` by default.
        rotary_base: base of rotary position embeddings, usually 10,000; None for no position embeddings.
        causal: True if each token reads only itself and earlier tokens.

    Examples:
        >>> import torch
        >>> mixer = SoftmaxAttention(16, 4, query_dim=2)
        >>> x = torch.randn(1, 5, 16)
        >>> tuple(mixer(x).output.shape), tuple(mixer.mixing_operator(x).shape), mixer.state_size(5)
        ((1, 5, 16), (1, 4, 5, 5), 125)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        query_dim: int | None = None,
        rotary_base: int | float | None = None,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.head_dim = head_dim_of("SoftmaxAttention", hidden_size, num_heads, head_dim)
        self.query_dim = query_dim if query_dim is not None else self.head_dim
        self.rotary_base = rotary_base
        if rotary_base is not None:
            fix = f"Use {ROPE_BASE:g}, or None for no rotary positions."
            in_range("SoftmaxAttention `rotary_base`", rotary_base, "(0, inf)", fix=fix)
            if self.query_dim % 2:
                raise InputError(
                    "SoftmaxAttention `rotary_base`",
                    expected="queries and keys of an even width",
                    got=f"{self.query_dim}",
                    fix="Set `query_dim`, or width over heads, to an even number, or rotary_base=None.",
                )
        self.q_proj = nn.Linear(hidden_size, num_heads * self.query_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.query_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self._add_output(num_heads * self.head_dim, hidden_size, bias, dropout)

    def state_size(self, tokens: int) -> int:
        """Return the number of entries in keys, values and the mask of real tokens (one entry per token)."""
        return tokens * (self.num_heads * (self.query_dim + self.head_dim) + 1)

    def _mix(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Float[Tensor, "B H T V"], MixerState | None]:
        """Return M @ values, computed by PyTorch's fused attention, and the next state."""
        # Not `SoftmaxMixing @ values`, which splits values into parts of width K and rejects empty axes.
        query, key, value, valid, allowed = self._attention(hidden_states, mask, state)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None and self.causal
        )
        return mixed, (key, value, valid) if return_state else None

    def _mixing(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> MixingStep:
        query, key, value, valid, allowed = self._attention(hidden_states, mask, state)
        operator = SoftmaxMixing(query, key, mask=allowed, is_causal=allowed is None and self.causal)
        return MixingStep(operator, value, (key, value, valid) if return_state else None)

    def _attention(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values, flags of real tokens, and a mask (None if only causality masks)."""
        real = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        valid = real if mask is None else mask
        query, key, value = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary_base is not None:
            before = 0 if state is None else state[2].sum(1, keepdim=True)
            # Positions count only real tokens, as learned positions do.
            positions = (before + valid.cumsum(1) - 1)[:, None]
            cos, sin = rope_angles(positions, self.query_dim, self.rotary_base, query.dtype)
            query, key = (apply_rope(rows, cos, sin, "halves") for rows in (query, key))
        if state is not None:
            past_key, past_value, past_valid = state
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
            valid = torch.cat([past_valid, valid], 1)
        by_causality = mask is None and state is None
        return query, key, value, valid, None if by_causality else self._allowed(valid, query.shape[2])

    def _allowed(self, valid: Bool[Tensor, "B S"], queries: int) -> Bool[Tensor, "B 1 T S"]:
        """Return a mask, True if a query may read a source token; a query may always read its own token."""
        source = torch.arange(valid.shape[1], device=valid.device)
        target = source[-queries:, None]
        visible = valid[:, None, None, :]
        return (visible & (source <= target) if self.causal else visible) | (source == target)
