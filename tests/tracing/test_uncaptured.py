"""Sites named by the caller, modules that were not captured and why, and the errors of capture."""

from functools import partial

import pytest
import torch
import transformers
from capture_zoo import (
    BATCH,
    TOKENS,
    WIDTH,
    Attention,
    Block,
    Stack,
    attention_block,
    hidden,
    kind,
    linear,
    seen,
    stack_of,
    torch_encoder,
)
from tests.unchecked import unchecked
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.errors import CaptureError, InputError
from rankwise.operators import DenseMixing
from rankwise.tracing.uncaptured import looks_like_mixer


def with_attention(other):
    """Two blocks, each of which adds attention and then another module."""
    block = kind(lambda self, x: self.attend(x) + self.other(x), attend=attention_block, other=other)
    return Stack(block, 2).eval()


def depthwise(size=3):
    return nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2, groups=WIDTH)


Convolution = kind(lambda self, x: self.depthwise(x.mT).mT, depthwise=depthwise)


OTHERS = {
    "`conv1d`": Convolution,
    "`conv2d`": kind(
        lambda self, x: self.conv(x.mT.unflatten(-1, (1, -1))).flatten(2).mT,
        conv=lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
    ),
    "`linear`": kind(lambda self, x: self.linear(x.mT).mT, linear=lambda: nn.Linear(TOKENS, TOKENS)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_mixing_without_attention_is_named_and_described(name):
    trace = seen(with_attention(OTHERS[name]), hidden())
    assert [site.layer for site in trace.mixers] == [0, 1]
    assert [module.name for module in trace.uncaptured] == ["blocks.0.other", "blocks.1.other"]
    assert all(module.reason.startswith(f"{name} mixes its tokens") for module in trace.uncaptured)


Pointwise = kind(
    lambda self, x: self.linear(self.conv(x.mT).mT), conv=lambda: nn.Conv1d(WIDTH, WIDTH, 1), linear=linear
)
WideAsTokens = kind(
    lambda self, x: self.down(F.gelu(self.up(x))),
    up=lambda: nn.Linear(WIDTH, TOKENS),
    down=lambda: nn.Linear(TOKENS, WIDTH),
)


class Convolved(Attention):
    """Attention with a convolution inside."""

    def __init__(self):
        super().__init__()
        self.local = Convolution()

    def forward(self, x):
        return super().forward(x + self.local.depthwise(x.mT).mT)


Preceded = kind(
    lambda self, x: self.core(self.convolution.depthwise(x.mT).mT), convolution=Convolution, core=Attention
)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: with_attention(Pointwise), ["blocks.{}.attend.attention"]),
        (lambda: with_attention(WideAsTokens), ["blocks.{}.attend.attention"]),
        (lambda: Stack(Convolved, 2), ["blocks.{}"]),
        (lambda: Stack(kind(lambda self, x: x + self.mixer(x), mixer=Preceded), 2), ["blocks.{}.mixer.core"]),
    ],
    ids=["one token at a time", "as wide as tokens", "convolution inside attention", "convolution before it"],
)
def test_modules_that_do_not_mix_tokens_separately_are_not_named(model, names):
    trace = seen(model().eval(), hidden())
    assert [site.name for site in trace.mixers] == [name.format(at) for at in (0, 1) for name in names]
    assert trace.uncaptured == []


def test_a_convolution_that_the_block_calls_is_named():
    block = kind(lambda self, x: self.attention(x) + self.conv(x.mT).mT, attention=Attention, conv=depthwise)
    trace = seen(Stack(block, 2).eval(), hidden())
    assert [(module.name, module.type) for module in trace.uncaptured] == [
        ("blocks.0.conv", "Conv1d"),
        ("blocks.1.conv", "Conv1d"),
    ]


def test_convolutions_of_a_front_end_and_of_positions_are_not_named():
    settings = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
    settings |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
    settings |= {"num_conv_pos_embedding_groups": 2}
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**settings)).eval()
    trace = seen(model, torch.randn(1, 400))
    assert len(trace.mixers) == 2
    assert trace.uncaptured == []


