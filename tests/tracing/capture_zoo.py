"""Small models in every layout of attention, and `seen`, which traces a model and compares its outputs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.support.modules import kind as kind
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.tracing.readers import reader_of

WIDTH, HEADS, TOKENS, BATCH = 24, 3, 7, 2
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def hidden(batch: int = BATCH, tokens: int = TOKENS, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, tokens, width)


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    """(B, T, D) → (B, H, T, K)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """(B, H, T, K) → (B, T, D)."""
    return x.transpose(1, 2).flatten(2)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), dim=-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Self-attention that applies a function to q, k and v (B, H, T, K)."""

    def __init__(self, mix: Mix = plain) -> None:
        super().__init__()
        self.mix, self.qkv, self.out = mix, nn.Linear(WIDTH, 3 * WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(merged(self.mix(*map(heads_of, self.qkv(x).chunk(3, dim=-1)))))


class Block(nn.Module):
    """Pre-norm residual block around any module of (B, T, D)."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention, nn.Sequential(linear(), nn.GELU(), linear())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stack(nn.Module):
    """Blocks one after the other, then a norm."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([make() for _ in range(depth)]), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def attention_block() -> Block:
    return Block(Attention())


def stack_of(mix: Mix = plain, depth: int = 3) -> Stack:
    return Stack(lambda: Block(Attention(mix)), depth).eval()


def torch_encoder(
    depth: int = 2, width: int = WIDTH, heads: int = 4, nested: bool = False, **settings: Any
) -> nn.TransformerEncoder:
    """PyTorch's own encoder."""
    layer = nn.TransformerEncoderLayer(width, heads, 32, **{"batch_first": True} | settings)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=nested).eval()


# --- heads as modules of their own --------------------------------------------------------------------------


class Head(nn.Module):
    """One causal head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores(self.query(x), self.key(x)).masked_fill(hidden, float("-inf"))
        return F.softmax(weights, dim=-1) @ self.value(x)


class ManyHeads(nn.Module):
    """Heads in a list, concatenated, or summed if each is as wide as the model."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.wide = nn.ModuleList([Head(size) for _ in range(heads)]), size == WIDTH
        self.proj = linear()

    def forward(self, x: Tensor) -> Tensor:
        outs = [head(x) for head in self.heads]
        return self.proj(sum(outs) if self.wide else torch.cat(outs, dim=-1))


# --- other layouts of a model -------------------------------------------------------------------------------


