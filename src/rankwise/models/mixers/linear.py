"""Linear attention with positive features."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.models.mixers.base import MixerState, head_width, make_dropout, options_of
from rankwise.models.mixers.scanned import Mixing, OperatorMixer, in_front, rows_after
from rankwise.operators import LinearAttentionMixing
from rankwise.operators.base import compute_dtype


class LinearAttention(OperatorMixer):
    """Multi-head linear attention, φ(x) = elu(x) + 1.

    Formula: M = diag(1/z)·(φ(Q)φ(K)ᵀ ⊙ mask), its rank at most ``feature_dim`` without a causal mask; z the
    row sums, or 1. Normalised rows are averages, as softmax's are. A masked token is no source.
    Cost: O(T F V) time and O(T (F + V)) memory a head; the decoding state has F (V + 1) numbers a head.
    Source: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention", ICML 2020, equations 5, 7 and 9.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: V, width of a head's values; D / H where None.
        feature_dim: F, width of a head's queries and keys; ``head_dim`` where None.
        normalized: whether each row is divided by its sum.
        causal: whether a token sees only itself and earlier ones.
        bias: biases in the projections.
        dropout: rate on the output.

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
        self.head_dim = head_width("LinearAttention", hidden_size, num_heads, head_dim)
        self.feature_dim = feature_dim if feature_dim is not None else self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.feature_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.feature_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = make_dropout("LinearAttention", dropout)

    @classmethod
    def from_config(cls, config: Any) -> "LinearAttention":
        """Build from a `rankwise.models.ToSTConfig`; ``mixer_options["linear"]`` has the last word."""
        options = options_of(config, "linear", head_dim=config.head_dim)
        return cls(config.hidden_size, config.num_attention_heads, **options)

    def state_size(self, tokens: int) -> int:
        """Two sums over the tokens: the same for any ``tokens``."""
        return self.num_heads * self.feature_dim * (self.head_dim + 1)

    def _mixing(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None,
        state: MixerState | None,
        return_state: bool,
    ) -> Mixing:
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        wide = compute_dtype(value.dtype)  # the state is a sum over all tokens
        query, key = F.elu(query.to(wide)) + 1, F.elu(key.to(wide)) + 1
        if mask is not None:
            key = key * mask[:, None, :, None]
        states = 0
        if state is not None:
            states = self.feature_dim
            query, key, value = _after(state, query, key, value.to(wide))
        operator = LinearAttentionMixing(query, key, self.causal, self.normalized)
        left = (key.mT @ value.to(wide), key.sum(-2)) if return_state else None
        return Mixing(rows_after(operator, states) if states else operator, value, left)


def _after(state: MixerState, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state as sources: feature n with its whole weight z_n, and the mean of what it weighed."""
    summed, weight = state
    seen = weight[..., None] > 0
    mean = torch.where(seen, summed / torch.where(seen, weight[..., None], 1.0), 0.0)
    silent = query.new_zeros(*query.shape[:-2], weight.shape[-1], query.shape[-1])
    return (
        torch.cat([silent, query], -2),
        in_front(weight.diag_embed(), key),
        in_front(mean, value),
    )