@pytest.mark.parametrize("name", ["RWKV_Tmix_x070", "RwkvTimeMix", "MyShortConv", "TimeMixing"])
def test_the_name_of_a_class_suggests_a_mixer(name):
    """Also if the module runs a function that the function mode does not recognize."""
    trace = seen(with_attention(kind(lambda self, x: x.flip(1), name)), hidden())
    assert [module.type for module in trace.uncaptured] == [name, name]


def test_helpers_of_a_mixer_are_not_named():
    sizes = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8, "num_layers": 1}
    model = transformers.PatchTSMixerModel(transformers.PatchTSMixerConfig(**sizes)).eval()
    with pytest.raises(CaptureError, match=r"PatchTSMixerEncoder\): called, but no attention") as error:
        seen(model, torch.randn(2, 16, 1))
    assert "Patchify" not in str(error.value)
    assert "Scaler" not in str(error.value)


# --- sites named by the caller ------------------------------------------------------------------------------


def decay_matrix(tokens, rate=0.5):
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return torch.where(distance >= 0, rate ** distance.clamp(min=0), 0.0)


DecayMixer = kind(lambda self, x: self.proj(decay_matrix(x.shape[1]) @ x), "DecayMixer", proj=linear)


def operator_of(matrix, batch):
    return DenseMixing(matrix.expand(batch, 1, -1, -1))


def decay(module, args, kwargs, output):
    (x,) = args
    assert output.shape == x.shape
    return operator_of(decay_matrix(x.shape[1]), x.shape[0])


def hybrid():
    return nn.Sequential(attention_block(), Block(DecayMixer()), nn.LayerNorm(WIDTH)).eval()


def test_sites_of_the_caller_are_added_to_found_sites():
    trace = seen(hybrid(), hidden(), capture={"sites": {"1.attention": decay}})
    assert [(site.name, site.layer, site.kind) for site in trace.mixers] == [
        ("0.attention", 0, "softmax"),
        ("1.attention", 1, "dense"),
    ]
    assert trace.uncaptured == []
    assert torch.equal(trace.mixers[1].operator.dense()[0, 0], decay_matrix(TOKENS))
    assert [state.layer for state in trace.states] == [0, 1, 2]


def test_a_site_of_the_caller_replaces_sites_found_inside_it():
    def identity(module, args, kwargs, output):
        eye = torch.eye(args[0].shape[1])
        values = torch.softmax(eye, -1) @ eye  # attention inside the site function is not captured
        return operator_of(eye + 0 * values, args[0].shape[0])

    trace = seen(stack_of(depth=2), hidden(), capture={"sites": {"blocks.1.attention": identity}})
    assert [(site.name, site.kind) for site in trace.mixers] == [
        ("blocks.0.attention", "softmax"),
        ("blocks.1.attention", "dense"),
    ]


def test_pytorchs_layer_can_be_a_site_of_the_caller():
    x, given = hidden(), []

    def ones(module, args, kwargs, output):
        given.append((type(module).__name__, output.shape))
        return operator_of(torch.ones(TOKENS, TOKENS) / TOKENS, BATCH)

    trace = seen(torch_encoder(), x, capture={"sites": {"layers.0": ones}})
    assert given == [("TransformerEncoderLayer", x.shape)]
    assert [site.kind for site in trace.mixers] == ["dense", "softmax"]


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (torch.eye(3), r"got Tensor \(3, 3\)"),
        (DenseMixing(torch.eye(3)), r"got DenseMixing \(3, 3\)"),
        (None, r"got NoneType\."),
    ],
)
def test_a_site_function_must_return_an_operator_of_four_axes(made, got):
    sites = {"1.attention": lambda *call: made}
    with unchecked(), pytest.raises(CaptureError, match=rf"site '1\.attention'.*\(B, H, T, S\), {got}"):
        seen(hybrid(), hidden(), capture={"sites": sites})


