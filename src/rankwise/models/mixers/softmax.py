"""Softmax attention, its queries and keys as wide as asked."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.rotary import ROPE_BASE, apply_rope, rope_angles
from rankwise.errors import InputError
from rankwise.models.mixers.base import (
    Mixer,
    MixerOutput,
    MixerState,
    head_width,
    make_dropout,
    options_of,
    token_mask,
)
from rankwise.operators import SoftmaxMixing


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention whose query/key width is free of its value width.

    Formula: M = softmax(Q Kᵀ / √K_qk), a masked entry 0; a masked token sees itself, so that no row is empty.
    Cost: O(T S) time; fused, so O(T) memory. The state grows with the tokens.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: width of a head's values; D / H where None.
        query_dim: width of a head's queries and keys; ``head_dim`` where None.
        rotary_base: base of rotary positions of queries and keys, 10,000 as a rule; None: none. Scores then
            see how far apart tokens are from the first step of training on.
        causal: whether a token sees only itself and earlier ones.
        bias: biases in the projections.
        dropout: rate on the output.

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
        self.head_dim = head_width("SoftmaxAttention", hidden_size, num_heads, head_dim)
        self.query_dim = query_dim if query_dim is not None else self.head_dim
        self.rotary_base = rotary_base
        if rotary_base is not None:
            self._check_rotary(rotary_base)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.query_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.query_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = make_dropout("SoftmaxAttention", dropout)

    def _check_rotary(self, base: object) -> None:
        number = isinstance(base, int | float) and not isinstance(base, bool)
        if not (number and 0 < float(base) < math.inf):  # type: ignore[arg-type]
            raise InputError(
                "SoftmaxAttention `rotary_base`",
                expected="a positive number",
                got=repr(base),
                fix=f"Take {ROPE_BASE:g}, or None for no rotary positions.",
            )
        if self.query_dim % 2:
            raise InputError(
                "SoftmaxAttention `rotary_base`",
                expected="queries and keys of an even width",
                got=f"{self.query_dim}",
                fix="Set `query_dim`, or width over heads, to an even number; rotary_base=None has none.",
            )

    @classmethod
    def from_config(cls, config: Any) -> "SoftmaxAttention":
        """Build from a `rankwise.models.ToSTConfig`; ``mixer_options["softmax"]`` has the last word."""
        options = options_of(config, "softmax", head_dim=config.head_dim)
        return cls(config.hidden_size, config.num_attention_heads, **options)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixerOutput:
        """Attend; see `Mixer.forward`."""
        query, key, value, valid, allowed = self._parts(hidden_states, attention_mask, state)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None and self.causal
        )
        output = self.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2)))
        return MixerOutput(output, (key, value, valid) if return_state else None)

    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> SoftmaxMixing:
        """The attention matrix, not formed."""
        query, key, _, _, allowed = self._parts(hidden_states, attention_mask, state)
        return SoftmaxMixing(query, key, mask=allowed, is_causal=allowed is None and self.causal)

    def values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """The values of all tokens so far."""
        return self._parts(hidden_states, attention_mask, state)[2]

    def state_size(self, tokens: int) -> int:
        """Keys, values and one flag for each token."""
        return tokens * (self.num_heads * (self.query_dim + self.head_dim) + 1)

    def _parts(
        self, hidden_states: Tensor, attention_mask: Tensor | None, state: MixerState | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, all keys and values, which are real, which a query may see (None: by causality alone)."""
        mask = token_mask(attention_mask, hidden_states)
        valid = (
            mask if mask is not None else hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        )
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary_base is not None:
            before = 0 if state is None else state[2].sum(1, keepdim=True)
            # Positions count real tokens only, as learned positions do.
            positions = (before + valid.cumsum(1) - 1)[:, None]
            cos, sin = rope_angles(positions, self.query_dim, self.rotary_base, query.dtype)
            query, key = (apply_rope(rows, cos, sin, "halves") for rows in (query, key))
        if state is not None:
            past_key, past_value, past_valid = state
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
            valid = torch.cat([past_valid, valid], 1)
        plain = mask is None and state is None
        return query, key, value, valid, None if plain else self._allowed(valid, query.shape[2])

    def _allowed(self, valid: Bool[Tensor, "B S"], queries: int) -> Bool[Tensor, "B 1 T S"]:
        """Real tokens, of the past if causal; and itself, so that no row is empty."""
        source = torch.arange(valid.shape[1], device=valid.device)
        target = source[-queries:, None]
        seen = valid[:, None, None, :]
        return (seen & (source <= target) if self.causal else seen) | (source == target)
