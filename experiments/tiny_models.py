"""Tiny random models of many families, built in memory: no download, a fraction of a second each."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TOKENS = 2, 12
Batch = dict[str, Any]


def text_inputs() -> Batch:
    """Random token ids without padding."""
    torch.manual_seed(1)
    return {"input_ids": torch.randint(5, 60, (BATCH, TOKENS))}


def seq2seq_inputs() -> Batch:
    """Encoder and decoder ids of different lengths."""
    return text_inputs() | {"decoder_input_ids": torch.randint(5, 60, (BATCH, 7))}


def image_inputs() -> Batch:
    """Random pictures of 32×32."""
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def hidden_inputs() -> Batch:
    """Random token states, for modules without an embedding."""
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, TOKENS, 32)}


def hugging_face(model: str, config: str | None = None, **settings: Any) -> Callable[..., nn.Module]:
    """A builder of one transformers model from a tiny configuration."""

    def build(attn_implementation: str | None = None) -> nn.Module:
        import transformers

        made = getattr(transformers, config or model.removesuffix("Model") + "Config")(**TOKEN_IDS | settings)
        if attn_implementation:
            made._attn_implementation = attn_implementation
        made._experts_implementation = "eager"  # the grouped kernel takes no float64
        torch.manual_seed(0)
        net = getattr(transformers, model)(made)
        with torch.no_grad():  # tiny default weights make every attention uniform; widen them
            for parameter in net.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 2 / math.sqrt(parameter.shape[-1]))
        return net.eval()

    return build


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
        """Mix, then project."""
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
    """Pre-norm residual block."""

    def __init__(self, width: int, n_head: int, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), NanoAttention(width, n_head, flash)
        self.ln_2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Two residual steps."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A nanoGPT-style decoder over token ids."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(64, 32), "h": nn.ModuleList([NanoBlock(32, 4, flash) for _ in range(3)])}
        )
        self.lm_head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.transformer["wte"](input_ids)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(x)


def nano_gpt(attn_implementation: str | None = None) -> nn.Module:
    """NanoGPT with SDPA, or with a written-out softmax."""
    torch.manual_seed(0)
    return NanoGPT(flash=attn_implementation != "eager").eval()


class HandWritten(nn.Module):
    """Blocks as plain attributes; attention by einsum, its softmax method called on a tensor."""

    class Block(nn.Module):
        """Residual attention with heads kept on the third axis."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            """Add what attention gives."""
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
            weights = (torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5).softmax(-1)
            return x + torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = self.Block(), self.Block(), self.Block()

    def forward(self, x: Tensor) -> Tensor:
        """Three blocks."""
        return self.block3(self.block2(self.block1(x)))


def hand_written(attn_implementation: str | None = None) -> nn.Module:
    """The hand-written module."""
    torch.manual_seed(0)
    return HandWritten().eval()


class TorchEncoder(nn.Module):
    """`torch.nn.TransformerEncoder` as it comes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=not settings.get("norm_first"))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode; ``padding`` is True where a token is none."""
        return self.encoder(x, src_key_padding_mask=padding)


def torch_encoder(attn_implementation: str | None = None) -> nn.Module:
    """PyTorch's encoder."""
    torch.manual_seed(0)
    return TorchEncoder().eval()


class TorchAttention(nn.Module):
    """Residual blocks around `torch.nn.MultiheadAttention`."""

    class Block(nn.Module):
        """Pre-norm residual attention."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            """Add what attention gives."""
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        """Three blocks."""
        return self.blocks(x)


def torch_attention(attn_implementation: str | None = None) -> nn.Module:
    """Blocks around PyTorch's attention module."""
    torch.manual_seed(0)
    return TorchAttention().eval()


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer`, encoder and decoder, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Encode x, decode y causally."""
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        return self.transformer(x, y, tgt_mask=mask)


def torch_transformer(attn_implementation: str | None = None) -> nn.Module:
    """PyTorch's encoder and decoder."""
    torch.manual_seed(0)
    return TorchTransformer().eval()


def two_hidden_inputs() -> Batch:
    """Random token states of two lengths."""
    return hidden_inputs() | {"y": torch.randn(BATCH, 7, 32)}
