"""Factories of small models for tests of commands, named as ``NETS:build`` on the command line."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NETS = __file__
HERE = Path(__file__).parent
"""Folder of the files that some factories read and write; tests of these factories copy this module."""


class Block(nn.Module):
    """Self-attention with two heads of width 8, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def build() -> nn.Module:
    """Return a model of two blocks over bytes, which takes no mask."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 16), Block(), Block())


def with_batches() -> tuple[nn.Module, list[Tensor]]:
    return build(), [torch.zeros(1, 9, dtype=torch.long)]


def several() -> tuple[nn.Module, list[Tensor]]:
    return build(), [torch.full((1, 9), token) for token in range(3)]


def drawn() -> tuple[nn.Module, list[Tensor]]:
    """Return a model with other weights at each call."""
    _, batches = several()
    torch.seed()
    return nn.Sequential(nn.Embedding(256, 16), Block()), batches


def late() -> tuple[nn.Module, list[Tensor]]:
    return build(), [torch.zeros(1, 9, dtype=torch.long), torch.full((1, 9), 999)]


def wrong() -> str:
    return "model"


def broken() -> nn.Module:
    raise RuntimeError("no weights")


def leaving() -> nn.Module:
    raise SystemExit("no license")


def linear() -> nn.Module:
    return nn.Linear(2, 2)


class Average(nn.Module):
    """Attention that averages all tokens, so that token states collapse."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 1, batch_first=True)
        with torch.no_grad():
            self.attention.in_proj_weight[:16] = 0
            self.attention.in_proj_weight[16:] = torch.eye(8)
            self.attention.out_proj.weight.copy_(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]


def collapsing() -> tuple[nn.Module, Iterator[Tensor]]:
    torch.manual_seed(0)
    states = torch.randn(2, 16, 8) + 1
    return nn.Sequential(*(Average() for _ in range(6))), (batch for batch in (states, states + 1))


def layer(seed: int = 0) -> tuple[nn.Module, list[Tensor]]:
    """Return a layer of PyTorch and a batch."""
    torch.manual_seed(seed)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    torch.manual_seed(seed + 1)
    return model, [torch.randn(2, 9, 8)]


def counted() -> tuple[nn.Module, list[Tensor]]:
    """Return the layer, and add an x to the file "built"."""
    with (HERE / "built").open("a") as file:
        file.write("x")
    return layer()


def nan() -> tuple[nn.Module, list[Tensor]]:
    model, batches = layer()
    nn.init.constant_(model.linear1.weight, float("nan"))  # type: ignore[arg-type]
    return model, batches


def fails() -> tuple[nn.Module, list[Tensor]]:
    """Fail until the file "repaired" exists, which may contain the seed."""
    if not (HERE / "repaired").exists():
        raise OSError("no weights")
    return layer(int((HERE / "repaired").read_text() or 1))


def _ends(how: BaseException) -> tuple[nn.Module, Iterator[Tensor]]:
    """Return the layer, with batches that end in an exception until the file "repaired" exists."""
    model, batches = layer()

    def read() -> Iterator[Tensor]:
        yield from batches
        if not (HERE / "repaired").exists():
            raise how

    return model, read()


def interrupted() -> tuple[nn.Module, Iterator[Tensor]]:
    return _ends(KeyboardInterrupt())


def leaves() -> tuple[nn.Module, Iterator[Tensor]]:
    """Return batches that call `sys.exit`; add an x to the file "left"."""
    with (HERE / "left").open("a") as file:
        file.write("x")
    return _ends(SystemExit("no license"))


def killed_once() -> Any:
    """Kill the process if it is the first to call this factory."""
    if not (HERE / "killed").exists():
        (HERE / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return layer()


def raises() -> Any:
    return torch.nn.Nothing()  # type: ignore[attr-defined]


def named() -> nn.Module:
    """Return the model of transformers in the folder that the variable FOLDER names."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(os.environ["FOLDER"])


def few_words() -> nn.Module:
    """Return a language model whose vocabulary is smaller than the number of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, pad_token_id=0, **sizes))
