"""Attention by several products: landmarks, agents and kernels; axes that are not tokens."""

import re

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


def nystrom_matrix(q, k):
    few_q, few_k = landmarks(q), landmarks(k)
    return A(q, few_k) @ pseudo_inverse(A(few_q, few_k)) @ A(few_q, k)


def agents(mix):
    return lambda q, k, v: mix(q, landmarks(q), mix(landmarks(q), k, v))


def agent_matrix(q, k):
    return A(q, landmarks(q)) @ A(landmarks(q), k)


def phi(x):
    return F.elu(x) + 1


def kernel_matrix(q, k):
    products = phi(q) @ phi(k).mT
    return products / products.sum(-1, keepdim=True)


def inverse_sums(q, k):
    return 1 / torch.einsum("...nd,...d->...n", phi(q), phi(k).sum(-2))


def kernel_heads_third(q, k, v):
    q, k, v = (part.transpose(1, 2) for part in (phi(q), phi(k), v))
    context = torch.einsum("nshd,nshm->nhmd", k, v)
    z = 1 / torch.einsum("nlhd,nhd->nlh", q, k.sum(1))
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, context, z).transpose(1, 2)


def kernel_scaled(q, k, v):
    context = torch.einsum("...nd,...ne->...de", phi(k), v)
    return torch.einsum("...de,...nd,...n->...ne", context, phi(q), inverse_sums(q, k))


def kernel_divided(q, k, v):
    return phi(q) @ (phi(k).mT @ v) / (phi(q) @ phi(k).sum(-2)[..., None])


def cosine(q, k):
    return F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)


def nearness(q, k):
    return torch.cdist(q, k).neg().exp()


