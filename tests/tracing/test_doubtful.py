"""Models where a careless look would drop tokens, refuse attention, or take one thing for another."""

from threading import Thread

import pytest
import torch
from capture_zoo import (
    TOKENS,
    WIDTH,
    Attention,
    Block,
    ManyHeads,
    Stack,
    heads_of,
    hidden,
    merged,
    scores,
    stack_of,
)
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import rankwise as rw
from rankwise.errors import CaptureError
from rankwise.tracing.score_masks import hidden_by


def seen(model, *given, **named):
    with torch.no_grad():
        alone = model(*given, **named)
        with rw.capture(model) as trace:
            watched = model(*given, **named)
    assert alone is None or torch.equal(alone, watched)
    return trace


def top_one(w):
    return torch.where(w >= w.amax(-1, keepdim=True), w, 0.0)


CHANGES = {
    "top": top_one,
    "gate": lambda w: w * torch.eye(TOKENS)[0],
    "renormalised": lambda w: top_one(w) / top_one(w).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("causal", [False, True])
def test_zeros_after_the_softmax_are_no_padding_and_no_mask(change, causal):
    keep = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if causal else torch.ones(TOKENS, TOKENS) > 0

    def mix(q, k, v):
        return CHANGES[change](scores(q, k).masked_fill(~keep, -torch.inf).softmax(-1)) @ v

    for site in seen(stack_of(mix, 2), hidden()).mixers:
        assert (site.operator.dense() == 0).all(-2).any()  # there is a column nobody looks at
        assert torch.equal(site.operator.support(), keep.expand(site.operator.shape))
        assert site.valid_tokens.all()
        assert site.valid_sources.all()


def test_a_block_may_change_its_states_in_place_and_return_nothing():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)

        def forward(self, x):
            x.add_(self.attention(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([InPlace() for _ in range(3)])

        def forward(self, x):
            x = x.clone()
            for block in self.blocks:
                block(x)
            self.kept = x

    model, x = Model().eval(), hidden()
    trace = seen(model, x)
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    assert torch.equal(trace.states[0].tokens, x)
    assert torch.equal(trace.states[3].tokens, model.kept)


def test_mixers_in_calls_that_raised_are_not_a_capture():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("here")

    model = Stack(
        lambda: nn.Sequential(Block(Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)), Raises())
    )
    nothing, own = "got mixers only in calls that raised", pytest.raises(ValueError, match="here")
    with pytest.raises(CaptureError, match=nothing), rw.capture(model), own:
        model(hidden())


def test_the_width_of_the_model_is_a_length_like_any_other():
    heads = Stack(lambda: Block(ManyHeads(4, WIDTH // 4)), 2).eval()
    assert len(seen(heads, hidden(tokens=WIDTH)).mixers) == 8
    odd = stack_of(lambda q, k, v: (scores(q, k).softmax(-1) @ v[..., :5]).repeat(1, 1, 1, 2)[..., :8], 2)
    for tokens in (WIDTH, WIDTH // 3, WIDTH + 1):
        assert [tuple(site.operator.shape[-2:]) for site in seen(odd, hidden(tokens=tokens)).mixers] == [
            (tokens, tokens)
        ] * 2


def test_a_stock_layer_that_is_the_model_is_seen():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).eval()
    trace = seen(layer, hidden())
    assert [site.name for site in trace.mixers] == [""]
    assert trace.uncaptured == []


def test_padding_of_a_memory_of_unknown_name_hides_no_queries():
    class Reads(nn.Module):
        def forward(self, x, y, keep):
            q, k = heads_of(x), heads_of(y)
            return x + merged(F.scaled_dot_product_attention(q, k, k, keep[:, None, None]))

    keep = torch.arange(TOKENS) < torch.tensor([[3], [TOKENS]])
    (site,) = seen(Reads(), hidden(), hidden(), keep).mixers
    assert site.valid_tokens.all()
    assert torch.equal(site.valid_sources, keep)


def window_mask(low):
    """Two regions that do not see each other."""
    region = torch.arange(TOKENS) < 3
    return torch.where(region[:, None] == region, 0.0, low)


def test_a_moderate_bias_that_parts_regions_is_a_mask_and_a_slope_is_none():
    mask, slope = window_mask(-100.0), -4.0 * (torch.arange(40)[:, None] - torch.arange(40)).abs()
    assert torch.equal(hidden_by(mask), mask < 0)
    assert torch.equal(hidden_by(mask + torch.rand(TOKENS, TOKENS)), mask < 0)
    assert slope.min() < -150
    assert not hidden_by(slope).any()
    assert not hidden_by(torch.tensor([0.0, -2000.0, 0.0])).any()  # nobody looks there, and it stays a token
    for site in seen(stack_of(lambda q, k, v: (scores(q, k) + mask).softmax(-1) @ v, 2), hidden()).mixers:
        assert torch.equal(site.operator.support(), (mask == 0).expand(site.operator.shape))


def test_large_scores_are_no_mask():
    for site in seen(stack_of(lambda q, k, v: (1e6 * scores(q, k)).softmax(-1) @ v, 2), hidden()).mixers:
        assert site.operator.support().all()


def test_tensors_without_storage_pass_through():
    class Graph(Stack):
        def forward(self, x, adjacency):
            return self.norm(super().forward(x) + adjacency.to_dense().sum())

    model = Graph(lambda: Block(Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)), 2).eval()

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, adjacency):
            return self.inner(x, adjacency)

    assert len(seen(Takes().eval(), hidden(tokens=7), torch.eye(7).to_sparse()).mixers) == 2


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


WAYS = {
    "softmax over the rows, transposed": lambda q, k, v: scores(k, q).softmax(-2).mT @ v,
    "softmax over the rows, values first": lambda q, k, v: (v.mT @ scores(k, q).softmax(-2)).mT,
    "exp of log_softmax": lambda q, k, v: scores(q, k).log_softmax(-1).exp() @ v,
    "added to in the product": lambda q, k, v: torch.baddbmm(
        v.flatten(0, 1), scores(q, k).softmax(-1).flatten(0, 1), v.flatten(0, 1)
    ).view_as(v),
}


@pytest.mark.parametrize("way", WAYS)
def test_rarer_ways_to_write_a_softmax(way):
    x = hidden()
    plain = stack_of(depth=1)
    model = stack_of(WAYS[way], 1)
    model.load_state_dict(plain.state_dict())
    (site,), (wanted,) = seen(model, x).mixers, seen(plain, x).mixers
    # Softmax weights below 1, of the same scores in another order of operations: a few roundings each.
    assert (site.operator.dense() - wanted.operator.dense()).abs().max() < 32 * torch.finfo(torch.float32).eps
    assert site.operator.support().all()


def test_softmax_over_the_rows_as_it_is_mixes_no_tokens():
    model = stack_of(lambda q, k, v: scores(q, k).softmax(-2) @ v, 1)
    with pytest.raises(CaptureError, match="no softmax attention was seen inside"):
        seen(model, hidden())


def test_vectors_of_one_token_mixed_among_themselves_are_no_mixer():
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


def test_scores_beside_a_learned_sink_compare_queries_with_more_keys_than_tokens():
    def mix(q, k, v):
        k, v = (torch.cat([t, t.unflatten(2, (-1, 2)).mean(3)], 2) for t in (k, v))
        sink = torch.zeros(*q.shape[:-1], 1)
        return torch.cat([scores(q, k), sink], -1).softmax(-1)[..., :-1] @ v

    (site,) = seen(stack_of(mix, 1), hidden(tokens=8)).mixers
    assert site.operator.shape[-2:] == (8, 12)
    assert (site.operator.dense().sum(-1) < 1).all()


def in_thread(call):
    thread = Thread(target=call)
    thread.start()
    thread.join()


def test_calls_in_other_threads_are_told_and_left_alone():
    model, x = stack_of(depth=2), hidden()
    with rw.capture(model) as trace:
        model(x)
        in_thread(lambda: model(x))
    assert len(trace.mixers) == 2
    assert [note for note in trace.notes if "another thread" in note]
    with pytest.raises(CaptureError, match="got calls in another thread only"), rw.capture(model):
        in_thread(lambda: model(x))


class Cached(nn.Module):
    def forward(self, x, keys, attention_mask=None, past_key_values=None):
        q, k = heads_of(x), heads_of(torch.cat([keys, x], 1))
        return x + merged(F.scaled_dot_product_attention(q, k, k))


def test_rows_beside_a_cache_are_the_last_of_the_mask():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    (site,) = seen(Cached(), hidden(tokens=2), hidden(tokens=4), mask, past_key_values=[1]).mixers
    assert torch.equal(site.valid_tokens, mask[:, -2:].bool())
    assert torch.equal(site.valid_sources, mask.bool())


class Passes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_tap_comes_back_to_its_place_among_other_modes():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).eval()
    with torch.no_grad(), Passes(), torch.device("cpu"), rw.capture(layer), Passes():
        before = _get_current_function_mode_stack()
        layer(hidden())
        after = _get_current_function_mode_stack()
    assert len(before) == 4
    assert [id(mode) for mode in before] == [id(mode) for mode in after]
