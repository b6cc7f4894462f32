"""Attention by several products: landmarks, agents and kernels; axes that are not tokens."""

import pytest
import torch
from capture_zoo import (
    BATCH,
    HEADS,
    WIDTH,
    Attention,
    Block,
    Stack,
    fused,
    heads_of,
    hidden,
    kind,
    linear,
    linear_attention,
    merged,
    plain,
    scores,
    seen,
    stack_of,
)
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.errors import CaptureError
from rankwise.tracing import Intervention

TOKENS, LANDMARKS = 12, 4
EPS = torch.finfo(torch.float32).eps


def A(q, k):
    return scores(q, k).softmax(-1)


def landmarks(x):
    return x.unflatten(2, (LANDMARKS, -1)).mean(3)


def pseudo_inverse(a, steps=6):
    """Iterations of Newton and Schulz with products of third order."""
    z, one = a.mT / (a.sum(-1).max() * a.sum(-2).max()), torch.eye(a.shape[-1])
    for _ in range(steps):
        az = a @ z
        z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
    return z


def nystrom(q, k, v):
    few_q, few_k = landmarks(q), landmarks(k)
    return (A(q, few_k) @ pseudo_inverse(A(few_q, few_k))) @ (A(few_q, k) @ v)


# Anything other than a softmax of scores times values is never captured as one matrix.
OTHERS = {
    "linear attention": linear_attention,
    "kernel": lambda q, k, v: phi(q) @ (phi(k).mT @ v) / (phi(q) @ phi(k).sum(-2)[..., None]),
    "sigmoid": lambda q, k, v: scores(q, k).sigmoid() @ v,
    "retention": lambda q, k, v: (q @ k.mT * DECAY) @ v,
    "softmax over the queries": lambda q, k, v: scores(q, k).softmax(-2) @ v,
}


def phi(x):
    return F.elu(x) + 1