DECAY = (0.9 ** (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()).tril()
WAYS = {
    "Nyström": (nystrom, nystrom_matrix, "product"),
    "agents": (agents(plain), agent_matrix, "product"),
    "agents, fused": (agents(fused), agent_matrix, "product"),
    "agents, einsum": (
        agents(lambda q, k, v: torch.einsum("bhij,bhjd->bhid", A(q, k), v)), agent_matrix, "product"
    ),
    "two matrices": (lambda q, k, v: (A(q, k) @ A(k, q)) @ v, lambda q, k: A(q, k) @ A(k, q), "softmax"),
    "softmax of queries and of keys": (
        linear_attention, lambda q, k: q.softmax(-1) @ k.softmax(-2).mT, "linear"
    ),
    "kernel, scaled in an einsum": (kernel_scaled, kernel_matrix, "linear"),
    "kernel, heads on the third axis": (kernel_heads_third, kernel_matrix, "linear"),
    "kernel, divided": (kernel_divided, kernel_matrix, "linear"),
    "kernel, times the inverse": (
        lambda q, k, v: inverse_sums(q, k)[..., None] * (phi(q) @ (phi(k).mT @ v)), kernel_matrix, "linear"
    ),
    "kernel, channels before tokens": (
        lambda q, k, v: ((v.mT @ phi(k)) @ phi(q).mT * inverse_sums(q, k)[..., None, :]).mT,
        kernel_matrix,
        "linear",
    ),
    "sigmoid": (lambda q, k, v: scores(q, k).sigmoid() @ v, lambda q, k: scores(q, k).sigmoid(), "dense"),
    "cosine similarity": (lambda q, k, v: cosine(q, k) @ v, lambda q, k: cosine(q, k), "dense"),
    "distances": (lambda q, k, v: nearness(q, k) @ v, lambda q, k: nearness(q, k), "dense"),
    "retention": (lambda q, k, v: (q @ k.mT * DECAY) @ v, lambda q, k: q @ k.mT * DECAY, "dense"),
    "retention, einsum": (
        lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k) * DECAY, v),
        lambda q, k: q @ k.mT * DECAY,
        "dense",
    ),
    "softmax over the queries": (
        lambda q, k, v: scores(q, k).softmax(-2) @ v, lambda q, k: scores(q, k).softmax(-2), "dense"
    ),
    "keys first": (
        lambda q, k, v: torch.einsum("bhji,bhjd->bhid", torch.einsum("bhjd,bhid->bhji", k, q).softmax(2), v),
        lambda q, k: (q @ k.mT).softmax(-1),
        "softmax",
    ),
    "keys first, heads last": (
        lambda q, k, v: torch.einsum("bjih,bhjd->bhid", torch.einsum("bhjd,bhid->bjih", k, q).softmax(1), v),
        lambda q, k: (q @ k.mT).softmax(-1),
        "softmax",
    ),
    "keys first, moved": (
        lambda q, k, v: torch.einsum("bhjd,bhid->bjhi", k, q).softmax(1).permute(0, 2, 3, 1) @ v,
        lambda q, k: (q @ k.mT).softmax(-1),
        "softmax",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_of_products_is_one_operator(way):
    mix, matrix, expected_kind = WAYS[way]
    given = []

    def noted(q, k, v):
        given.append((q, k))
        return mix(q, k, v)

    (site,) = seen(stack_of(noted, 1), hidden(tokens=TOKENS)).mixers
    assert (site.kind, site.cross) == (expected_kind, False)
    expected = matrix(*given[-1])
    # Sums of at most T terms, in another order, in each of the products.
    bound = 64 * TOKENS * EPS * expected.abs().max()
    assert (site.operator.dense() - expected).abs().max() < bound
    assert (site.operator @ site.values - site.output).abs().max() < bound * site.values.abs().max() * TOKENS


@pytest.mark.parametrize("tokens", [WIDTH // HEADS, TOKENS, WIDTH])
def test_counts_of_tokens_may_equal_counts_of_channels(tokens):
    for mix in (linear_attention, kernel_divided, WAYS["sigmoid"][0]):
        (site,) = seen(stack_of(mix, 1), hidden(tokens=tokens)).mixers
        assert site.operator.shape[-2:] == (tokens, tokens)
        error = (site.operator @ site.values - site.output).abs().max()
        assert error < 64 * tokens * EPS * site.output.abs().max().clamp(min=1)


def test_a_chain_may_run_over_several_modules():
    attend = kind(lambda self, q, k, v: plain(q, k, v))

    def forward(self, x):
        q, k, v = map(heads_of, (self.q(x), self.k(x), x))
        return merged(self.attend(q, landmarks(q), self.attend(landmarks(q), k, v)))

    attention = kind(forward, q=linear, k=linear, attend=attend)
    sites = seen(Stack(lambda: Block(attention()), 2).eval(), hidden(tokens=TOKENS)).mixers
    assert [(site.name, site.layer, site.kind) for site in sites] == [
        ("blocks.0.attention.attend", 0, "product"),
        ("blocks.1.attention.attend", 1, "product"),
    ]


@pytest.mark.parametrize("mix", [nystrom, linear_attention, kernel_divided, WAYS["sigmoid"][0]])
def test_heads_of_such_attention_can_be_replaced(mix):
    class Removal(Intervention):
        def on_heads(self, heads):
            calls.append(heads.call_id)
            return heads.values * 0

    calls, model, x = [], stack_of(mix, 1), hidden(tokens=TOKENS)
    with torch.no_grad(), rw.capture(model, intervention=Removal()) as trace:
        removed = model(x)
    (site,) = trace.mixers
    assert calls == [site.call_id]
    block = model.blocks[0]
    expected = x + block.attention.out(torch.zeros_like(x))
    assert torch.equal(removed, model.norm(expected + block.mlp(block.norm2(expected))))


def causal_kernel(self, x):
    q, k, v = (heads_of(part) for part in self.qkv(x).chunk(3, -1))
    states = torch.einsum("bhtf,bhtd->bhtfd", phi(k), v).cumsum(2)
    return merged(torch.einsum("bhtf,bhtfd->bhtd", phi(q), states))


def test_causal_linear_attention_by_states_is_named_as_what_it_is():
    block = kind(causal_kernel, "CausalAttention", qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
    with pytest.raises(CaptureError, match="a state sums up as in causal linear attention"):
        seen(Stack(lambda: Block(block())).eval(), hidden(tokens=TOKENS))


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


def normed_points(self, x):
    return self.gather(F.layer_norm(self.points, [WIDTH])[None].expand(x.shape[0], -1, -1), x)[:, :1] + x


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
        "the 5 columns of its matrices are vectors that the layer makes of tokens",
    ),
    "pooled keys": (
        kind(pooled, qkv=qkv), [(TOKENS, LANDMARKS)], "the 4 columns .* makes of tokens"
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
        "attend: the 14 columns of its matrices hold vectors of the layer next to tokens",
    ),
    "latents after a norm": (
        kind(normed_points, points=learned(5), gather=Cross), [(5, TOKENS)], "the 5 rows .* same for every"
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", NAMED)
def test_axes_that_are_not_tokens_are_named(way):
    module, shapes, note = NAMED[way]
    trace = seen(Stack(lambda: Block(module()), 2).eval(), hidden(tokens=TOKENS))
    assert [tuple(site.operator.shape[-2:]) for site in trace.mixers] == shapes * 2
    assert all(site.cross for site in trace.mixers)
    (found,) = [text for text in trace.notes if "blocks.*" in text and "its matrices" in text][:1]
    assert re.search(note, found), found


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
    assert "the 15 rows and columns of its matrices hold vectors of the layer next to tokens" in str(
        trace.notes
    )


@pytest.mark.parametrize("tokens", [4, 7])
def test_heads_times_tokens_are_no_places_of_a_map(tokens):
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
