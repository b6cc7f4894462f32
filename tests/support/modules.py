"""Small modules from which tests build models."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Softmax attention with one linear layer each for queries, keys, values and output."""

    def __init__(self, width: int = 8, heads: int = 1, bias: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))

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


class Stack(nn.Module):
    """Run modules one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
