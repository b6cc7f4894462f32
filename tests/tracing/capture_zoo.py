"""Small models of every shape that people write attention in, and how far rounding carries an answer."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw

WIDTH, HEADS, TOKENS, BATCH = 24, 3, 7, 2


def hidden(batch: int = BATCH, tokens: int = TOKENS, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, tokens, width)


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    """(B, T, D) → (B, H, T, K)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """(B, H, T, K) → (B, T, D)."""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention whose inner product is given by a function of q, k, v (B, H, T, K)."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor], heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.mix = heads, mix
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(merged(self.mix(q, k, v)))


class Block(nn.Module):
    """Pre-norm residual block around any module of (B, T, D)."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Blocks one after the other, and a norm."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), dim=-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def stack_of(mix: Callable[[Tensor, Tensor, Tensor], Tensor] = plain, depth: int = 3) -> Stack:
    return Stack(lambda: Block(Attention(mix)), depth).eval()


# --- heads as modules of their own --------------------------------------------------------------------------


class Head(nn.Module):
    """One causal head, as in the well-known lecture."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), float("-inf"))
        return F.softmax(wei, dim=-1) @ v


class ManyHeads(nn.Module):
    """Heads side by side, concatenated (or summed, where each is as wide as the model)."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.wide = nn.ModuleList([Head(size) for _ in range(heads)]), size == WIDTH
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outs = [head(x) for head in self.heads]
        return self.proj(sum(outs) if self.wide else torch.cat(outs, dim=-1))


# --- other ways to lay out a model --------------------------------------------------------------------------


class ResidualOutside(nn.Module):
    """Lists of sublayers that return their update; the residual is added by the model."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.ModuleList(
                    [Attention(plain), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())]
                )
                for _ in range(depth)
            ]
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for attention, feedforward in self.layers:
            x = attention(x) + x
            x = feedforward(x) + x
        return self.norm(x)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlace(nn.Module):
    """A block that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(plain)

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(x)
        return x


class TokensFirst(nn.Module):
    """A block on (T, B, D), with B·H folded for bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        T, B, D = x.shape
        q, k, v = (
            part.reshape(T, B * HEADS, D // HEADS).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D // HEADS), dim=-1)
        mixed = torch.bmm(weights, v).transpose(0, 1).reshape(T, B, D)
        return x + self.out(mixed)


class Unbatched(nn.Module):
    """A block on (T, D)."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor] = plain) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.mix(q, k, v).transpose(0, 1).flatten(1)


class Stages(nn.Module):
    """Stages of blocks that keep the shape."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.Sequential(*[Block(Attention(plain)) for _ in range(depth)]) for depth in depths]
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.norm(x)


class Twins(nn.Module):
    """One encoder called on two inputs in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = stack_of()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.encoder(a).mean(1) * self.encoder(b).mean(1)).sum(-1)


class Towers(nn.Module):
    """Two encoders side by side in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([stack_of(), stack_of()])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.towers[0](a).mean(1) + self.towers[1](b).mean(1)


class Shared(nn.Module):
    """One block called again and again."""

    def __init__(self, times: int = 4) -> None:
        super().__init__()
        self.blocks, self.times = nn.ModuleList([Block(Attention(plain))]), times
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.blocks[0](x)
        return self.norm(x)


class CrossBlock(nn.Module):
    """Self-attention, then attention to a context."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor] = plain) -> None:
        super().__init__()
        self.attention, self.cross = Attention(mix), CrossAttention(mix)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.cross(x, context)


class CrossAttention(nn.Module):
    """Queries from x, keys and values from a context."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = mix

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = self.to_q(x), self.to_k(context), self.to_v(context)
        return merged(self.mix(*(heads_of(part) for part in parts)))


class CrossStack(nn.Module):
    """Blocks with a context."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor] = plain) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CrossBlock(mix) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)


class Sublayer(nn.Module):
    """Residual around whatever it is given to call, as in the annotated transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        return x + call(self.norm(x))


class SublayerBlock(nn.Module):
    """Attention (once or twice) and a feed-forward part, each in a sublayer of one list."""

    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({f"{at}": Attention(plain) for at in range(attentions)})
        self.feedforward = nn.Linear(WIDTH, WIDTH)
        self.sublayer = nn.ModuleList([Sublayer() for _ in range(attentions + 1)])

    def forward(self, x: Tensor) -> Tensor:
        for sublayer, attention in zip(self.sublayer, self.attentions.values(), strict=False):
            x = sublayer(x, attention)
        return self.sublayer[-1](x, self.feedforward)


# --- softmaxes that mix no tokens ---------------------------------------------------------------------------


class Router(nn.Module):
    """Experts weighed for each token, by a product with a softmax."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (gates.unsqueeze(-2) @ outs).squeeze(-2)


class SoftExperts(nn.Module):
    """Soft mixture of experts: tokens to slots and back."""

    def __init__(self, slots: int = 5) -> None:
        super().__init__()
        self.phi, self.expert = nn.Parameter(torch.randn(WIDTH, slots)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("b n d, d s -> b n s", x, self.phi)
        slots = torch.einsum("b n s, b n d -> b s d", logits.softmax(1), x)
        return torch.einsum("b n s, b s d -> b n d", logits.softmax(-1), self.expert(slots))


class CodeBook(nn.Module):
    """Tokens looked up softly in a table of parameters."""

    def __init__(self, codes: int = 5) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.codes.T, dim=-1) @ self.codes


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q) (softmax(K)ᵀ V)."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def channel_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cross-covariance: channels attend to channels."""
    q, k, v = (F.normalize(part.mT, dim=-1) for part in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).mT


def seen(model: nn.Module, *given: Tensor, **named: Tensor) -> rw.Trace:
    """Return the trace of a model with values, after a check that its (first) output is unchanged."""
    with torch.no_grad():
        alone = model(*given, **named)
        with rw.capture(model, values=True) as trace:
            captured = model(*given, **named)
    first, second = (out if out is None or isinstance(out, Tensor) else out[0] for out in (alone, captured))
    assert (first is second is None) or torch.equal(first, second)
    return trace
