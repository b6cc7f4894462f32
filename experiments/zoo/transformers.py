"""Tiny random transformers of many families, and modules of plain PyTorch: no download, built at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TOKENS = 2, 12
Batch = dict[str, Any]
Builder = Callable[..., nn.Module]
"""Builds a model, given `attn_implementation` or nothing."""
Replay = Callable[[Any, Tensor, list[Tensor]], Tensor]
"""From a block, the state that it read and the products M V inside it, to the state that it returned."""


def text_inputs() -> Batch:
    torch.manual_seed(1)
    return {"input_ids": torch.randint(5, 60, (BATCH, TOKENS))}


def seq2seq_inputs() -> Batch:
    return text_inputs() | {"decoder_input_ids": torch.randint(5, 60, (BATCH, 7))}


def image_inputs() -> Batch:
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def hidden_inputs() -> Batch:
    """Return random token states, for modules without an embedding."""
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, TOKENS, 32)}


def two_hidden_inputs() -> Batch:
    return hidden_inputs() | {"y": torch.randn(BATCH, 7, 32)}


def seeded(make: Callable[[str | None], nn.Module]) -> Builder:
    """Return a builder of a module with the weights of seed 0, in evaluation mode."""

    def build(attn_implementation: str | None = None) -> nn.Module:
        torch.manual_seed(0)
        return make(attn_implementation).eval()

    return build


def hugging_face(model: str, config: str | None = None, **settings: Any) -> Builder:
    """Return a builder of a model of transformers from a tiny configuration."""

    def make(attn_implementation: str | None) -> nn.Module:
        import transformers

        made = getattr(transformers, config or model.removesuffix("Model") + "Config")(**TOKEN_IDS | settings)
        if attn_implementation:
            made._attn_implementation = attn_implementation
        made._experts_implementation = "eager"  # the grouped kernel does not accept float64
        net: nn.Module = getattr(transformers, model)(made)
        with torch.no_grad():  # tiny default weights make every attention uniform; widen them
            for parameter in net.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 2 / math.sqrt(parameter.shape[-1]))
        return net

    return seeded(make)


TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 8}
IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48}


class NanoAttention(nn.Module):
    """Causal self-attention in the style of nanoGPT: one fused projection, SDPA or a written-out softmax."""

    def __init__(self, width: int, n_head: int, flash: bool) -> None:
        super().__init__()
        self.n_head, self.flash = n_head, flash
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    def __init__(self, width: int, n_head: int, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), NanoAttention(width, n_head, flash)
        self.ln_2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(64, 32), "h": nn.ModuleList([NanoBlock(32, 4, flash) for _ in range(3)])}
        )
        self.lm_head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.transformer["wte"](input_ids)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(x)


class HandWritten(nn.Module):
    """Blocks as plain attributes; attention by einsum, with softmax called as a method of a tensor."""

    class Block(nn.Module):
        """Residual attention with heads kept on the third axis."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
            weights = (torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5).softmax(-1)
            return x + torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = self.Block(), self.Block(), self.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block3(self.block2(self.block1(x)))


class TorchEncoder(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=not settings.get("norm_first"))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode; `padding` is True for padding."""
        return self.encoder(x, src_key_padding_mask=padding)


class TorchAttention(nn.Module):
    """Residual blocks around `torch.nn.MultiheadAttention`."""

    class Block(nn.Module):
        """Pre-norm residual attention."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        return self.transformer(x, y, tgt_mask=mask)


def merged(attention: nn.MultiheadAttention, product: Tensor) -> Tensor:
    """Return the output of `torch.nn.MultiheadAttention` from M V."""
    return attention.out_proj(product.transpose(1, 2).flatten(2))


@torch.no_grad()
def replay_attention(block: Any, state: Tensor, products: list[Tensor]) -> Tensor:
    """Run the rest of `TorchAttention.Block`."""
    return state + merged(block.attention, products[0])


@torch.no_grad()
def replay_layer(layer: Any, state: Tensor, products: list[Tensor]) -> Tensor:
    """Run the rest of PyTorch's encoder or decoder layer, norms last."""
    decodes = isinstance(layer, nn.TransformerDecoderLayer)
    attentions = [layer.self_attn, layer.multihead_attn] if decodes else [layer.self_attn]
    norms = [layer.norm1, layer.norm2, layer.norm3] if decodes else [layer.norm1, layer.norm2]
    for attention, norm, product in zip(attentions, norms, products, strict=False):
        state = norm(state + merged(attention, product))
    return norms[-1](state + layer.linear2(layer.activation(layer.linear1(state))))


