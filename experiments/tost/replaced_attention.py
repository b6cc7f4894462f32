"""Replace the softmax attention of layers of a Llama by TSSA or linear attention."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.models.mixers import MIXERS

MASKED = -1e4
"""Lower values of an additive mask hide a token; float16 has none below −65,504."""
COPIED = {
    "tssa": {"in_proj": "v_proj", "out_proj": "o_proj"},
    "linear": {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"},
}
"""Projections of each kind of mixer, and the projections of attention from which they start."""


class ReplacedAttention(nn.Module):
    """Mixer with the arguments and results of Llama's attention; it has no cache."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        if others.get("past_key_values") is not None:
            raise ValueError("cache of replaced attention: expected none. Pass use_cache=False.")
        return self.mixer(hidden_states, real_tokens_of(attention_mask)).output, None


def replace_attention(model: nn.Module, layers: Iterable[int], kind: str, **options: Any) -> None:
    """Replace the attention of some layers of a ``LlamaForCausalLM`` in place, and turn its cache off.

    Linear attention starts from the four projections of attention. TSSA starts from v_proj and −o_proj, for
    its output is −Π w/(1 + m). Projections of other shapes are drawn at random; positions are not rotated.
    Source: copied projections, J. Kasai et al., "Finetuning Pretrained Transformers into RNNs", EMNLP 2021.
    """
    config: Any = model.config
    config.use_cache = False
    blocks: Any = model.get_submodule("model.layers")
    for layer in layers:
        attention = blocks[layer].self_attn
        query = attention.q_proj
        given = {"head_dim": attention.head_dim, "causal": True, "bias": query.bias is not None, **options}
        mixer = MIXERS[kind](config.hidden_size, config.num_attention_heads, **given)
        mixer = mixer.to(query.weight).train(attention.training)
        for own, name in COPIED[kind].items():
            _copy(getattr(mixer, own), getattr(attention, name), attention, -1 if kind == "tssa" else 1)
        blocks[layer].self_attn = ReplacedAttention(mixer)


@torch.no_grad()
def _copy(target: nn.Linear, source: nn.Linear, attention: Any, output_sign: int) -> None:
    """Copy a projection if shapes agree; keys and values of a group of heads are copied for each head."""
    sign = output_sign if source is attention.o_proj else 1
    weight, bias = source.weight, source.bias
    if source in (attention.k_proj, attention.v_proj):
        groups = attention.num_key_value_groups
        weight, bias = (
            None if given is None
            else given.unflatten(0, (-1, attention.head_dim)).repeat_interleave(groups, 0).flatten(0, 1)
            for given in (weight, bias)
        )  # fmt: skip
    if weight.shape == target.weight.shape:
        target.weight.copy_(sign * weight)
        if target.bias is not None:  # the sign of TSSA is on the weights alone: a bias is added last
            target.bias.zero_() if bias is None else target.bias.copy_(bias)


def real_tokens_of(mask: Tensor | None) -> Tensor | None:
    """Return True for real tokens (B, T), from a mask of tokens (B, T) or of token pairs (B, 1, T, T).

    In a mask of pairs a real token sees itself, and nothing sees padding.
    """
    if mask is not None and mask.dim() == 4:
        mask = mask[:, 0].diagonal(dim1=-2, dim2=-1)
        mask = mask > MASKED if mask.is_floating_point() else mask
    return None if mask is None else mask.bool()
