"""PyTorch's own attention layers are captured exactly and still take their inference fast path."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from capture_zoo import WIDTH, Stack, fused, heads_of, hidden, kind, merged, torch_encoder
from tests.support.torch_names import FAST_ATTENTION as ATTENTION
from tests.support.torch_names import FAST_LAYER as LAYER
from tests.support.torch_names import Operations
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.errors import CaptureError
from rankwise.tracing import Intervention

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

TOLERANCE = 1e-5  # sums of at most 64 float32 products of size ≤ 2


def on_fast_path(operations):
    """Return the counts of the operations of the fast path."""
    names = [function.overloadpacket.__name__ for function in operations.functions]
    return Counter(name for name in names if name in (LAYER, ATTENTION))


def compared(model, *args, **kwargs):
    """Return trace, fast-path operations and output; capture must change neither of the last two."""
    with torch.no_grad(), Operations() as alone:
        first = model(*args, **kwargs)
    with torch.no_grad(), Operations() as captured, rw.capture(model, values=True) as trace:
        second = model(*args, **kwargs)
    calls = on_fast_path(alone)
    assert calls == on_fast_path(captured)
    firsts, seconds = (out if isinstance(out, tuple) else (out,) for out in (first, second))
    for one, other in zip(firsts, seconds, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    return trace, calls, first


# --- nn.MultiheadAttention ----------------------------------------------------------------------------------

B, T, S, H = 2, 6, 9, 4
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
SELF_MASKS = {
    "none": {},
    "bool (T, S)": {"attn_mask": CAUSAL},
    "float (T, S)": {"attn_mask": torch.randn(T, T)},
    # A row that hides all keys would be NaN, which equals nothing.
    "bool (B·H, T, S)": {"attn_mask": (torch.rand(B * H, T, T) < 0.3) & ~torch.eye(T, dtype=torch.bool)},
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


# Added keys widen the masks; other settings do not interact with masks.
MHA = [(setting, mask) for setting in ("plain", "both") for mask in SELF_MASKS]
MHA += [
    (setting, mask)
    for setting in ("three heads", "tokens first", "no bias", "bias_k", "zero attention")
    for mask in ("none", "padding and float")
]
MHA += [("kdim, vdim", "none")]


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
    for needed in (False, True):
        trace, _, (output, averaged) = compared(attention, x, key, value, need_weights=needed, **masks)
        again = trace.mixers[0]
        if "hinted" not in mask:  # there PyTorch takes the hint for the mask, unless it reports weights
            assert torch.equal(again.operator.dense(), site.operator.dense())
        mixed = attention.out_proj((again.operator.dense() @ again.values).transpose(1, 2).flatten(2))
        output = output if settings.get("batch_first", True) else output.transpose(0, 1)
        assert (mixed - output).abs().max() < 10 * TOLERANCE
        if needed:
            assert (again.operator.dense().mean(1) - averaged).abs().max() < TOLERANCE


@pytest.mark.parametrize("mask", ["none", "padding", "bool (B·H, T, S)"])
def test_the_attention_takes_the_fast_path(mask):
    x = torch.randn(B, T, WIDTH)
    _, calls, _ = compared(attention_of(), x, x, x, need_weights=False, **SELF_MASKS[mask])
    assert calls == {ATTENTION: 1}


@pytest.mark.parametrize("shape", [(B, S), (T,)], ids=["cross", "unbatched"])
def test_keys_of_a_memory_and_calls_without_a_batch_are_captured(shape):
    attention, keys = attention_of(), torch.randn(*shape, WIDTH)
    x = keys if shape == (T,) else torch.randn(shape[0], T, WIDTH)
    trace, _, (_, weights) = compared(attention, x, keys, keys, average_attn_weights=False)
    (site,) = trace.mixers
    assert site.cross == (shape != (T,))
    assert site.operator.shape == weights.view(-1, H, T, shape[-1]).shape
    assert (site.operator.dense() - weights).abs().max() < TOLERANCE
    assert site.valid_tokens.shape == (site.operator.shape[0], T)
    assert site.valid_sources.shape == (site.operator.shape[0], shape[-1])


def test_arguments_may_be_named():
    x = torch.randn(B, T, WIDTH)
    trace, _, _ = compared(attention_of(), query=x, key=x, value=x, key_padding_mask=PADDING)
    (site,) = trace.mixers
    assert torch.equal(site.valid_sources, ~PADDING)
    assert not site.cross


def two_norms(forward):
    return kind(forward, q=lambda: nn.LayerNorm(WIDTH), k=lambda: nn.LayerNorm(WIDTH), attention=attention_of)


def test_self_and_cross_attention_of_equal_length_differ_by_streams():
    x, other = torch.randn(B, T, WIDTH), torch.randn(B, T, WIDTH)
    one = two_norms(lambda self, x: x + self.attention(self.q(x), self.k(x), x)[0])().eval()
    two = two_norms(lambda self, x, y: x + self.attention(self.q(x), self.k(y), y)[0])().eval()
    assert [site.cross for site in compared(one, x)[0].mixers] == [False]
    assert [site.cross for site in compared(two, x, other)[0].mixers] == [True]
    assert [site.cross for site in compared(attention_of(), x, other, other)[0].mixers] == [True]


@pytest.mark.parametrize("separate", [False, True])
def test_the_functional_form_is_captured(separate):
    def forward(self, x):
        a = self.attention
        q, k, v = a.in_proj_weight.chunk(3)
        own = {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v} if separate else {}
        joint = torch.empty([0]) if separate else a.in_proj_weight
        return F.multi_head_attention_forward(
            x, x, x, WIDTH, H, joint, a.in_proj_bias, None, None, False, 0.0,
            a.out_proj.weight, a.out_proj.bias, training=False, attn_mask=CAUSAL,
            average_attn_weights=False, use_separate_proj_weight=separate, **own,
        )  # fmt: skip

    model = kind(forward, attention=attention_of)().eval()
    trace, _, (_, weights) = compared(model, torch.randn(T, B, WIDTH))
    (site,) = trace.mixers
    assert (site.operator.dense() - weights).abs().max() < TOLERANCE
    assert not site.cross


# --- nn.TransformerEncoder ----------------------------------------------------------------------------------


def encoder(nested=True, depth=3, **settings):
    torch.manual_seed(0)
    made = torch_encoder(depth, nested=nested, **settings)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return made


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


# One layer with every mask on the fast path, one off it; the others with both kinds of masks at once.
ENCODERS = [(layer, mask) for layer in ("plain", "three heads") for mask in MASKS]
ENCODERS += [(layer, "padding and mask") for layer in LAYERS if layer not in ("plain", "three heads")]


@pytest.mark.parametrize(("layer", "mask"), ENCODERS)
def test_every_layer_of_an_encoder_is_captured_on_the_fast_path_and_off_it(layer, mask):
    model, masks = encoder(**LAYERS[layer]), MASKS[mask]
    first = layer == "tokens first"
    x = torch.randn(B, T, WIDTH).transpose(0, 1) if first else torch.randn(B, T, WIDTH)
    trace, calls, output = compared(model, x, **masks)
    assert calls == ({LAYER: 3} if layer in ("plain", "norm first", "gelu") else {})
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    keep = ~masks["src_key_padding_mask"] if "src_key_padding_mask" in masks else torch.ones(B, T).bool()
    for state in trace.states:
        assert state.tokens.shape == (B, T, WIDTH)
        assert state.mask is None or torch.equal(state.mask, keep)
    pairs = keep[:, None, :, None] & keep[:, None, None, :]
    for site, state in zip(trace.mixers, trace.states, strict=False):
        assert torch.equal(site.valid_tokens, keep)
        assert torch.equal(site.valid_sources, keep)
        # the layer alone, given its own input, reports its weights by the slow path
        block = model.layers[site.layer]
        read = block.norm1(state.tokens) if block.norm_first else state.tokens
        read = read.transpose(0, 1) if first else read
        with torch.no_grad():
            _, weights = block.self_attn(
                read, read, read, attn_mask=masks.get("mask"), average_attn_weights=False,
                key_padding_mask=masks.get("src_key_padding_mask"),
            )  # fmt: skip
        off = (site.operator.dense() - weights).masked_fill(~pairs, 0.0)
        assert off.abs().max() < TOLERANCE
    last = trace.states[-1].tokens
    assert torch.equal(last[keep], (output.transpose(0, 1) if first else output)[keep])


def test_nested_tensors_are_padded_and_their_mask_is_known():
    x = torch.randn(B, T, WIDTH)
    trace, calls, _ = compared(encoder(), x, src_key_padding_mask=PADDING)
    assert calls == {LAYER: 3}
    assert torch.equal(trace.states[0].tokens[~PADDING], x[~PADDING])
    assert (trace.states[0].tokens[PADDING] == 0).all()
    assert torch.equal(trace.states[1].mask, ~PADDING)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_flow_through_captured_layers(training):
    model, x = encoder().train(training), torch.randn(B, T, WIDTH)
    torch.manual_seed(1)
    alone = model(x)
    torch.manual_seed(1)
    with rw.capture(model) as trace:
        captured = model(x)
    assert torch.equal(alone, captured)
    assert len(trace.mixers) == 3
    assert not any(site.operator.query.requires_grad for site in trace.mixers)
    captured.sum().backward()
    assert model.layers[0].self_attn.in_proj_weight.grad is not None
    assert ["dropout was active in" in note for note in trace.notes] == [True] * training


def test_an_unbatched_sequence_is_a_batch_of_one():
    trace, _, output = compared(encoder(nested=False), torch.randn(T, WIDTH))
    assert [site.operator.shape for site in trace.mixers] == [(1, 4, T, T)] * 3
    assert torch.equal(trace.states[-1].tokens[0], output)


def test_a_layer_called_by_name_is_a_block():
    def forward(self, x):
        for layer in self.layers:
            x = layer(src=x)
        return x

    trace, calls, _ = compared(kind(forward, layers=lambda: encoder().layers)().eval(), hidden())
    assert calls == {LAYER: 3}
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [T, S])
def test_the_whole_transformer_is_captured(batch_first, length):
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=batch_first).eval()
    x, y = torch.randn(B, length, WIDTH), torch.randn(B, T, WIDTH)
    given = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    trace, _, _ = compared(model, *given, tgt_mask=mask)
    expected = [("encoder.layers", at, False, (length, length)) for at in (0, 1)]
    for at in (0, 1):
        expected += [("decoder.layers", at, False, (T, T)), ("decoder.layers", at, True, (T, length))]
    assert [
        (site.stack, site.layer, site.cross, tuple(site.operator.shape[-2:])) for site in trace.mixers
    ] == expected
    states = {(state.stack, state.layer): state.tokens for state in trace.states}
    assert torch.equal(states["encoder.layers", 0], x)
    assert torch.equal(states["decoder.layers", 0], y)
    assert len(states) == 6


# --- capture keeps the path that the layer takes ------------------------------------------------------------


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


def test_hooks_of_the_user_still_run_and_end_the_fast_path():
    model, seen = encoder(), []
    handle = model.layers[1].register_forward_hook(lambda *given: seen.append(given[-1].shape))
    trace, calls, _ = compared(model, torch.randn(B, T, WIDTH))
    handle.remove()
    assert calls == {LAYER: 2, ATTENTION: 1}
    assert len(seen) == 2
    assert len(trace.mixers) == 3


def attend(x):
    q = heads_of(x, 4)
    return merged(fused(q, q, q))


class OwnAttention(nn.TransformerEncoderLayer):
    """Has its own attention off PyTorch's fast path."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return attend(x)


