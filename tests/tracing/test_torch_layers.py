"""PyTorch's own attention layers: seen exactly, and their inference fast path still taken."""

import itertools
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from capture_zoo import WIDTH, Stack, hidden
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rankwise as rw
from rankwise.errors import CaptureError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

WATCHED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
TOLERANCE = 1e-5  # sums of at most 64 float32 products of size ≤ 2


class Spy(TorchDispatchMode):
    """Counts the operations of the fast path."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WATCHED:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def compared(model, *args, **kwargs):
    """Run alone and captured; the trace, if outputs and fast-path operations are the same."""
    with torch.no_grad(), Spy() as alone:
        first = model(*args, **kwargs)
    with torch.no_grad(), Spy() as watched, rw.capture(model, values=True) as trace:
        second = model(*args, **kwargs)
    assert alone.calls == watched.calls
    firsts, seconds = (out if isinstance(out, tuple) else (out,) for out in (first, second))
    for one, other in zip(firsts, seconds, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    return trace, alone.calls, first


# --- nn.MultiheadAttention ----------------------------------------------------------------------------------

B, T, S, H = 2, 6, 9, 4
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
SELF_MASKS = {
    "none": {},
    "bool (T, S)": {"attn_mask": CAUSAL},
    "float (T, S)": {"attn_mask": torch.randn(T, T)},
    "bool (B·H, T, S)": {"attn_mask": torch.rand(B * H, T, T) < 0.3},
    "float (B·H, T, S)": {"attn_mask": torch.randn(B * H, T, T)},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(B, T).masked_fill(PADDING, -torch.inf)},
    "padding and bool": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
    "padding and float": {"key_padding_mask": PADDING, "attn_mask": torch.randn(T, T)},
    "causal, hinted": {"attn_mask": CAUSAL, "is_causal": True},
}
SETTINGS = {
    "plain": {},
    "three heads": {"num_heads": 3},
    "tokens first": {"batch_first": False},
    "no bias": {"bias": False},
    "bias_k": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim, vdim": {"kdim": 12, "vdim": 10},
}


def attention_of(**settings):
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, **{"num_heads": H, "batch_first": True} | settings).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    return made


def heads_fit(settings, mask):
    return not (settings.get("num_heads", H) != H and "attn_mask" in mask and mask["attn_mask"].dim() == 3)


MHA = [
    (setting, mask)
    for setting, mask in itertools.product(SETTINGS, SELF_MASKS)
    if heads_fit(SETTINGS[setting], SELF_MASKS[mask]) and not (setting == "kdim, vdim" and mask != "none")
]


@pytest.mark.parametrize(("setting", "mask"), MHA)
def test_the_operator_is_the_weights_that_the_layer_reports(setting, mask):
    settings, masks = SETTINGS[setting], SELF_MASKS[mask]
    attention = attention_of(**settings)
    x = torch.randn(B, T, WIDTH)
    if settings.get("batch_first") is False:
        x = x.transpose(0, 1)
    key = value = x
    if "kdim" in settings:
        key, value = (torch.randn(B, T, settings[name]) for name in ("kdim", "vdim"))
    trace, _, (_, weights) = compared(
        attention, x, key, value, need_weights=True, average_attn_weights=False, **masks
    )
    (site,) = trace.mixers
    assert site.operator.shape == weights.shape
    assert (site.operator.dense() - weights).abs().max() < TOLERANCE
    assert site.sequences == B
    real = ~PADDING if "padding" in mask else torch.ones(B, T, dtype=torch.bool)
    added = site.operator.shape[-1] - T
    assert torch.equal(site.valid_tokens, real)
    assert torch.equal(site.valid_sources, F.pad(real, (0, added), value=True))
    for needed in ({"need_weights": False}, {"need_weights": True}):
        trace, _, (output, averaged) = compared(attention, x, key, value, **needed, **masks)
        again = trace.mixers[0]
        if "hinted" not in mask:  # there PyTorch takes the hint for the mask, unless it reports weights
            assert torch.equal(again.operator.dense(), site.operator.dense())
        mixed = attention.out_proj((again.operator.dense() @ again.values).transpose(1, 2).flatten(2))
        output = output if settings.get("batch_first", True) else output.transpose(0, 1)
        assert (mixed - output).abs().max() < 10 * TOLERANCE
        if averaged is not None:
            assert (again.operator.dense().mean(1) - averaged).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("setting", "mask"), [("plain", "none"), ("plain", "padding"), ("plain", "bool (B·H, T, S)")]
)
def test_the_attention_fast_path_is_still_taken(setting, mask):
    x = torch.randn(B, T, WIDTH)
    _, calls, _ = compared(attention_of(**SETTINGS[setting]), x, x, x, need_weights=False, **SELF_MASKS[mask])
    assert calls == {"_native_multi_head_attention": 1}


def test_cross_attention_of_the_layer():
    attention = attention_of()
    x, memory = torch.randn(B, T, WIDTH), torch.randn(B, S, WIDTH)
    trace, _, (_, weights) = compared(attention, x, memory, memory, average_attn_weights=False)
    (site,) = trace.mixers
    assert site.cross
    assert site.operator.shape == (B, H, T, S)
    assert (site.operator.dense() - weights).abs().max() < TOLERANCE
    assert site.valid_tokens.shape == (B, T)
    assert site.valid_sources.shape == (B, S)


def test_an_unbatched_call_is_a_batch_of_one():
    attention, x = attention_of(), torch.randn(T, WIDTH)
    trace, _, (_, weights) = compared(attention, x, x, x, average_attn_weights=False)
    (site,) = trace.mixers
    assert site.operator.shape == (1, H, T, T)
    assert (site.operator.dense()[0] - weights).abs().max() < TOLERANCE


def test_arguments_by_name():
    attention, x = attention_of(), torch.randn(B, T, WIDTH)
    trace, _, _ = compared(attention, query=x, key=x, value=x, key_padding_mask=PADDING)
    (site,) = trace.mixers
    assert torch.equal(site.valid_sources, ~PADDING)
    assert not site.cross


class TwoNorms(nn.Module):
    """Queries and keys normalised apart, from one stream."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = attention_of()

    def forward(self, x):
        return x + self.attention(self.norms[0](x), self.norms[1](x), x)[0]


