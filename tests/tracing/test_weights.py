"""Attention written by hand, in all the ways people write it; and softmaxes that are no attention."""

import gc
import math
import weakref

import pytest
import torch
from capture_zoo import (
    BATCH,
    HEADS,
    TOKENS,
    WIDTH,
    Attention,
    Block,
    CodeBook,
    ManyHeads,
    Residual,
    Router,
    SoftExperts,
    Stack,
    channel_attention,
    heads_of,
    hidden,
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


def A(q, k):
    return scores(q, k).softmax(-1)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
WAYS = {
    "matmul": plain,
    "torch.softmax, torch.matmul": lambda q, k, v: torch.matmul(torch.softmax(scores(q, k), -1), v),
    "F.softmax with dtype": lambda q, k, v: F.softmax(scores(q, k), dim=-1, dtype=torch.double).float() @ v,
    "Tensor.softmax by position": lambda q, k, v: scores(q, k).softmax(3) @ v,
    "special.softmax": lambda q, k, v: torch.special.softmax(scores(q, k), -1).matmul(v),
    "nn.Softmax": lambda q, k, v: nn.Softmax(dim=-1)(scores(q, k)) @ v,
    "bmm of folded heads": lambda q, k, v: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ).unflatten(0, (BATCH, HEADS)),
    "baddbmm": lambda q, k, v: torch.bmm(
        torch.zeros(1).baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, beta=0).softmax(-1), v.flatten(0, 1)
    ).view_as(v),
    "einsum": lambda q, k, v: torch.einsum(
        "b h i j, b h j d -> b h i d", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "einsum with an ellipsis": lambda q, k, v: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "einsum, operands in a list": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", [A(q, k), v]),
    "einsum, values first, tokens before heads": lambda q, k, v: torch.einsum(
        "bjhd,bhij->bihd", v.transpose(1, 2), A(q, k)
    ).transpose(1, 2),
    "weights (B, T, H, S) moved": lambda q, k, v: (
        torch.einsum("bhid,bhjd->bihj", q, k).softmax(-1).transpose(1, 2) @ v
    ),
    "channels first": lambda q, k, v: (v.mT @ A(q, k).mT).mT,
    "channels first, permuted": lambda q, k, v: (
        v.transpose(-2, -1) @ A(q, k).permute(0, 1, 3, 2)
    ).permute(0, 1, 3, 2),
    "dropout in eval": lambda q, k, v: F.dropout(A(q, k), 0.5, training=False) @ v,
    "cast to half and back": lambda q, k, v: A(q, k).half().to(v.dtype) @ v,
    "masked": lambda q, k, v: scores(q, k).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v,
    "masked by where": lambda q, k, v: torch.where(CAUSAL, scores(q, k), -1e9).softmax(-1) @ v,
    "scores changed in place": lambda q, k, v: scores(q, k).masked_fill_(~CAUSAL, -1e4).softmax(-1) @ v,
    "soft cap": lambda q, k, v: (20 * torch.tanh(scores(q, k) / 20)).softmax(-1) @ v,
    "additive scores": lambda q, k, v: (q.sum(-1, keepdim=True) + k.sum(-1).unsqueeze(-2)).softmax(-1) @ v,
    "head mask": lambda q, k, v: (A(q, k) * torch.tensor([[[1.0]], [[0.0]], [[1.0]]])) @ v,
    "head mask in place": lambda q, k, v: A(q, k).mul_(0.5) @ v,
    "written into": lambda q, k, v: zeroed(A(q, k).to(torch.float64).to(v.dtype)) @ v,
    "cast, then a head mask": lambda q, k, v: (
        A(q, k).double().float() * torch.tensor([[[1.0]], [[0.0]], [[1.0]]]) @ v
    ),
    "renormalised": lambda q, k, v: F.normalize(A(q, k), p=2, dim=-1) @ v,
    "difference of two softmaxes": lambda q, k, v: (A(q, k) - 0.3 * A(k, q)) @ v,
    "talking heads": lambda q, k, v: torch.einsum("bhij,hg->bgij", A(q, k), MIX) @ v,
    "talking heads by conv": lambda q, k, v: F.conv2d(A(q, k), MIX[:, :, None, None]) @ v,
    "talking heads by linear": lambda q, k, v: (
        F.linear(A(q, k).permute(0, 2, 3, 1), MIX).permute(0, 3, 1, 2) @ v
    ),
    "a sink column cut off": lambda q, k, v: (
        torch.cat([scores(q, k), torch.zeros(*q.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v
    ),
    "less its maximum": lambda q, k, v: (scores(q, k) - scores(q, k).amax(-1, keepdim=True)).softmax(-1) @ v,
    "one head after the other": lambda q, k, v: torch.stack(
        [scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(HEADS)], 1
    ),
    "dense synthesizer": lambda q, k, v: F.linear(q, torch.ones(TOKENS, q.shape[-1])).softmax(-1) @ v,
}  # fmt: skip
MIX = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2]])