class OwnLayer(nn.TransformerEncoderLayer):
    """Replaces the whole computation of the layer."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        return src + attend(src)


def stock_encoder(layer):
    torch.manual_seed(0)
    made = layer(WIDTH, 4, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(made, 2, enable_nested_tensor=False).eval()


def test_an_overridden_attention_block_is_not_taken_for_pytorchs_own():
    model, x = stock_encoder(OwnAttention), torch.randn(B, T, WIDTH)
    trace, calls, _ = compared(model, x)  # the fast path does not call the overridden block
    assert calls == {LAYER: 2}
    assert len(trace.mixers) == 2
    with pytest.raises(CaptureError, match="left PyTorch's fast path for an attention of its own"):
        compared(model.train(), x)


def test_a_custom_layer_inside_pytorchs_encoder_is_captured():
    trace, _, _ = compared(stock_encoder(OwnLayer), torch.randn(B, T, WIDTH))
    assert [(site.name, site.layer) for site in trace.mixers] == [("layers.0", 0), ("layers.1", 1)]
    assert [state.layer for state in trace.states] == [0, 1, 2]
    for site, state in zip(trace.mixers, trace.states, strict=False):
        q = heads_of(state.tokens, 4)
        assert (site.operator.dense() - rw.operators.SoftmaxMixing(q, q).dense()).abs().max() < TOLERANCE


class OwnHeads(nn.MultiheadAttention):
    """PyTorch's attention in a class of its own."""

    def forward(self, *given, **named):
        return super().forward(*given, **named)


