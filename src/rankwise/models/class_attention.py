"""Layers in which the class token alone reads the patches."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from rankwise.models.block import FeedForward, make_norm, make_scale
from rankwise.models.configuration import ToSTConfig
from rankwise.models.mixers.mixer import head_dim_of


class ClassAttention(nn.Module):
    """Softmax attention with one query: the first token's.

    Cost: O(T D).
    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 3.

    Args:
        config: width, heads and biases.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        head_dim_of("class attention", size, self.num_heads, None)
        self.qkv_proj = nn.Linear(size, 3 * size, bias=config.use_bias)
        self.out_proj = nn.Linear(size, size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B 1 D"]:
        """What the first token reads."""
        query, key, value = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(query[:, :, :1], key, value)
        return self.dropout(self.out_proj(read.transpose(1, 2).flatten(2)))


class ClassAttentionBlock(GradientCheckpointingLayer):
    """One class-attention layer of the released frame.

    Two habits of the released code are kept, since trained weights count on them:

    - patches are not left alone: a patch p gets ``p + γ₁ norm₁(p)`` here (what the attention gives for it is
      its own normed input);
    - with ``tokens_norm`` the second norm replaces all tokens, the residual starts after it, and patches are
      added to themselves: a patch leaves as ``2 norm₂(p + γ₁ norm₁(p))``, the class token c as
      ``n + γ₂ mlp(n)`` with n its norm₂. Without ``tokens_norm`` the second norm is on the class token
      alone. The factor 2 is undone by the next norm, up to its ε.

    Args:
        config: what it is made of.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        self.tokens_norm = config.tokens_norm
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention, self.mlp = ClassAttention(config), FeedForward(config)
        self.attention_scale = make_scale(config.hidden_size, config.layer_scale)
        self.mlp_scale = make_scale(config.hidden_size, config.layer_scale)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Run the layer on the class token and the patches after it."""
        normed = self.attention_norm(x)
        x = x + self.attention_scale(torch.cat([self.attention(normed), normed[:, 1:]], 1))
        token, patches = x[:, :1], x[:, 1:]
        token = self.mlp_norm(token)
        patches = self.mlp_norm(patches) if self.tokens_norm else patches
        return torch.cat([token + self.mlp_scale(self.mlp(token)), 2 * patches], 1)
