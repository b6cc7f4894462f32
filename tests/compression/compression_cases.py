"""Small random models, token ids and outputs for tests of compression."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rankwise.compression.save import structure_of

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": 1,
    "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
}  # fmt: skip
Make = Callable[[], nn.Module]


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


def made(name: str, ending: str = "ForCausalLM", **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return sharpened(getattr(transformers, f"{name}{ending}")(config))


def bert(**more: Any) -> nn.Module:
    return made("Bert", "Model", **SIZES, **more)


def gpt2() -> nn.Module:
    return made("GPT2", "LMHeadModel", **GPT, n_positions=64)


def opt() -> nn.Module:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1}
    return made("OPT", **{**SIZES, **sizes})


def bigcode() -> nn.Module:
    """Multi-query attention: one key head for all queries, in a fused projection."""
    return made("GPTBigCode", **GPT, n_positions=64)


def llama(layers: int = 1) -> nn.Module:
    return made("Llama", **{**SIZES, "num_hidden_layers": layers}, num_key_value_heads=2)


def phi3(key_heads: int = 2) -> nn.Module:
    """Queries, keys and values in one projection."""
    return made("Phi3", **SIZES, **IDS, num_key_value_heads=key_heads)


def neox() -> nn.Module:
    """Queries, keys and values of each head next to each other in one projection; a quarter is rotated."""
    return made("GPTNeoX", **SIZES, **IDS, max_position_embeddings=64)


def smollm3() -> nn.Module:
    """The second layer rotates queries and keys, the first does not."""
    sizes: dict[str, Any] = {"num_key_value_heads": 2, "no_rope_layers": [0, 1]}
    return made("SmolLM3", **SIZES, **IDS, **sizes)


def glm() -> nn.Module:
    """Rotates neighboring channels."""
    return made("Glm", **SIZES, **IDS, num_key_value_heads=2, head_dim=8)


def qwen3() -> nn.Module:
    """Norms of keys before rotation, grouped queries."""
    model = made("Qwen3", **SIZES, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("k_norm.weight"):
                parameter.copy_(torch.linspace(0.5, 2, 8))
    return model


ONE: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2, "max_position_embeddings": 64
}  # fmt: skip


def cohere() -> nn.Module:
    """Rotates neighboring channels."""
    return made("Cohere", **ONE)


def gpt_oss() -> nn.Module:
    """Cosines for one half of the channels, sinks next to the softmax."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return made("GptOss", **ONE, **experts, head_dim=8, layer_types=["full_attention"])


def windowed() -> nn.Module:
    """A layer that keeps the last 7 tokens, and one that keeps all of 64."""
    sizes = {**ONE, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    kinds = ["sliding_attention", "full_attention"]
    return made("GptOss", **sizes, head_dim=8, layer_types=kinds, sliding_window=8)


def apertus() -> nn.Module:
    """Norms of keys with heads before tokens."""
    return made("Apertus", **ONE)


def mpnet() -> nn.Module:
    """Attention written out by hand, with biases of positions."""
    return made("MPNet", "Model", **SIZES)


def bloom() -> nn.Module:
    """ALiBi, written out by hand; queries, keys and values of each head next to each other."""
    return made("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)


def deberta() -> nn.Module:
    """Relative positions that read queries and keys."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    return made("DebertaV2", "Model", **sizes, relative_attention=True, pos_att_type=["c2p", "p2c"])


def t5() -> nn.Module:
    """Initializes attention by the names of its projections; biases of positions."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=VOCABULARY, **sizes)).eval()


def siglip() -> nn.Module:
    """Initializes weights and biases of attention by the names of its projections; reads images."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.SiglipVisionConfig(image_size=16, patch_size=4, **sizes)
    return transformers.SiglipVisionModel(config).eval()


DECODERS: dict[str, Make] = {"gpt2": gpt2, "opt": opt, "bigcode": bigcode}
FAMILIES: dict[str, Make] = {"bert": bert, **DECODERS}
WRITTEN: dict[str, Make] = {"mpnet": mpnet, "bloom": bloom}
"""Families that write their softmax out by hand."""
ROTARY: dict[str, Make] = {"llama": lambda: llama(2), "phi3": lambda: phi3(4), "neox": neox, "glm": glm}
CACHED: dict[str, Make] = {
    "llama": llama, "gpt_oss": gpt_oss, "apertus": apertus,
    "qwen3": qwen3, "neox": neox, "cohere": cohere, "gpt2": gpt2, "bigcode": bigcode,
}  # fmt: skip
"""Decoders whose keys and values can come from a latent."""
WITH_HEADS: dict[str, Make] = {**FAMILIES, "llama": llama, "phi3": phi3, "neox": neox}


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch)[0]
    return found


def in_steps(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Logits of a text, its first half read at once and the rest token by token, and the cache."""
    found, cache, at = [], None, 0
    tokens = batch["input_ids"].shape[1]
    with torch.no_grad():
        for end in [tokens // 2, *range(tokens // 2 + 1, tokens + 1)]:
            part = {name: own[:, at:end] for name, own in batch.items() if name != "attention_mask"}
            if "attention_mask" in batch:
                part["attention_mask"] = batch["attention_mask"][:, :end]
            out = model(**part, past_key_values=cache, use_cache=True)
            found.append(out.logits)
            cache, at = out.past_key_values, end
    return torch.cat(found, 1), cache


def narrow_projections(model: nn.Module) -> dict[str, Any]:
    """Projections to queries or keys that compression has narrowed, by name."""
    return {name: one for name, one in model.named_modules() if type(one).__name__ == "NarrowProjection"}


def latent_layers(model: nn.Module) -> list[Any]:
    """Records of the attention layers of a model that have a latent."""
    return [change for change in structure_of(model).changes if change.kind == "latent"]


def cache_bytes(cache: Any) -> int:
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)
