"""Linear attention mixer: attention weights are products of positive query and key features."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.models.mixers.mixer import Mixer, MixerState, MixingStep, head_dim_of, split_heads
from rankwise.models.mixers.recurrent import drop_state_rows, prepend_sources
from rankwise.operators import LinearAttentionMixing
from rankwise.operators.base import compute_dtype


class LinearAttention(Mixer):
    """Multi-head linear attention with the feature map φ(x) = elu(x) + 1.

    The mixing matrix is M = diag(1/z)·(φ(Q)φ(K)ᵀ ⊙ mask). z are the row sums; if rows are not normalized,
    z = 1. Without a causal mask, M has rank ≤ F. Masked tokens have weight 0 as sources.
    Cost: O(T F V) time and O(T (F + V)) memory per head; the decoding state has F (V + 1) numbers per head.
    Source: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention", ICML 2020, equations 5, 7 and 9.

    Args:
        hidden_size: D, the model width.
        num_heads: H, the number of heads.
        head_dim: V, the width of each head's values; D / H by default.
        feature_dim: F, the width of each head's queries and keys; ``head_dim`` by default.
        normalized: True to divide each row of M by the row sum.
        causal: True if each token reads only itself and earlier tokens.

    Examples:
        >>> import torch
        >>> mixer = LinearAttention(16, 4, feature_dim=2)
        >>> x = torch.randn(1, 5, 16)
        >>> tuple(mixer(x).output.shape), mixer.mixing_operator(x).kind, mixer.state_size(1_000_000)
        ((1, 5, 16), 'linear', 40)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        feature_dim: int | None = None,
        normalized: bool = True,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.causal, self.normalized = num_heads, causal, normalized
        self.head_dim = head_dim_of("LinearAttention", hidden_size, num_heads, head_dim)
        self.feature_dim = feature_dim if feature_dim is not None else self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.feature_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.feature_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self._add_output(num_heads * self.head_dim, hidden_size, bias, dropout)

    def state_size(self, tokens: int) -> int:
        """Return H F (V + 1), the number of entries in two sums, whatever the number of tokens is."""
        return self.num_heads * self.feature_dim * (self.head_dim + 1)

    def _mixing(
        self, hidden_states: Tensor, mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> MixingStep:
        query, key, value = (
            split_heads(projection(hidden_states), self.num_heads)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        wide = compute_dtype(value.dtype)  # for sums over all tokens, half precision is too inaccurate
        query, key = F.elu(query.to(wide)) + 1, F.elu(key.to(wide)) + 1
        if mask is not None:
            key = key * mask[:, None, :, None]
        if state is not None:
            query, key, value = _with_state(state, query, key, value.to(wide))
        operator = LinearAttentionMixing(query, key, self.causal, self.normalized)
        final = (key.mT @ value.to(wide), key.sum(-2)) if return_state else None
        states = 0 if state is None else self.feature_dim
        return MixingStep(drop_state_rows(operator, states), value, final)


def _with_state(
    state: MixerState, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with one source token prepended per feature of the decoding state.

    Let z_n be the sum of feature n over earlier keys k, and e_n a unit vector. The source token of feature n
    has the key z_n e_n and the value Σ k_n v / z_n, where v are earlier values. So all source tokens together
    have the same effect on any query as the earlier tokens.
    """
    summed, weight = state
    seen = weight[..., None] > 0
    mean = torch.where(seen, summed / torch.where(seen, weight[..., None], 1.0), 0.0)
    query = F.pad(query, (0, 0, weight.shape[-1], 0))
    return query, prepend_sources(weight.diag_embed(), key), prepend_sources(mean, value)