def zeroed(weights):
    weights[:, :, 0] = 0
    return weights


@pytest.mark.parametrize("way", WAYS)
def test_attention_written_by_hand_is_seen_as_it_mixes(way):
    trace = seen(stack_of(WAYS[way], depth=2), hidden())
    each = HEADS if way == "one head after the other" else 1
    assert len(trace.mixers) == 2 * each
    assert [site.layer for site in trace.mixers] == [0] * each + [1] * each
    for site in trace.mixers:
        assert site.operator.shape == (BATCH, HEADS // each, TOKENS, TOKENS)
        assert site.sequences == BATCH
        # A sum of TOKENS float32 products of size ≤ 10; half precision keeps 11 bits.
        eps = 2**-10 if "half" in way else torch.finfo(torch.float32).eps
        assert (site.operator @ site.values - site.output).abs().max() < TOKENS * 10 * eps
    assert [state.layer for state in trace.states] == [0, 1, 2]


@pytest.mark.parametrize("way", ["masked", "masked by where", "scores changed in place"])
def test_masks_of_written_attention_are_its_support(way):
    for site in seen(stack_of(WAYS[way]), hidden()).mixers:
        assert torch.equal(site.operator.support(), CAUSAL.expand(site.operator.shape))


def test_entries_zeroed_after_the_softmax_are_outside_the_support():
    for mix in (
        lambda q, k, v: A(q, k).masked_fill(~CAUSAL, 0.0) @ v,
        lambda q, k, v: A(q, k).double().masked_fill(~CAUSAL, 0.0).float() @ v,
        lambda q, k, v: (A(q, k) * CAUSAL) @ v,
    ):
        for site in seen(stack_of(mix), hidden()).mixers:
            assert torch.equal(site.operator.support(), CAUSAL.expand(site.operator.shape))


class Gated(nn.Module):
    """A softmax over features, then attention of what it gates, its projections kept apart."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = x * x.softmax(-1)
        q, k, v = (heads_of(part(x)) for part in (self.to_q, self.to_k, self.to_v))
        return merged(plain(q, k, v))


def test_a_softmax_over_features_is_not_followed_into_the_queries():
    tokens = WIDTH // HEADS  # as many as each head has channels
    trace = seen(Stack(lambda: Block(Gated())).eval(), hidden(tokens=tokens))
    assert len(trace.mixers) == 3
    assert all((site.operator.dense().sum(-1) - 1).abs().max() < 1e-5 for site in trace.mixers)


def test_the_operator_is_the_softmax_before_dropout():
    model = stack_of(lambda q, k, v: F.dropout(A(q, k), 0.5, training=True) @ v)
    with rw.capture(model) as trace:
        model(hidden())
    for site in trace.mixers:
        assert (site.operator.dense().sum(-1) - 1).abs().max() < 1e-5


def grouped(q, k, v):
    """Query heads in groups on an axis of their own, (B, Hkv, G, T, K)."""
    q, k, v = q.unflatten(1, (1, HEADS)), k[:, :1].unsqueeze(2), v[:, :1].unsqueeze(2)
    return ((q @ k.mT).softmax(-1) @ v).flatten(1, 2)


def windowed(size):
    """Windows on an axis of their own, (B, windows, H, w, K)."""

    def mix(q, k, v):
        q, k, v = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2, 3)

    return mix


def fused_windowed(size):
    def mix(q, k, v):
        q, k, v = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2, 3)

    return mix


def test_grouped_heads_on_an_axis_of_their_own_are_heads():
    for site in seen(stack_of(grouped), hidden()).mixers:
        assert site.operator.shape == (BATCH, HEADS, TOKENS, TOKENS)
        assert (site.operator @ site.values - site.output).abs().max() < 1e-5


@pytest.mark.parametrize("mix", [windowed(4), fused_windowed(4)], ids=["written", "fused"])
def test_windows_on_an_axis_of_their_own_are_sequences(mix):
    trace = seen(stack_of(mix), hidden(tokens=12))
    for site in trace.mixers:
        assert site.operator.shape == (BATCH * 3, HEADS, 4, 4)
        assert site.sequences == BATCH
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]


def test_windows_as_many_as_heads_times_width_are_not_channels():
    trace = seen(stack_of(windowed(8)), hidden(tokens=16))  # 8 × 3 heads = the width
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(4, HEADS, 8, 8)}


# --- fused attention in other layouts -----------------------------------------------------------------------

FUSED = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "by name": lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "one key head": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "folded heads": lambda q, k, v: F.scaled_dot_product_attention(
        *(part.flatten(0, 1) for part in (q, k, v))
    ).unflatten(0, (BATCH, HEADS)),
    "mask (T, S)": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, CAUSAL),
    "mask (1, T, S)": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, CAUSAL[None]),
    "mask (H, T, S)": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS[0]),
    "mask (1, H, T, S)": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS[:1]),
    "mask (B, 1, 1, S)": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS[:, :1, :1]),
    "folded heads, mask (B·H, T, S)": lambda q, k, v: F.scaled_dot_product_attention(
        *(part.flatten(0, 1) for part in (q, k, v)), BIAS.flatten(0, 1)
    ).unflatten(0, (BATCH, HEADS)),
    "five axes": lambda q, k, v: F.scaled_dot_product_attention(
        *(part.unsqueeze(1) for part in (q, k, v)), BIAS[:, None]
    ).squeeze(1),
    "queries shared by the batch": lambda q, k, v: F.scaled_dot_product_attention(q[:1], k, v),
    "keys shared by the batch": lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]),
}
BIAS = torch.randn(BATCH, HEADS, TOKENS, TOKENS)


@pytest.mark.parametrize("way", FUSED)
def test_fused_attention_is_seen_in_every_layout(way):
    for site in seen(stack_of(FUSED[way]), hidden()).mixers:
        assert isinstance(site.operator, rw.operators.SoftmaxMixing)
        assert site.operator.shape == (BATCH, HEADS, TOKENS, TOKENS)
        values = site.values.repeat_interleave(HEADS // site.values.shape[1], 1)
        assert (site.operator.dense() @ values - site.output).abs().max() < 1e-5


def test_a_call_of_unknown_layout_does_not_stop_the_model():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.odd = Attention(plain), nn.Identity()

        def forward(self, x):
            q = torch.randn(3, 5, 4)  # one sequence's keys for all of another batch
            F.scaled_dot_product_attention(q, torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4))
            return self.attention(x)

    trace = seen(Odd().eval(), hidden())
    assert len(trace.mixers) >= 1


# --- softmaxes that mix no tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Router, None),
        (SoftExperts, "5 things that are no tokens"),
        (CodeBook, "5 vectors that are weights of the model"),
    ],
)
def test_routers_soft_experts_and_code_books_are_not_attention(part, reason):
    model = Stack(lambda: nn.Sequential(Residual(Attention(plain)), Residual(part())), 2).eval()
    trace = seen(model, hidden())
    assert [site.name for site in trace.mixers] == ["blocks.0.0.inner", "blocks.1.0.inner"]
    if reason is None:
        assert trace.uncaptured == []
    else:
        assert [module.name for module in trace.uncaptured] == ["blocks.0.1.inner", "blocks.1.1.inner"]
        assert all(reason in module.reason for module in trace.uncaptured)


@pytest.mark.parametrize("experts", [1, 4, TOKENS, BATCH])
def test_a_router_is_not_attention_with_any_number_of_experts(experts):
    model = Stack(lambda: nn.Sequential(Residual(Attention(plain)), Residual(Router(experts))), 2).eval()
    assert len(seen(model, hidden()).mixers) == 2
    assert len(seen(model, hidden(tokens=1)).mixers) == 2


@pytest.mark.parametrize("tokens", [TOKENS, WIDTH // HEADS])  # also as many tokens as channels
def test_linear_attention_is_reported_not_captured(tokens):
    with pytest.raises(CaptureError, match=r"blocks\.0\.attention .*: a softmax of queries alone"):
        seen(stack_of(linear_attention), hidden(tokens=tokens))


def test_channel_attention_is_reported_not_captured():
    with pytest.raises(CaptureError, match="a softmax mixes 8 channels, not tokens"):
        seen(stack_of(channel_attention), hidden())


class Pooling(nn.Module):
    """One weighted mean of all tokens."""

    def __init__(self):
        super().__init__()
        self.encoder, self.score = stack_of(depth=2), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.encoder(x)
        return self.score(x).transpose(1, 2).softmax(-1) @ x


def test_attention_pooling_is_a_mixer_with_one_row_in_a_stack_of_its_own():
    *blocks, pool = seen(Pooling().eval(), hidden()).mixers
    assert len(blocks) == 2
    assert pool.operator.shape == (BATCH, 1, 1, TOKENS)
    assert pool.cross
    assert pool.stack != blocks[0].stack


def test_weights_are_let_go_once_they_have_mixed():
    """The tap must not keep matrices alive: only the trace does."""
    refs = []
    model = stack_of()

    def remember(site):
        refs.append(weakref.ref(site.operator.matrix))
        del site
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))

    alive: list[int] = []
    with torch.no_grad(), rw.capture(model, on_mixer=remember):
        model(hidden())
        gc.collect()
        assert not any(ref() is not None for ref in refs)
    assert max(alive) == 1


def test_the_name_of_a_block_does_not_make_it_attention():
    with pytest.raises(CaptureError, match="at least one mixing operator"):
        seen(Stack(lambda: Block(nn.Linear(WIDTH, WIDTH))).eval(), hidden())


def test_the_width_of_the_model_is_a_length_like_any_other():
    heads = Stack(lambda: Block(ManyHeads(4, WIDTH // 4)), 2).eval()
    assert len(seen(heads, hidden(tokens=WIDTH)).mixers) == 8
    odd = stack_of(lambda q, k, v: (scores(q, k).softmax(-1) @ v[..., :5]).repeat(1, 1, 1, 2)[..., :8], 2)
    for tokens in (WIDTH, WIDTH // 3, WIDTH + 1):
        assert [tuple(site.operator.shape[-2:]) for site in seen(odd, hidden(tokens=tokens)).mixers] == [
            (tokens, tokens)
        ] * 2


def test_a_table_with_as_many_rows_as_columns_is_a_batch():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(TOKENS, WIDTH))
            self.inner = stack_of(depth=2)

        def forward(self, x):
            return self.inner(x[:, :, None] * self.weight)

    for batch in (TOKENS, TOKENS + 1):
        trace = seen(Table().eval(), torch.randn(batch, TOKENS))
        assert [site.sequences for site in trace.mixers] == [batch] * 2


RARE_WAYS = {
    "softmax over the rows, transposed": lambda q, k, v: scores(k, q).softmax(-2).mT @ v,
    "softmax over the rows, values first": lambda q, k, v: (v.mT @ scores(k, q).softmax(-2)).mT,
    "exp of log_softmax": lambda q, k, v: scores(q, k).log_softmax(-1).exp() @ v,
    "added to in the product": lambda q, k, v: torch.baddbmm(
        v.flatten(0, 1), scores(q, k).softmax(-1).flatten(0, 1), v.flatten(0, 1)
    ).view_as(v),
}


@pytest.mark.parametrize("way", RARE_WAYS)
def test_rarer_ways_to_write_a_softmax(way):
    x = hidden()
    plain = stack_of(depth=1)
    model = stack_of(RARE_WAYS[way], 1)
    model.load_state_dict(plain.state_dict())
    (site,), (wanted,) = seen(model, x).mixers, seen(plain, x).mixers
    # Softmax weights below 1, of the same scores in another order of operations: a few roundings each.
    assert (site.operator.dense() - wanted.operator.dense()).abs().max() < 32 * torch.finfo(torch.float32).eps
    assert site.operator.support().all()


def test_softmax_over_the_rows_as_it_is_mixes_no_tokens():
    model = stack_of(lambda q, k, v: scores(q, k).softmax(-2) @ v, 1)
    with pytest.raises(CaptureError, match="no softmax attention was seen inside"):
        seen(model, hidden())


def test_mixing_vectors_of_a_token_is_not_a_mixer():
    class Streams(nn.Module):
        """Four vectors for each token, mixed by a softmax of the token's own, around an attention."""

        def __init__(self):
            super().__init__()
            self.inner, self.weights = (
                Block(Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)),
                nn.Linear(WIDTH, 16),
            )

        def forward(self, streams):
            mixing = self.weights(streams.mean(2)).unflatten(-1, (4, 4)).softmax(-1)
            return mixing @ streams + self.inner(streams.mean(2))[:, :, None]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Streams(), Streams()])

        def forward(self, x):
            streams = x[:, :, None].expand(-1, -1, 4, -1)
            for block in self.blocks:
                streams = block(streams)
            return streams.sum(2)

    trace = seen(Model().eval(), hidden())
    assert [site.operator.shape[-2:] for site in trace.mixers] == [(TOKENS, TOKENS)] * 2
    assert not trace.uncaptured


def test_scores_with_a_learned_sink_compare_queries_with_more_keys_than_tokens():
    def mix(q, k, v):
        k, v = (torch.cat([t, t.unflatten(2, (-1, 2)).mean(3)], 2) for t in (k, v))
        sink = torch.zeros(*q.shape[:-1], 1)
        return torch.cat([scores(q, k), sink], -1).softmax(-1)[..., :-1] @ v

    (site,) = seen(stack_of(mix, 1), hidden(tokens=8)).mixers
    assert site.operator.shape[-2:] == (8, 12)
    assert (site.operator.dense().sum(-1) < 1).all()