class TwoStreams(TwoNorms):
    """Queries and keys normalised apart, from two streams of one length."""

    def forward(self, x, other):
        return x + self.attention(self.norms[0](x), self.norms[1](other), other)[0]


def test_self_and_cross_attention_of_equal_length_differ_by_streams():
    x, other = torch.randn(B, T, WIDTH), torch.randn(B, T, WIDTH)
    assert [site.cross for site in compared(TwoNorms().eval(), x)[0].mixers] == [False]
    assert [site.cross for site in compared(TwoStreams().eval(), x, other)[0].mixers] == [True]
    assert [site.cross for site in compared(attention_of(), x, other, other)[0].mixers] == [True]


@pytest.mark.parametrize("apart", [False, True])
def test_the_functional_form(apart):
    attention = attention_of()

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            a = self.attention
            q, k, v = a.in_proj_weight.chunk(3)
            own = {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v} if apart else {}
            joint = torch.empty([0]) if apart else a.in_proj_weight
            return F.multi_head_attention_forward(
                x, x, x, WIDTH, H, joint, a.in_proj_bias, None, None, False, 0.0,
                a.out_proj.weight, a.out_proj.bias, training=False, attn_mask=CAUSAL,
                average_attn_weights=False, use_separate_proj_weight=apart, **own,
            )  # fmt: skip

    trace, _, (_, weights) = compared(Functional().eval(), torch.randn(T, B, WIDTH))
    (site,) = trace.mixers
    assert (site.operator.dense() - weights).abs().max() < TOLERANCE
    assert not site.cross


# --- nn.TransformerEncoder ----------------------------------------------------------------------------------


def encoder(heads=4, nested=True, depth=3, **settings):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, heads, 32, **{"batch_first": True} | settings)
    made = nn.TransformerEncoder(layer, depth, enable_nested_tensor=nested)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return made.eval()


