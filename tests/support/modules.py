"""Small modules from which tests build models, and their inputs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import MixingOperator


def token_ids(sequences: int = 2, tokens: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch of random token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(5, 60, (sequences, tokens), generator=generator)}


def kind(forward: Callable[..., Any], name: str = "Module", **parts: Callable[[], Any]) -> type[nn.Module]:
    """Return a class of modules with this `forward`; each module makes its parts anew."""

    def start(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for part, make in parts.items():
            setattr(self, part, make())

    return type(name, (nn.Module,), {"__init__": start, "forward": forward})


class Attention(nn.Module):
    """Softmax attention with one linear layer each for queries, keys, values and output.

    A query has `head_dim` numbers, by default the width of the model over the number of heads.
    """

    def __init__(
        self,
        width: int = 8,
        heads: int = 1,
        bias: bool = True,
        causal: bool = False,
        head_dim: int = 0,
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k = (nn.Linear(width, heads * head_dim or width, bias=bias) for _ in range(2))
        self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    """PyTorch's attention with one argument: queries, keys and values are of the same tokens."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Average(nn.Module):
    """Compute skip·x + strength·mean(x), so that tokens become similar if the skip is weak."""

    def __init__(self, skip: float = 1.0, strength: float = 1.0, width: int = 8) -> None:
        super().__init__()
        self.attention, self.skip = nn.MultiheadAttention(width, 1, batch_first=True), skip
        with torch.no_grad():
            self.attention.in_proj_weight[: 2 * width] = 0
            self.attention.in_proj_weight[2 * width :] = torch.eye(width)
            self.attention.out_proj.weight.copy_(strength * torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(x, x, x)[0]
        return x + mixed if self.skip == 1 else self.skip * x + mixed


class CausalAverage(nn.Module):
    """Apply a linear layer without bias to the mean of each token and all tokens before it."""

    def __init__(self, width: int = 8, strength: float = 1.0) -> None:
        super().__init__()
        self.out = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.out.weight.mul_(strength)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None])


def same(x: Tensor) -> Tensor:
    """Return the argument."""
    return x


class Block(nn.Module):
    """Compute after(x + mixer(before(x))); `before` and `after` are modules or functions."""

    def __init__(
        self,
        mixer: nn.Module,
        before: Callable[[Tensor], Tensor] = same,
        after: Callable[[Tensor], Tensor] = same,
    ) -> None:
        super().__init__()
        self.mixer, self.before, self.after = mixer, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.mixer(self.before(x)))


class Apply(nn.Module):
    """Apply a function to the states."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Stack(nn.Module):
    """Run modules one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GivenAttention(nn.Module):
    """Softmax attention of given queries and keys; keys are also the values, and queries are keys if none."""

    def __init__(self, mask: Tensor | None = None, is_causal: bool = False) -> None:
        super().__init__()
        self.mask, self.is_causal = mask, is_causal

    def forward(self, query: Tensor, key: Tensor | None = None) -> Tensor:
        key = query if key is None else key
        return F.scaled_dot_product_attention(query, key, key, attn_mask=self.mask, is_causal=self.is_causal)


class GivenOperator(nn.Module):
    """Module ``mix`` without an operation; a test passes its operator, as ``sites=sites_of(operator)``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


def sites_of(make: MixingOperator | Callable[[Tensor], MixingOperator]) -> dict[str, Callable[..., Any]]:
    """Return ``sites`` by which `GivenOperator` has an operator: always the same, or made of its input."""

    def operator_of(module: nn.Module, args: tuple[Tensor, ...], kwargs: Any, output: Any) -> MixingOperator:
        return make if isinstance(make, MixingOperator) else make(args[0])

    return {"mix": operator_of}


class OnlyX(nn.Module):
    """Encoder layer whose ``forward`` has the argument x alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