class ResidualOutside(nn.Module):
    """Lists of sublayers that return their update; the model adds the residual."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        pairs = [[Attention(), nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU())] for _ in range(depth)]
        self.layers, self.norm = nn.ModuleList(map(nn.ModuleList, pairs)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for attention, feedforward in self.layers:
            x = attention(x) + x
            x = feedforward(x) + x
        return self.norm(x)


class TokensFirst(nn.Module):
    """A block on (T, B, D), with B·H folded for bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        T, B, D = x.shape
        q, k, v = (part.reshape(T, B * HEADS, -1).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D // HEADS), dim=-1)
        return x + self.out(torch.bmm(weights, v).transpose(0, 1).reshape(T, B, D))


class Unbatched(nn.Module):
    """A block on (T, D)."""

    def __init__(self, mix: Mix = plain) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.mix(q, k, v).transpose(0, 1).flatten(1)


class Stages(nn.Module):
    """Stages of blocks that keep the shape."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        stages = [nn.Sequential(*[attention_block() for _ in range(depth)]) for depth in depths]
        self.stages, self.norm = nn.ModuleList(stages), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.norm(x)


class Shared(nn.Module):
    """One block called again and again."""

    def __init__(self, times: int = 4) -> None:
        super().__init__()
        self.blocks, self.times = nn.ModuleList([attention_block()]), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.blocks[0](x)
        return x


class SublayerBlock(nn.Module):
    """Attention (once or twice) and a feed-forward part, each called by a sublayer of one list."""

    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({f"{at}": Attention() for at in range(attentions)})
        self.feedforward = linear()
        self.sublayer = nn.ModuleList([Sublayer() for _ in range(attentions + 1)])

    def forward(self, x: Tensor) -> Tensor:
        for sublayer, attention in zip(self.sublayer, self.attentions.values(), strict=False):
            x = sublayer(x, attention)
        return self.sublayer[-1](x, self.feedforward)


# The residual around the function that it is given, as in the annotated transformer.
Sublayer = kind(lambda self, x, call: x + call(self.norm(x)), norm=lambda: nn.LayerNorm(WIDTH))

# A block that changes its input in place.
InPlace = kind(lambda self, x: x.add_(self.attention(x)), attention=Attention)

# One encoder called on two inputs in one forward pass.
Twins = kind(lambda self, a, b: self.encoder(a).mean(1) * self.encoder(b).mean(1), encoder=stack_of)


class CrossAttention(nn.Module):
    """Queries from x, keys and values from a context."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = linear(), linear(), linear()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return merged(plain(*map(heads_of, (self.to_q(x), self.to_k(context), self.to_v(context)))))


class CrossBlock(nn.Module):
    """Self-attention, then attention to a context."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross = Attention(), CrossAttention()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.cross(x, context)


class CrossStack(Stack):
    """Two blocks with a context."""

    def __init__(self) -> None:
        super().__init__(CrossBlock, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, context)
        return self.norm(x)


# --- softmaxes that do not mix tokens -----------------------------------------------------------------------


class Router(nn.Module):
    """Experts weighed for each token, by a product with a softmax."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts), nn.ModuleList(linear() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (self.gate(x).softmax(-1).unsqueeze(-2) @ outs).squeeze(-2)


class SoftExperts(nn.Module):
    """Soft mixture of experts: tokens to slots and back."""

    def __init__(self, slots: int = 5) -> None:
        super().__init__()
        self.phi, self.expert = nn.Parameter(torch.randn(WIDTH, slots)), linear()

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("b n d, d s -> b n s", x, self.phi)
        slots = torch.einsum("b n s, b n d -> b s d", logits.softmax(1), x)
        return torch.einsum("b n s, b s d -> b n d", logits.softmax(-1), self.expert(slots))


# Tokens looked up softly in a table of five parameters.
CodeBook = kind(
    lambda self, x: torch.softmax(x @ self.codes.T, dim=-1) @ self.codes,
    codes=lambda: nn.Parameter(torch.randn(5, WIDTH)),
)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q) (softmax(K)ᵀ V)."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def channel_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cross-covariance: channels attend to channels."""
    q, k, v = (F.normalize(part.mT, dim=-1) for part in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).mT


# --- tracing ------------------------------------------------------------------------------------------------


def seen(model: nn.Module, *given: Any, capture: dict[str, Any] | None = None, **named: Any) -> rw.Trace:
    """Return the trace of a model with values, after a check that its (first) output is unchanged.

    `capture` holds arguments of `rw.capture`. Each run gets copies of the tensors given by position.
    """

    def run() -> Any:
        out = model(*(one.clone() if isinstance(one, Tensor) else one for one in given), **named)
        return out if out is None or isinstance(out, Tensor) else out[0]

    with torch.no_grad():
        alone = run()
        with rw.capture(model, values=True, **(capture or {})) as trace:
            captured = run()
    assert (alone is captured is None) or torch.equal(alone, captured)
    return trace


def seen_with_outputs(model: nn.Module, **named: Any) -> tuple[rw.Trace, dict[str, Any]]:
    """Return the trace that `seen` returns, and outputs of the modules with a reader, by name."""
    with rw.tracing.record_calls(model, lambda name, module: reader_of(module) is not None) as calls:
        trace = seen(model, **named)
    return trace, {call.name: call.output for call in calls}