LAYERS = {
    "plain": {},
    "norm first": {"norm_first": True, "nested": False},
    "gelu": {"activation": "gelu"},
    "three heads": {"heads": 3, "nested": False},
    "tokens first": {"batch_first": False, "nested": False},
    "no bias": {"bias": False, "nested": False},
}
MASKS = {
    "none": {},
    "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(T)},
    "bool": {"mask": CAUSAL},
    "padding": {"src_key_padding_mask": PADDING},
    "left padding": {"src_key_padding_mask": PADDING.flip(1)},
    "padding and mask": {"src_key_padding_mask": PADDING, "mask": CAUSAL},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_of_an_encoder_is_seen_whether_fast_or_not(kind, mask):
    model, masks = encoder(**LAYERS[kind]), MASKS[mask]
    first = LAYERS[kind].get("batch_first") is False
    x = torch.randn(B, T, WIDTH).transpose(0, 1) if first else torch.randn(B, T, WIDTH)
    trace, calls, output = compared(model, x, **masks)
    fast = kind in ("plain", "norm first", "gelu")
    assert calls == ({"_transformer_encoder_layer_fwd": 3} if fast else {})
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    keep = ~masks["src_key_padding_mask"] if "src_key_padding_mask" in masks else torch.ones(B, T).bool()
    for site in trace.mixers:
        assert torch.equal(site.valid_tokens, keep)
        assert torch.equal(site.valid_sources, keep)
    for state in trace.states:
        assert state.tokens.shape == (B, T, WIDTH)
        assert state.mask is None or torch.equal(state.mask, keep)
    # One layer alone, on what it read: its own weights by the slow path.
    for site, state in zip(trace.mixers, trace.states, strict=False):
        layer = model.layers[site.layer]
        read = layer.norm1(state.tokens) if layer.norm_first else state.tokens
        read = read.transpose(0, 1) if first else read
        with torch.no_grad():
            _, weights = layer.self_attn(
                read, read, read, attn_mask=masks.get("mask"), average_attn_weights=False,
                key_padding_mask=masks.get("src_key_padding_mask"),
            )  # fmt: skip
        matrix = site.operator.dense()
        for at in range(B):
            rows = keep[at]
            assert (matrix[at][:, rows][..., rows] - weights[at][:, rows][..., rows]).abs().max() < TOLERANCE
    given = trace.states[-1].tokens
    output = output.transpose(0, 1) if first else output
    assert torch.equal(given[keep], output[keep])


def test_nested_tensors_are_padded_and_their_mask_is_known():
    model = encoder()
    x = torch.randn(B, T, WIDTH)
    with torch.no_grad(), Spy() as spy, rw.capture(model) as trace:
        model(x, src_key_padding_mask=PADDING)
    assert spy.calls == {"_transformer_encoder_layer_fwd": 3}
    assert torch.equal(trace.states[0].tokens[~PADDING], x[~PADDING])
    assert (trace.states[0].tokens[PADDING] == 0).all()
    assert torch.equal(trace.states[1].mask, ~PADDING)


@pytest.mark.parametrize("training", [True, False])
def test_with_gradients(training):
    model, x = encoder().train(training), torch.randn(B, T, WIDTH)
    torch.manual_seed(1)
    alone = model(x)
    torch.manual_seed(1)
    with rw.capture(model) as trace:
        watched = model(x)
    assert torch.equal(alone, watched)
    assert len(trace.mixers) == 3
    assert not any(site.operator.query.requires_grad for site in trace.mixers)
    watched.sum().backward()
    assert model.layers[0].self_attn.in_proj_weight.grad is not None
    assert bool(trace.notes) == training
    if training:
        assert "dropout was on in" in trace.notes[0]


def test_an_unbatched_sequence():
    trace, _, output = compared(encoder(nested=False), torch.randn(T, WIDTH))
    assert [site.operator.shape for site in trace.mixers] == [(1, 4, T, T)] * 3
    assert torch.equal(trace.states[-1].tokens[0], output)


def test_a_layer_called_by_name_is_a_block():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = encoder().layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(src=x)
            return x

    trace, calls, _ = compared(Named().eval(), hidden())
    assert calls == {"_transformer_encoder_layer_fwd": 3}
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [T, S])
def test_the_whole_transformer(batch_first, length):
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=batch_first).eval()
    x, y = torch.randn(B, length, WIDTH), torch.randn(B, T, WIDTH)
    given = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    trace, _, _ = compared(model, *given, tgt_mask=mask)
    shown = [(site.stack, site.layer, site.cross, tuple(site.operator.shape[-2:])) for site in trace.mixers]
    wanted = [("encoder.layers", at, False, (length, length)) for at in (0, 1)]
    for at in (0, 1):
        wanted += [("decoder.layers", at, False, (T, T)), ("decoder.layers", at, True, (T, length))]
    assert shown == wanted
    states = {(state.stack, state.layer): state.tokens for state in trace.states}
    assert torch.equal(states["encoder.layers", 0], x)
    assert torch.equal(states["decoder.layers", 0], y)
    assert len(states) == 6


# --- what keeps the fast path, or another one, as it was ----------------------------------------------------


