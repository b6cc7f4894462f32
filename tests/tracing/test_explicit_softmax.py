"""Attention written out in many ways and fused attention; softmaxes that are not attention."""

import math
from functools import partial

import pytest
import torch
from capture_zoo import (
    BATCH,
    CAUSAL,
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
    attention_block,
    channel_attention,
    fused,
    heads_of,
    hidden,
    kind,
    linear,
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
from rankwise.importance import ImportanceSettings
from rankwise.measures import effective_rank
from rankwise.operators import SoftmaxMixing
from rankwise.tracing import capture

EPS = torch.finfo(torch.float32).eps


def A(q, k):
    return scores(q, k).softmax(-1)


def folded(*parts):
    return (part.flatten(0, 1) for part in parts)


def product_error(site):
    """max |M V − Y|."""
    values = site.values.repeat_interleave(site.operator.shape[1] // site.values.shape[1], 1)
    return (site.operator.dense().to(values.dtype) @ values - site.output).abs().max()


WAYS = {
    "matmul": plain,
    "torch.softmax, torch.matmul": lambda q, k, v: torch.matmul(torch.softmax(scores(q, k), -1), v),
    "F.softmax with dtype": lambda q, k, v: F.softmax(scores(q, k), dim=-1, dtype=torch.double).float() @ v,
    "Tensor.softmax by position": lambda q, k, v: scores(q, k).softmax(3) @ v,
    "special.softmax": lambda q, k, v: torch.special.softmax(scores(q, k), -1).matmul(v),
    "nn.Softmax": lambda q, k, v: nn.Softmax(dim=-1)(scores(q, k)) @ v,
    "bmm of folded heads": lambda q, k, v: bmm_attention(*folded(q, k, v)).unflatten(0, (BATCH, HEADS)),
    "baddbmm": lambda q, k, v: baddbmm_attention(*folded(q, k, v)).view_as(v),
    "einsum": lambda q, k, v: torch.einsum(
        "b h i j, b h j d -> b h i d", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "einsum with an ellipsis": lambda q, k, v: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "einsum, operands in a list": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", [A(q, k), v]),
    "weights (B, T, H, S) moved": lambda q, k, v: (
        torch.einsum("bhid,bhjd->bihj", q, k).softmax(-1).transpose(1, 2) @ v
    ),
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
    "talking heads by linear": lambda q, k, v: talking(A(q, k)) @ v,
    "talking heads before and after the softmax": lambda q, k, v: (
        talking(talking(scores(q, k)).softmax(-1)) @ v
    ),
    "talking heads by conv, before and after": lambda q, k, v: (
        F.conv2d(F.conv2d(scores(q, k), MIX[:, :, None, None]).softmax(-1), MIX[:, :, None, None]) @ v
    ),
    "talking heads with a norm, before and after": lambda q, k, v: (
        talking(normed_heads(talking(scores(q, k))).softmax(-1)) @ v
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


def talking(matrices):
    return F.linear(matrices.permute(0, 2, 3, 1), MIX).permute(0, 3, 1, 2)


def normed_heads(matrices):
    return F.batch_norm(matrices, torch.zeros(HEADS), torch.ones(HEADS))


def bmm_attention(q, k, v):
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


def baddbmm_attention(q, k, v):
    return torch.bmm(torch.zeros(1).baddbmm(q, k.mT, beta=0).softmax(-1), v)


def zeroed(weights):
    weights[:, :, 0] = 0
    return weights


@pytest.mark.parametrize("way", WAYS)
def test_explicit_attention_is_captured_as_it_mixes(way):
    trace = seen(stack_of(WAYS[way], depth=2), hidden())
    each = HEADS if way == "one head after the other" else 1
    assert [site.layer for site in trace.mixers] == [0] * each + [1] * each
    for site in trace.mixers:
        assert site.operator.shape == (BATCH, HEADS // each, TOKENS, TOKENS)
        assert site.sequences == BATCH
        # A sum of TOKENS float32 products of size ≤ 10; half precision keeps 11 bits.
        assert product_error(site) < TOKENS * 10 * (2**-10 if "half" in way else EPS)
    assert [state.layer for state in trace.states] == [0, 1, 2]


MASKED = {
    **{way: WAYS[way] for way in ("masked", "masked by where", "scores changed in place")},
}


@pytest.mark.parametrize("way", MASKED)
def test_masks_of_explicit_attention_are_its_support(way):
    for site in seen(stack_of(MASKED[way]), hidden()).mixers:
        assert torch.equal(site.operator.support(), CAUSAL.expand(site.operator.shape))


def test_a_softmax_over_features_is_not_followed_into_the_queries():
    def forward(self, x):
        x = x * x.softmax(-1)
        return merged(plain(*(heads_of(part(x)) for part in (self.to_q, self.to_k, self.to_v))))

    gated = kind(forward, to_q=linear, to_k=linear, to_v=linear)
    trace = seen(Stack(lambda: Block(gated())).eval(), hidden(tokens=WIDTH // HEADS))  # as many as channels
    assert len(trace.mixers) == 3
    assert all((site.operator.dense().sum(-1) - 1).abs().max() < 1e-5 for site in trace.mixers)


def test_the_operator_is_the_softmax_before_dropout():
    model = stack_of(lambda q, k, v: F.dropout(A(q, k), 0.5, training=True) @ v)
    with capture(model) as trace:
        model(hidden())
    for site in trace.mixers:
        assert (site.operator.dense().sum(-1) - 1).abs().max() < 1e-5


def grouped(q, k, v):
    """Query heads in groups on a separate axis, (B, Hkv, G, T, K)."""
    q, k, v = q.unflatten(1, (1, HEADS)), k[:, :1].unsqueeze(2), v[:, :1].unsqueeze(2)
    return ((q @ k.mT).softmax(-1) @ v).flatten(1, 2)


def windowed(size, mix=plain):
    """Windows on a separate axis, (B, windows, H, w, K)."""

    def mix_windows(q, k, v):
        q, k, v = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in (q, k, v))
        return mix(q, k, v).transpose(1, 2).flatten(2, 3)

    return mix_windows


def test_grouped_heads_on_a_separate_axis_are_heads():
    for site in seen(stack_of(grouped), hidden()).mixers:
        assert site.operator.shape == (BATCH, HEADS, TOKENS, TOKENS)
        assert product_error(site) < 1e-5


@pytest.mark.parametrize(
    ("mix", "size", "tokens"),
    [(plain, 4, 12), (fused, 4, 12), (plain, WIDTH // HEADS, 16)],
    ids=["explicit", "fused", "size of the width of a head"],
)
def test_windows_on_a_separate_axis_are_sequences(mix, size, tokens):
    trace = seen(stack_of(windowed(size, mix)), hidden(tokens=tokens))
    for site in trace.mixers:
        assert site.operator.shape == (BATCH * tokens // size, HEADS, size, size)
        assert site.sequences == BATCH
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]


def in_a_loop(sizes, mix=plain):
    """Return attention that mixes windows of the given sizes one after the other, as in Qwen2-VL."""

    def mix_windows(q, k, v):
        windows = zip(*(part.split(sizes, 2) for part in (q, k, v)), strict=True)
        return torch.cat([mix(*window) for window in windows], 2)

    return mix_windows


@pytest.mark.parametrize("mix", [plain, fused], ids=["explicit", "fused"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 7, 3)], ids=["equal", "unequal"])
def test_windows_in_a_loop_are_sequences_of_the_same_heads(mix, sizes):
    model, tokens = stack_of(in_a_loop(sizes, mix)), hidden(tokens=12)
    sites = seen(model, tokens).mixers
    assert [site.operator.shape[-1] for site in sites[:3]] == [*sizes]
    assert len({site.address() for site in sites}) == len(sites) / 3
    audit = rw.audit(model, [tokens], importance=ImportanceSettings(exact=True, tolerance=None))
    assert {head.call for head in audit.heads} == {0}
    assert len(audit.heads) == HEADS * len(sites) / 3
    for head in audit.heads[:HEADS]:
        ranks = [effective_rank(site.operator)[:, head.head] for site in sites[:3]]
        assert head.effective_rank == pytest.approx(float(torch.cat(ranks).mean()), rel=1e-6)
    with torch.no_grad():
        whole = model(tokens)
    attention = model.get_submodule(sites[0].name)
    removed = [head.importance.exact for head in audit.heads[:HEADS]]
    assert removed == pytest.approx(costs_by_hand(model, attention, tokens, whole), rel=1e-4)


def costs_by_hand(model, attention, tokens, whole):
    """Return the relative squared change of the output if the channels of one head are zero."""
    costs, mix = [], attention.mix
    for head in range(HEADS):
        kept = (torch.arange(HEADS) != head)[:, None, None]
        attention.mix = lambda q, k, v, kept=kept: mix(q, k, v) * kept
        with torch.no_grad():
            change = (model(tokens) - whole).square().sum((1, 2)) / whole.square().sum((1, 2))
        costs.append(float(change.mean()))
    attention.mix = mix
    return costs


def test_slices_of_heads_and_sequences_are_not_captured():
    def mix(q, k, v):
        q, k, v = folded(q, k, v)
        parts = zip(*(part.split(1) for part in (q, k, v)), strict=True)
        return torch.cat([plain(*part) for part in parts]).unflatten(0, (BATCH, HEADS))

    model = stack_of(mix)
    for block in model.blocks:
        block.attention.num_heads = HEADS
    with pytest.raises(CaptureError, match="got a slice of 1"):
        seen(model, hidden())


# --- fused attention in other layouts -----------------------------------------------------------------------

SDPA = F.scaled_dot_product_attention
BIAS = torch.randn(BATCH, HEADS, TOKENS, TOKENS)
FUSED = {
    "plain": SDPA,
    "by name": lambda q, k, v: SDPA(query=q, key=k, value=v, is_causal=True),
    "scale": lambda q, k, v: SDPA(q, k, v, scale=0.3),
    "one key head": lambda q, k, v: SDPA(q, k[:, :1], v[:, :1], enable_gqa=True),
    "folded heads": lambda q, k, v: SDPA(*folded(q, k, v)).unflatten(0, (BATCH, HEADS)),
    "mask (T, S)": lambda q, k, v: SDPA(q, k, v, CAUSAL),
    "mask (1, T, S)": lambda q, k, v: SDPA(q, k, v, CAUSAL[None]),
    "mask (H, T, S)": lambda q, k, v: SDPA(q, k, v, BIAS[0]),
    "mask (1, H, T, S)": lambda q, k, v: SDPA(q, k, v, BIAS[:1]),
    "mask (B, 1, 1, S)": lambda q, k, v: SDPA(q, k, v, BIAS[:, :1, :1]),
    "folded heads, mask (B·H, T, S)": lambda q, k, v: SDPA(*folded(q, k, v, BIAS)).view_as(v),
}


@pytest.mark.parametrize("way", FUSED)
def test_fused_attention_is_captured_in_every_layout(way):
    for site in seen(stack_of(FUSED[way]), hidden()).mixers:
        assert isinstance(site.operator, SoftmaxMixing)
        assert site.operator.shape == (BATCH, HEADS, TOKENS, TOKENS)
        assert product_error(site) < 1e-5


def test_a_call_of_unknown_layout_does_not_stop_the_model():
    def forward(self, x):
        SDPA(torch.randn(3, 5, 4), *torch.randn(2, 2, 1, 5, 4))  # keys of one sequence for another batch
        return self.attention(x)

    assert len(seen(kind(forward, attention=Attention)().eval(), hidden()).mixers) >= 1


# --- softmaxes that do not mix tokens -----------------------------------------------------------------------


def memory(read):
    """Slots with as many keys and values as tokens."""
    slots = [lambda: nn.Parameter(torch.randn(TOKENS, WIDTH)) for _ in range(2)]
    look_up = lambda self, x: (x @ self.keys.mT).softmax(-1) @ read(self, self.slots)  # noqa: E731
    return kind(look_up, keys=slots[0], slots=slots[1], linear=linear)


def next_to_attention(part):
    return Stack(lambda: nn.Sequential(Residual(Attention()), Residual(part())), 2).eval()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Router, None),
        (SoftExperts, "5 items that are not tokens"),
        (CodeBook, "5 vectors that are weights of the model"),
        (memory(lambda self, values: values * 1.0), "7 vectors that are weights of the model or made"),
        (memory(lambda self, values: self.linear(values)), "7 vectors that are weights of the model"),
        (memory(lambda self, values: values.expand(BATCH, -1, -1)), "7 vectors that are weights"),
    ],
)
def test_routers_soft_experts_and_code_books_are_not_attention(part, reason):
    trace = seen(next_to_attention(part), hidden())
    assert [site.name for site in trace.mixers] == ["blocks.0.0.inner", "blocks.1.0.inner"]
    names = [] if reason is None else ["blocks.0.1.inner", "blocks.1.1.inner"]
    assert [module.name for module in trace.uncaptured] == names
    assert all(reason in module.reason for module in trace.uncaptured)


@pytest.mark.parametrize("experts", [1, 4, TOKENS, BATCH])
def test_a_router_is_not_attention_with_any_number_of_experts(experts):
    model = next_to_attention(partial(Router, experts))
    assert len(seen(model, hidden()).mixers) == 2
    assert len(seen(model, hidden(tokens=1)).mixers) == 2


def test_channel_attention_is_reported_and_not_captured():
    with pytest.raises(CaptureError, match="a softmax mixes 8 channels, not tokens"):
        seen(stack_of(channel_attention), hidden(tokens=TOKENS))


def one_head(mix):
    return kind(lambda self, x: mix(self.q(x), self.k(x), self.v(x)), q=linear, k=linear, v=linear)


AMBIGUOUS = {
    "heads": (partial(Attention, channel_attention), WIDTH // HEADS),
    "one head": (one_head(channel_attention), WIDTH),
    "fused": (partial(Attention, lambda q, k, v: fused(q.mT, k.mT, v.mT).mT), WIDTH // HEADS),
}


@pytest.mark.parametrize("way", AMBIGUOUS)
def test_a_note_says_that_as_many_channels_as_tokens_may_be_mixed(way):
    make, tokens = AMBIGUOUS[way]
    (note,) = seen(Stack(lambda: Block(make()), 2).eval(), hidden(tokens=tokens)).notes
    assert f"may mix {tokens} channels instead of {tokens} tokens" in note
    assert "a sequence of another length decides" in note


@pytest.mark.parametrize("way", ["matmul", "einsum", "head mask"])
@pytest.mark.parametrize("tokens", [WIDTH // HEADS, WIDTH])
def test_attention_to_as_many_tokens_as_channels_has_no_note(way, tokens):
    assert seen(stack_of(WAYS[way], depth=2), hidden(tokens=tokens)).notes == []


def test_values_of_a_second_product_are_its_right_factor():
    sites = seen(stack_of(lambda q, k, v: A(q, k) @ (A(k, q) @ v), 1), hidden()).mixers
    assert len(sites) == 2
    assert max(map(product_error, sites)) < 1e-5


def test_products_of_nested_tensors_do_not_stop_the_model():
    def forward(self, x):
        nested = torch.nested.nested_tensor(list(x))
        return self.attention(x) + (nested @ nested.transpose(1, 2)).to_padded_tensor(0.0)[..., :1]

    assert len(seen(kind(forward, attention=Attention)().eval(), hidden()).mixers) == 1


def test_the_name_attention_is_not_enough_for_a_mixer():
    with pytest.raises(CaptureError, match="at least one mixing operator"):
        seen(Stack(lambda: Block(linear())).eval(), hidden())


def test_attention_pooling_is_a_mixer_with_one_row_in_a_separate_stack():
    def forward(self, x):
        x = self.encoder(x)
        return self.score(x).transpose(1, 2).softmax(-1) @ x

    pooling = kind(forward, encoder=partial(stack_of, depth=2), score=lambda: nn.Linear(WIDTH, 1))
    *blocks, pool = seen(pooling().eval(), hidden()).mixers
    assert len(blocks) == 2
    assert pool.operator.shape == (BATCH, 1, 1, TOKENS)
    assert pool.cross
    assert pool.stack != blocks[0].stack


def test_there_may_be_as_many_tokens_as_channels():
    heads = Stack(lambda: Block(ManyHeads(4, WIDTH // 4)), 2).eval()
    assert len(seen(heads, hidden(tokens=WIDTH)).mixers) == 8
    odd = stack_of(lambda q, k, v: (A(q, k) @ v[..., :5]).repeat(1, 1, 1, 2)[..., :8], 2)
    for tokens in (WIDTH, WIDTH // 3, WIDTH + 1):
        trace = seen(odd, hidden(tokens=tokens))
        assert [site.operator.shape[-2:] for site in trace.mixers] == [(tokens, tokens)] * 2


@pytest.mark.parametrize("batch", [TOKENS, TOKENS + 1])
def test_a_table_with_as_many_rows_as_columns_is_a_batch(batch):
    table = kind(
        lambda self, x: self.inner(x[:, :, None] * self.weight),
        weight=lambda: nn.Parameter(torch.randn(TOKENS, WIDTH)),
        inner=partial(stack_of, depth=2),
    )
    trace = seen(table().eval(), torch.randn(batch, TOKENS))
    assert [site.sequences for site in trace.mixers] == [batch] * 2


def test_a_softmax_that_mixes_vectors_of_one_token_is_not_a_mixer():
    def mix_streams(self, streams):  # four vectors per token (B, T, 4, D)
        mixing = self.weights(streams.mean(2)).unflatten(-1, (4, 4)).softmax(-1)
        return mixing @ streams + self.inner(streams.mean(2))[:, :, None]

    def run(self, x):
        streams = x[:, :, None].expand(-1, -1, 4, -1)
        for block in self.blocks:
            streams = block(streams)
        return streams.sum(2)

    block = kind(mix_streams, inner=attention_block, weights=lambda: nn.Linear(WIDTH, 16))
    trace = seen(kind(run, blocks=lambda: nn.ModuleList([block(), block()]))().eval(), hidden())
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