@pytest.mark.parametrize("attention", [nn.MultiheadAttention, OwnHeads])
def test_a_layer_has_the_same_name_on_the_fast_path_and_off_it(attention):
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    for layer in layers:
        layer.self_attn = attention(WIDTH, 4, batch_first=True)
    model, x = nn.Sequential(*layers).eval(), torch.randn(B, T, WIDTH)
    fast, calls, _ = compared(model, x)
    with torch.no_grad(), rw.capture(model, intervention=Intervention()) as replaced:
        model(x)
    slow, slow_calls, _ = compared(model.train(), x)
    assert (calls[LAYER], slow_calls[LAYER]) == (2, 0)
    for trace in (fast, slow, replaced):
        assert [(site.name, site.call_id.module) for site in trace.mixers] == [("0", "0"), ("1", "1")]
    for one, other in zip(fast.mixers, slow.mixers, strict=True):
        assert (one.layer, one.cross) == (other.layer, other.cross)
        assert (one.operator.dense() - other.operator.dense()).abs().max() < TOLERANCE


def test_another_attention_inside_pytorchs_layer_is_captured_by_its_own_name():
    def forward(self, query, key, value, **given):
        return merged(fused(*(heads_of(part, 4) for part in self.inner(query).chunk(3, dim=-1)))), None

    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    layer.self_attn = kind(forward, inner=lambda: nn.Linear(WIDTH, 3 * WIDTH))()
    layer.self_attn.batch_first, layer.self_attn.num_heads, layer.self_attn.in_proj_bias = True, 4, None
    trace, calls, _ = compared(nn.Sequential(layer).eval(), torch.randn(B, T, WIDTH))
    assert calls == {}
    assert [site.name for site in trace.mixers] == ["0.self_attn"]


def test_a_forward_replaced_on_the_module_is_reported():
    made = kind(
        lambda self, x: self.attention(x, x, x)[0] + self.other(x, x, x)[0],
        attention=attention_of,
        other=attention_of,
    )
    model = made().eval()
    model.other.forward = lambda query, key, value: (query * 2, None)
    trace, _, _ = compared(model, torch.randn(B, T, WIDTH))
    assert [site.name for site in trace.mixers] == ["attention"]
    (uncaptured,) = trace.uncaptured
    assert uncaptured.name == "other"
    assert "`forward` was replaced" in uncaptured.reason


def test_attention_layers_in_half_precision_keep_the_fast_path():
    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]

    block = kind(forward, norm=lambda: nn.LayerNorm(WIDTH), attention=attention_of)
    trace, calls, _ = compared(Stack(block).eval().bfloat16(), hidden().bfloat16())
    assert calls == {ATTENTION: 3}
    assert {site.operator.dtype for site in trace.mixers} == {torch.bfloat16}
    assert {state.tokens.dtype for state in trace.states} == {torch.bfloat16}
