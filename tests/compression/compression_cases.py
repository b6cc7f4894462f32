"""Small random models and token ids for tests of compression."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61


def ids(batch: int = 4, tokens: int = 24, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, tokens), generator=generator)}


def sharpened(model: nn.Module) -> nn.Module:
    """Random weights with logits that are not all near zero, and biases that are not all zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                parameter.mul_(8)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return model.eval()


def bert(**more: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return sharpened(BertModel(BertConfig(vocab_size=VOCABULARY, **sizes, **more)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return sharpened(
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    )


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=1,
    )  # fmt: skip
    return sharpened(OPTForCausalLM(config))


def bigcode() -> nn.Module:
    """Multi-query attention: one key head for all queries, in a fused projection."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(0)
    config = GPTBigCodeConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return sharpened(GPTBigCodeForCausalLM(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48,
    )  # fmt: skip
    return sharpened(LlamaForCausalLM(config))


def mpnet() -> nn.Module:
    """Attention written out by hand, with biases of positions."""
    from transformers import MPNetConfig, MPNetModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return sharpened(MPNetModel(MPNetConfig(vocab_size=VOCABULARY, **sizes)))


def bloom() -> nn.Module:
    """ALiBi, written out by hand, queries, keys and values of each head side by side in one projection."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    return sharpened(BloomForCausalLM(config))


def deberta() -> nn.Module:
    """Relative positions that read queries and keys."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = DebertaV2Config(
        vocab_size=VOCABULARY, relative_attention=True, pos_att_type=["c2p", "p2c"], **sizes
    )
    return sharpened(DebertaV2Model(config))


def t5() -> nn.Module:
    """Initialises attention by the names of its projections; biases of positions."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5EncoderModel(T5Config(vocab_size=VOCABULARY, **sizes)).eval()


def siglip() -> nn.Module:
    """Initialises weights and biases of attention by the names of its projections; reads images."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return SiglipVisionModel(SiglipVisionConfig(image_size=16, patch_size=4, **sizes)).eval()


DECODERS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "opt": opt, "bigcode": bigcode}
FAMILIES: dict[str, Callable[[], nn.Module]] = {"bert": bert, **DECODERS}
WRITTEN: dict[str, Callable[[], nn.Module]] = {"mpnet": mpnet, "bloom": bloom}
"""Families that write their softmax out by hand."""