DECAY = (0.9 ** (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()).tril()


@pytest.mark.parametrize("way", OTHERS)
@pytest.mark.parametrize("tokens", [WIDTH // HEADS, TOKENS, WIDTH])
def test_products_without_a_softmax_of_scores_are_not_captured(way, tokens):
    if way == "retention" and tokens != TOKENS:
        pytest.skip("its decay has a fixed number of tokens")
    with pytest.raises(CaptureError, match="expected at least one mixing operator, got none"):
        seen(stack_of(OTHERS[way], 1), hidden(tokens=tokens))


def test_two_products_with_landmarks_are_two_operators_and_notes_name_their_axes():
    trace = seen(stack_of(nystrom, 1), hidden(tokens=TOKENS))
    assert [tuple(site.operator.shape[-2:]) for site in trace.mixers] == [
        (LANDMARKS, TOKENS),
        (TOKENS, LANDMARKS),
    ]
    assert all(site.cross for site in trace.mixers)
    for site in trace.mixers:
        assert (
            site.operator @ site.values - site.output
        ).abs().max() < 64 * TOKENS * EPS * site.output.abs().max()
    assert sum("not the tokens of an input" in note for note in trace.notes) == 2


# --- axes that are not tokens -------------------------------------------------------------------------------


def linformer(self, x):
    q, k, v = (heads_of(part) for part in self.qkv(x).chunk(3, -1))
    k, v = (torch.einsum("bhnd,nk->bhkd", part, self.shorten) for part in (k, v))
    return merged(plain(q, k, v))


def pooled(self, x):
    q, k, v = (heads_of(part) for part in self.qkv(x).chunk(3, -1))
    return merged(fused(q, landmarks(k), landmarks(v)))


def induced(self, x):
    points = self.points.expand(x.shape[0], -1, -1)
    return self.spread(x, self.gather(points, x))


def with_learned_keys(self, x):
    q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
    more = self.more.expand(x.shape[0], -1, -1, -1)
    return merged(self.attend(q, torch.cat([more, k], 2), torch.cat([more, v], 2)))


def pooling(self, x):
    seeds = heads_of(self.seeds.expand(x.shape[0], -1, -1))
    return x + merged(plain(seeds, heads_of(x), heads_of(x))).mean(1, keepdim=True)


def learned(count):
    return lambda: nn.Parameter(torch.randn(count, WIDTH))


def qkv():
    return nn.Linear(WIDTH, 3 * WIDTH)


Cross = kind(
    lambda self, x, context: x + merged(plain(*map(heads_of, (self.q(x), self.k(context), context)))),
    q=linear,
    k=linear,
)
NAMED = {
    "Linformer": (
        kind(linformer, qkv=qkv, shorten=lambda: nn.Parameter(torch.randn(TOKENS, 5))),
        [(TOKENS, 5)],
        "the 5 columns of its matrices are vectors of the layer",
    ),
    "pooled keys": (
        kind(pooled, qkv=qkv), [(TOKENS, LANDMARKS)], "the 4 columns of its matrices are vectors of the layer"
    ),
    "induced points": (
        kind(induced, points=learned(5), gather=Cross, spread=Cross),
        [(5, TOKENS), (TOKENS, 5)],
        "gather: the 5 rows of its matrices are learned vectors",
    ),
    "seeds": (kind(pooling, seeds=learned(5)), [(5, TOKENS)], "the 5 rows of its matrices are vectors"),
    "learned keys next to tokens, in a module of queries, keys and values": (
        kind(
            with_learned_keys,
            qkv=qkv,
            more=lambda: nn.Parameter(torch.randn(HEADS, 2, WIDTH // HEADS)),
            attend=kind(lambda self, q, k, v: plain(q, k, v)),
        ),
        [(TOKENS, TOKENS + 2)],
        "attend: the 14 columns of its matrices are vectors of the layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", NAMED)
def test_axes_that_are_not_tokens_are_named(way):
    module, shapes, note = NAMED[way]
    trace = seen(Stack(lambda: Block(module()), 2).eval(), hidden(tokens=TOKENS))
    assert [tuple(site.operator.shape[-2:]) for site in trace.mixers] == shapes * 2
    assert all(site.cross for site in trace.mixers)
    assert any(note in text for text in trace.notes), trace.notes


def test_rows_of_windows_are_tokens():
    """Windows of 4 queries see 8 keys each: no row is a landmark, and heads can be replaced at once."""

    def mix(q, k, v):
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        k, v = (torch.cat([part.roll(1, 1), part], 3) for part in (k, v))
        return plain(q, k, v).transpose(1, 2).flatten(2, 3)

    class Seen(Intervention):
        def on_heads(self, heads):
            shapes.append(heads.values.shape[:3])

    shapes, model = [], stack_of(mix, 1)
    with torch.no_grad(), rw.capture(model, intervention=Seen()) as trace:
        model(hidden(tokens=TOKENS))
    (site,) = trace.mixers
    assert site.operator.shape == (BATCH * 3, HEADS, 4, 8)
    assert shapes == [(BATCH * 3, HEADS, 4)]
    assert trace.notes == []


def test_registers_are_named():
    def forward(self, x):
        return self.inner(torch.cat([self.registers.expand(x.shape[0], -1, -1), x], dim=1))

    model = kind(forward, registers=lambda: nn.Parameter(torch.randn(1, 3, WIDTH)), inner=stack_of)
    trace = seen(model().eval(), hidden(tokens=TOKENS))
    assert "3 of 15 tokens are learned vectors, such as class tokens or registers" in trace.notes


def test_tokens_that_a_layer_pads_are_named():
    def forward(self, x):
        q, k, v = (heads_of(F.pad(part, (0, 0, 0, 3))) for part in self.qkv(x).chunk(3, -1))
        return merged(plain(q, k, v))[:, : x.shape[1]]

    trace = seen(Stack(lambda: Block(kind(forward, qkv=qkv)())).eval(), hidden(tokens=TOKENS))
    assert "the 15 rows and columns of its matrices are vectors of the layer" in str(trace.notes)


@pytest.mark.parametrize("tokens", [4, 7])
def test_heads_times_tokens_are_not_places_of_a_map(tokens):
    """Products within chunks, of as many tokens as heads times tokens, are part of a matrix at most."""

    def in_chunks(self, q, k, v):
        q, k, v = (F.pad(part, (0, 0, 0, chunk - tokens)) for part in (q, k, v))
        return ((q @ k.mT).tril() @ v)[:, :, :tokens]

    def forward(self, x):
        return merged(self.attend(*map(heads_of, self.qkv(x).chunk(3, -1))))

    chunk = HEADS * tokens
    layer = kind(forward, "ChunkedAttention", qkv=qkv, attend=kind(in_chunks))
    with pytest.raises(CaptureError, match="expected at least one mixing operator, got none"):
        seen(Stack(lambda: Block(layer())).eval(), hidden(tokens=tokens))


def test_no_axis_of_plain_attention_is_named():
    assert seen(stack_of(), hidden()).notes == []
    assert seen(nn.Sequential(Attention(), Attention()).eval(), torch.randn(BATCH, 5, WIDTH)).notes == []