@contextmanager
def without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    "off", [lambda: torch.device("cpu"), without_fast_path], ids=["a mode", "the switch"]
)
def test_the_fast_path_can_be_switched_off(off):
    """A default device is a function mode: it switches the fast path off, with and without capture."""
    with off():
        trace, calls, _ = compared(encoder(), torch.randn(B, T, WIDTH))
    assert calls == {}
    assert len(trace.mixers) == 3


def test_hooks_of_the_user_stay_in_charge():
    model, x = encoder(), torch.randn(B, T, WIDTH)
    seen = []
    handle = model.layers[1].register_forward_hook(lambda *given: seen.append(given[-1].shape))
    trace, calls, _ = compared(model, x)
    handle.remove()
    assert calls == {"_transformer_encoder_layer_fwd": 2, "_native_multi_head_attention": 1}
    assert len(seen) == 2
    assert len(trace.mixers) == 3


class OwnAttention(nn.TransformerEncoderLayer):
    """Mixes in its own way where PyTorch leaves the fast path."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def test_an_overridden_attention_block_is_never_taken_for_the_stock_one():
    torch.manual_seed(0)
    layer = OwnAttention(WIDTH, 4, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(B, T, WIDTH)
    trace, calls, _ = compared(model.eval(), x)  # the fast path does not ask the overridden block
    assert calls == {"_transformer_encoder_layer_fwd": 2}
    assert len(trace.mixers) == 2
    with pytest.raises(CaptureError, match="left PyTorch's fast path for an attention of its own"):
        compared(model.train(), x)


class Linear(nn.Module):
    """Replaces the attention of a stock layer."""

    def __init__(self):
        super().__init__()
        self.batch_first, self.num_heads, self.in_proj_bias = True, 4, None
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, query, key, value, **given):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.inner(query).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), None


def test_a_layer_has_the_same_name_on_the_fast_path_and_off_it():
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(B, T, WIDTH)
    fast, calls, _ = compared(model, x)
    slow, slow_calls, _ = compared(model.train(), x)
    assert calls
    assert not slow_calls
    assert [site.name for site in fast.mixers] == [site.name for site in slow.mixers] == ["0", "1"]
    for one, other in zip(fast.mixers, slow.mixers, strict=True):
        assert (one.layer, one.cross) == (other.layer, other.cross)
        assert (one.operator.dense() - other.operator.dense()).abs().max() < TOLERANCE


def test_an_attention_put_into_a_stock_layer_is_seen_itself():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    layer.self_attn = Linear()
    trace, calls, _ = compared(nn.Sequential(layer).eval(), torch.randn(B, T, WIDTH))
    assert calls == {}
    assert [site.name for site in trace.mixers] == ["0.self_attn"]


def test_a_layer_of_ones_own_inside_the_stock_encoder():
    class Own(nn.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            q = src.unflatten(-1, (4, -1)).transpose(1, 2)
            return src + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    model = nn.TransformerEncoder(Own(WIDTH, 4, 32, batch_first=True), 2, enable_nested_tensor=False).eval()
    trace, _, _ = compared(model, torch.randn(B, T, WIDTH))
    assert [(site.name, site.layer) for site in trace.mixers] == [("layers.0", 0), ("layers.1", 1)]
    assert [state.layer for state in trace.states] == [0, 1, 2]
    for site, state in zip(trace.mixers, trace.states, strict=False):
        q = state.tokens.unflatten(-1, (4, -1)).transpose(1, 2)
        assert (site.operator.dense() - rw.operators.SoftmaxMixing(q, q).dense()).abs().max() < TOLERANCE


def test_a_forward_replaced_on_the_module_is_reported():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.other = attention_of(), attention_of()

        def forward(self, x):
            return self.attention(x, x, x)[0] + self.other(x, x, x)[0]

    model = Model().eval()
    model.other.forward = lambda query, key, value: (query * 2, None)
    trace, _, _ = compared(model, torch.randn(B, T, WIDTH))
    assert [site.name for site in trace.mixers] == ["attention"]
    (uncaptured,) = trace.uncaptured
    assert uncaptured.name == "other"
    assert "`forward` was replaced" in uncaptured.reason


def test_blocks_around_the_attention_layer_in_half_precision():
    class HalfBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(WIDTH), attention_of()

        def forward(self, x):
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    model = Stack(HalfBlock).eval().bfloat16()
    trace, calls, _ = compared(model, hidden().bfloat16())
    assert calls == {"_native_multi_head_attention": 3}
    assert {site.operator.dtype for site in trace.mixers} == {torch.bfloat16}
    assert {state.tokens.dtype for state in trace.states} == {torch.bfloat16}