@dataclass(frozen=True)
class Family:
    """One model family: its builder, its inputs, and its number of mixers."""

    name: str
    build: Builder
    inputs: Callable[[], Batch]
    mixers: int
    """Attention calls in one forward pass."""
    states: int
    """Token states in one forward pass: blocks + 1 per stack."""
    eager: bool = True
    """True if transformers has it with a written-out softmax (`attn_implementation="eager"`)."""
    fused: bool = True
    """True if it has `scaled_dot_product_attention`."""
    final_norm: str = ""
    """Name of the module between the last state and the last of its `hidden_states`."""
    replay: Replay | None = None
    """Rest of a block after M V, if the product is hidden in a fused kernel."""

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("sdpa",) * self.fused + ("eager",) * self.eager


nano_gpt = seeded(lambda how: NanoGPT(flash=how != "eager"))
hand_written = seeded(lambda how: HandWritten())
torch_encoder = seeded(lambda how: TorchEncoder())
torch_attention = seeded(lambda how: TorchAttention())
torch_transformer = seeded(lambda how: TorchTransformer())
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4}
MODERN = BERT | {"global_attn_every_n_layers": 2, "local_attention": 6}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
ESM, ESM_NORM = BERT | {"mask_token_id": 4}, "encoder.emb_layer_norm_after"
OPT = BERT | {"ffn_dim": 48, "word_embed_proj_dim": 32}
MOE = LLAMA | {"num_local_experts": 3}
WINDOWED = LLAMA | {"sliding_window": 5}
TEXT, IMAGES = text_inputs, image_inputs
FAMILIES = [
    Family("BERT", hugging_face("BertModel", **BERT), TEXT, 3, 4),
    Family("RoBERTa", hugging_face("RobertaModel", **BERT), TEXT, 3, 4),
    Family("DistilBERT", hugging_face("DistilBertModel", **DISTIL), TEXT, 3, 4),
    Family("ALBERT", hugging_face("AlbertModel", **BERT | {"embedding_size": 16}), TEXT, 3, 4),
    Family("ELECTRA", hugging_face("ElectraModel", **BERT | {"embedding_size": 32}), TEXT, 3, 4),
    Family("ModernBERT", hugging_face("ModernBertModel", **MODERN), TEXT, 3, 4, final_norm="final_norm"),
    Family("DeBERTa-v2", hugging_face("DebertaV2Model", **DEBERTA), TEXT, 3, 4, fused=False),
    Family("GPT-2", hugging_face("GPT2Model", **GPT), TEXT, 3, 4, final_norm="ln_f"),
    Family("OPT", hugging_face("OPTModel", **OPT), TEXT, 3, 4, final_norm="decoder.final_layer_norm"),
    Family("GPT-NeoX", hugging_face("GPTNeoXModel", **BERT), TEXT, 3, 4, final_norm="final_layer_norm"),
    Family("Bloom", hugging_face("BloomModel", **BLOOM), TEXT, 3, 4, fused=False, final_norm="ln_f"),
    Family("Falcon", hugging_face("FalconModel", **BERT), TEXT, 3, 4, final_norm="ln_f"),
    Family("Llama", hugging_face("LlamaModel", **LLAMA), TEXT, 3, 4, final_norm="norm"),
    Family("Mistral", hugging_face("MistralModel", **WINDOWED), TEXT, 3, 4, final_norm="norm"),
    Family("Qwen3", hugging_face("Qwen3Model", **LLAMA), TEXT, 3, 4, final_norm="norm"),
    Family("Mixtral", hugging_face("MixtralModel", **MOE), TEXT, 3, 4, final_norm="norm"),
    Family("Gemma-2", hugging_face("Gemma2Model", **WINDOWED), TEXT, 3, 4, fused=False, final_norm="norm"),
    Family("Phi-3", hugging_face("Phi3Model", **LLAMA), TEXT, 3, 4, final_norm="norm"),
    Family("T5", hugging_face("T5Model", **T5), seq2seq_inputs, 9, 8, final_norm="final_layer_norm"),
    Family("ViT", hugging_face("ViTModel", **BERT | IMAGE), IMAGES, 3, 4),
    Family("Swin", hugging_face("SwinModel", **SWIN | {"depths": [2, 2]}), IMAGES, 4, 5),
    Family("ESM", hugging_face("EsmModel", **ESM), TEXT, 3, 4, final_norm=ESM_NORM),
    Family("nanoGPT style", nano_gpt, TEXT, 3, 4),
    Family("hand-written einsum", hand_written, hidden_inputs, 3, 4, fused=False),
    Family("torch TransformerEncoder", torch_encoder, hidden_inputs, 3, 4, False, replay=replay_layer),
    Family("torch Transformer", torch_transformer, two_hidden_inputs, 6, 6, False, replay=replay_layer),
    Family("torch MultiheadAttention", torch_attention, hidden_inputs, 3, 4, False, replay=replay_attention),
]  # fmt: skip
