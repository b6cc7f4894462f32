"""Replace the softmax attention of layers of the bundled demo by TSSA or linear attention."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.models.mixers import MIXERS

COPIED = {
    "tssa": {"in_proj": "v_proj", "out_proj": "o_proj"},
    "linear": {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"},
}
"""Projections of each kind of mixer, and the projections of attention from which they start."""


class ReplacedAttention(nn.Module):
    """Mixer with the arguments and results of Llama's attention; it has no cache and reads no padding."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        if others.get("past_key_values") is not None or attention_mask is not None:
            raise ValueError("replaced attention: expected no padding and no cache. Pass use_cache=False.")
        return self.mixer(hidden_states).output, None


@torch.no_grad()
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
        for own, name in COPIED[kind].items():
            source, target = getattr(attention, name).weight, getattr(mixer, own).weight
            if source.shape == target.shape:
                target.copy_(-source if (kind, name) == ("tssa", "o_proj") else source)
        blocks[layer].self_attn = ReplacedAttention(mixer.to(query.weight).train(attention.training))