def test_an_unknown_site_is_an_error_that_suggests_a_name():
    with pytest.raises(InputError, match=r"site '1\.atention'.*Did you mean 1\.attention"):
        rw.capture(hybrid(), sites={"1.atention": decay})


# --- modules that were not captured -------------------------------------------------------------------------


def test_a_mixer_without_softmax_is_reported_with_the_remedy():
    (uncaptured,) = seen(hybrid(), hidden()).uncaptured
    assert (uncaptured.name, uncaptured.type) == ("1.attention", "DecayMixer")
    assert "name it in `sites=`" in uncaptured.reason


@pytest.mark.parametrize("sites", [None, {"1.attention": decay}])
def test_a_part_that_does_not_run_is_reported(sites):
    model = hybrid()
    with torch.no_grad(), rw.capture(model, sites=sites) as trace:
        model[0](hidden())
    assert [(module.name, module.reason) for module in trace.uncaptured] == [
        ("1.attention", "never called in this capture")
    ]


MIXERS = [
    *("SelfAttention", "LlamaSdpaAttention", "BertSelfAttention", "CausalSelfAttn", "Mamba2Mixer", "S4D"),
    *("HyenaOperator", "GatedDeltaNet", "RecurrentGemmaRglru", "LSTM", "FNetBasicFourierTransform"),
]
OTHER_MODULES = [
    *("FunnelAttentionStructure", "BertSelfOutput", "AttentionDropout", "AttentionBlock"),
    *("AttentionPooling", "LayerNorm", "MixerMlp", "xLSTMBlockStack", "MambaStack"),
]


def test_mixers_are_recognized_by_names():
    named = [name for name in MIXERS + OTHER_MODULES if looks_like_mixer(type(name, (nn.Module,), {})())]
    assert named == MIXERS


def test_mixers_are_recognized_by_projections_of_queries_and_keys():
    for query, key in (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk")):
        module = nn.Module()
        setattr(module, query, nn.Linear(1, 1))
        assert not looks_like_mixer(module), query
        setattr(module, key, nn.Linear(1, 1))
        assert looks_like_mixer(module), key


# --- errors -------------------------------------------------------------------------------------------------


def captured(model, call=None):
    with torch.no_grad(), rw.capture(model):
        (call or model)(hidden())


REFUSED = {
    "no mixers": (
        lambda: captured(nn.Sequential(linear(), nn.ReLU(), nn.Linear(WIDTH, 2))),
        r"model Sequential: expected at least one mixing operator, got none"
        r".*rw\.capture\(model, sites=\{'layers\.0\.mixer': f\}\)",
    ),
    "mixers that were not seen": (
        lambda: captured(Stack(lambda: Block(DecayMixer()), 5).eval()),
        r"blocks\.0\.attention \(DecayMixer\), blocks\.1\.attention .*, .* and 2 more: called, but no",
    ),
    "no call": (
        lambda: captured(stack_of(), call=lambda x: x),
        r"no call of it or of any of its modules.*Call the captured model itself.*model\(\*\*batch\)",
    ),
    "a call of another model": (lambda: captured(stack_of(), call=stack_of()), "no call of it"),
    **{
        f"a {type(thing).__name__}": (
            partial(rw.capture, thing),
            rf"expected a torch\.nn\.Module, got {type(thing).__name__}.*pipeline",
        )
        for thing in ("bert-base-uncased", print, None)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_capture_without_mixers_is_an_error(case):
    call, message = REFUSED[case]
    with unchecked(), pytest.raises(CaptureError, match=message):
        call()


def test_a_bare_attention_layer_has_no_states_and_a_note():
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval()
    x = hidden()
    with torch.no_grad(), rw.capture(attention) as trace:
        attention(x, x, x)
    assert [(site.name, site.layer) for site in trace.mixers] == [("", 0)]
    (note,) = trace.notes
    assert "no token states were found" in note
    assert "`blocks=`" in note
