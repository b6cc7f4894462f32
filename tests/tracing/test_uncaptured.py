"""Sites named by the user, modules that were not captured and why, and the errors of capture."""

import pytest
import torch
import transformers
from capture_zoo import BATCH, TOKENS, WIDTH, Attention, Block, Stack, hidden, plain, seen, stack_of
from tests.unchecked import unchecked
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.errors import CaptureError, InputError
from rankwise.tracing.uncaptured import looks_like_mixer


class Convolution(nn.Module):
    """Neighbouring tokens, channel by channel, as in a Conformer."""

    def __init__(self, size=3):
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2, groups=WIDTH)

    def forward(self, x):
        return self.depthwise(x.mT).mT


class Shift(nn.Module):
    """Each token next to the one before it, as in RWKV."""

    def __init__(self):
        super().__init__()
        self.before = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x):
        return x + self.before(x)


class Applied(nn.Module):
    """A function without weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class AcrossTokens(nn.Module):
    """The half of an MLP-Mixer that mixes tokens."""

    def __init__(self, tokens=7):
        super().__init__()
        self.linear = nn.Linear(tokens, tokens)

    def forward(self, x):
        return self.linear(x.mT).mT


class Grid(nn.Module):
    """Neighbours in a picture, its tokens laid out as a grid, as in SegFormer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x):
        return self.conv(x.mT.unflatten(-1, (1, -1))).flatten(2).mT


class Beside(nn.Module):
    """A block with attention and something else."""

    def __init__(self, other):
        super().__init__()
        self.attention, self.other = Attention(plain), other

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.other(x)


OTHERS = {
    "a convolution": Convolution,
    "a shift": Shift,
    "a shift: torch.roll": lambda: Applied(lambda x: torch.roll(x, 1, 1)),
    "a running sum": lambda: Applied(lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]),
    "a Fourier transform": lambda: Applied(lambda x: torch.fft.fft2(x, dim=(1, 2)).real),
    "a linear layer": AcrossTokens,
    "a convolution: of a grid": Grid,
}


@pytest.mark.parametrize("named", OTHERS)
def test_mixing_without_attention_is_named_and_described(named) -> None:
    model = Stack(lambda: Beside(OTHERS[named]()), 2).eval()
    trace = seen(model, hidden())
    assert [site.layer for site in trace.mixers] == [0, 1]
    assert [module.name for module in trace.uncaptured] == ["blocks.0.other", "blocks.1.other"]
    assert all(module.reason.startswith(named.partition(":")[0]) for module in trace.uncaptured)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_each_of_them_does_mix_tokens(make) -> None:
    module, x = make().eval(), hidden()
    changed = x.clone()
    changed[:, 3] += 1.0
    apart = (module(changed) - module(x)).abs().amax((0, 2))
    assert apart[torch.arange(x.shape[1]) != 3].max() > 1e-6


class Pointwise(nn.Module):
    """Convolutions and pads that see one token at a time."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(WIDTH, WIDTH, 1), nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x):
        x = self.conv(x.mT).mT
        return self.linear(F.pad(x, (1, 0))) + x.cumsum(-1).roll(1, -1)


def test_modules_that_see_one_token_at_a_time_are_not_named() -> None:
    model = Stack(lambda: Beside(Pointwise()), 2).eval()
    trace = seen(model, hidden())
    assert trace.uncaptured == []


def test_a_convolution_inside_the_attention_is_part_of_it() -> None:
    class Convolved(Attention):
        def __init__(self):
            super().__init__(plain)
            self.local = Convolution()

        def forward(self, x):
            return super().forward(x + self.local.depthwise(x.mT).mT)

    model = Stack(Convolved, 2).eval()
    trace = seen(model, hidden())
    assert trace.uncaptured == []


def test_a_convolution_before_a_captured_mixer_belongs_to_it() -> None:
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.core = Convolution(), Attention(plain)

        def forward(self, x):
            return self.core(self.convolution.depthwise(x.mT).mT)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = Mixer()

        def forward(self, x):
            return x + self.mixer(x)

    model = Stack(Block, 2).eval()
    trace = seen(model, hidden())
    assert [site.name for site in trace.mixers] == ["blocks.0.mixer.core", "blocks.1.mixer.core"]
    assert trace.uncaptured == []


def test_a_convolution_that_the_block_itself_calls_is_named_alone() -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.conv = Attention(plain), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

        def forward(self, x):
            return self.attention(x) + self.conv(x.mT).mT

    model = Stack(Block, 2).eval()
    trace = seen(model, hidden())
    assert [(module.name, module.type) for module in trace.uncaptured] == [
        ("blocks.0.conv", "Conv1d"),
        ("blocks.1.conv", "Conv1d"),
    ]


def test_a_front_end_and_embeddings_are_not_named() -> None:
    """A convolution that makes fewer tokens of a sound, and one that tells tokens their places."""
    settings = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
    settings |= {
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**settings)).eval()
    trace = seen(model, torch.randn(1, 400))
    assert len(trace.mixers) == 2
    assert trace.uncaptured == []


def test_of_rwkv_the_shift_of_the_channels_is_named() -> None:
    config = transformers.RwkvConfig(
        vocab_size=32, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, context_length=16
    )
    model = transformers.RwkvModel(config).eval()
    trace = seen(model, torch.arange(12).reshape(2, 6))
    assert [site.name for site in trace.mixers] == ["blocks.0.attention", "blocks.1.attention"]
    reasons = {module.name: module.reason for module in trace.uncaptured}
    assert set(reasons) == {"blocks.0.feed_forward", "blocks.1.feed_forward"}
    assert "a shift of its tokens" in reasons["blocks.0.feed_forward"]


def test_the_channels_of_rwkv_are_not_time_mixing() -> None:
    kind = type("RWKV_CMix_x070", (Shift,), {})
    model = Stack(lambda: Beside(kind()), 2).eval()
    trace = seen(model, hidden())
    assert all(module.reason.startswith("a shift of its tokens") for module in trace.uncaptured)
    assert len(trace.uncaptured) == 2


@pytest.mark.parametrize("name", ["RWKV_Tmix_x070", "RwkvTimeMix", "MyShortConv", "TimeMixing"])
def test_names_that_say_it(name) -> None:
    """Even where the module runs something that no function mode sees."""
    kind = type(name, (nn.Module,), {"forward": lambda self, x: x.flip(1)})
    model = Stack(lambda: Beside(kind()), 2).eval()
    trace = seen(model, hidden())
    assert [module.type for module in trace.uncaptured] == [name, name]


def test_mixers_without_a_matrix_are_described_and_helpers_are_not() -> None:
    import transformers

    sizes = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8, "num_layers": 1}
    model = transformers.PatchTSMixerModel(transformers.PatchTSMixerConfig(**sizes)).eval()
    said = r"PatchTSMixerEncoder\): an MLP across the patches"
    with pytest.raises(CaptureError, match=said) as refused, rw.capture(model), torch.no_grad():
        model(torch.randn(2, 16, 1))
    assert "Patchify" not in str(refused.value)
    assert "Scaler" not in str(refused.value)


class DecayMixer(nn.Module):
    """Mixes by a fixed decay, with no softmax."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate, self.proj = rate, nn.Linear(WIDTH, WIDTH)

    def matrix(self, tokens: int) -> torch.Tensor:
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        return torch.where(distance >= 0, self.rate ** distance.clamp(min=0), 0.0)

    def forward(self, x):
        return self.proj(self.matrix(x.shape[1]) @ x)


def decay(module, args, kwargs, output):
    (x,) = args
    assert output.shape == x.shape
    return rw.operators.DenseMixing(module.matrix(x.shape[1]).expand(x.shape[0], 1, -1, -1))


def hybrid():
    return nn.Sequential(Block(Attention(plain)), Block(DecayMixer()), nn.LayerNorm(WIDTH)).eval()


def test_sites_by_hand_are_added_to_found_sites():
    model = hybrid()
    with torch.no_grad(), rw.capture(model, sites={"1.attention": decay}) as trace:
        model(hidden())
    assert [(site.name, site.layer, site.kind) for site in trace.mixers] == [
        ("0.attention", 0, "softmax"),
        ("1.attention", 1, "dense"),
    ]
    assert trace.uncaptured == []
    wanted = model[1].attention.matrix(TOKENS)
    assert torch.equal(trace.mixers[1].operator.dense()[0, 0], wanted)
    assert [state.layer for state in trace.states] == [0, 1, 2]


def test_a_site_by_hand_replaces_what_would_be_found_inside_it():
    model = stack_of(depth=2)

    def identity(module, args, kwargs, output):
        eye = torch.eye(args[0].shape[1])
        values = torch.softmax(eye, -1) @ eye  # attention of the function's own is not captured
        return rw.operators.DenseMixing((eye + 0 * values).expand(args[0].shape[0], 1, -1, -1))

    with torch.no_grad(), rw.capture(model, sites={"blocks.1.attention": identity}) as trace:
        model(hidden())
    assert [(site.name, site.kind) for site in trace.mixers] == [
        ("blocks.0.attention", "softmax"),
        ("blocks.1.attention", "dense"),
    ]


def test_a_stock_layer_can_be_a_site_by_hand():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, given = hidden(), []

    def ones(module, args, kwargs, output):
        given.append((type(module).__name__, output.shape))
        tokens = output.shape[1]
        return rw.operators.DenseMixing(torch.ones(BATCH, 1, tokens, tokens) / tokens)

    with torch.no_grad():
        alone = model(x)
        with rw.capture(model, sites={"layers.0": ones}) as trace:
            watched = model(x)
    assert torch.equal(alone, watched)
    assert given == [("TransformerEncoderLayer", x.shape)]
    assert [site.kind for site in trace.mixers] == ["dense", "softmax"]


def test_a_site_that_is_never_called_is_reported():
    model = hybrid()
    with torch.no_grad(), rw.capture(model, sites={"1.attention": decay}) as trace:
        model[0](hidden())
    assert [(module.name, module.reason) for module in trace.uncaptured] == [
        ("1.attention", "never called in this capture")
    ]


def run(model, sites):
    with rw.capture(model, sites=sites):
        model(hidden())


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (torch.eye(3), r"got Tensor \(3, 3\)"),
        (rw.operators.DenseMixing(torch.eye(3)), r"got DenseMixing \(3, 3\)"),
        (None, r"got NoneType\."),
    ],
)
def test_a_site_function_must_return_an_operator_of_four_axes(made, got):
    model = hybrid()
    sites, message = {"1.attention": lambda *call: made}, rf"site '1\.attention'.*\(B, H, T, S\), {got}"
    with unchecked(), torch.no_grad(), pytest.raises(CaptureError, match=message):
        run(model, sites)


def test_an_unknown_site_is_an_error_that_guesses():
    with pytest.raises(InputError, match=r"site '1\.atention'.*Did you mean 1\.attention"):
        rw.capture(hybrid(), sites={"1.atention": decay})


# --- what is unseen -----------------------------------------------------------------------------------------


def test_a_mixer_without_softmax_is_unseen_with_the_way_out():
    model = hybrid()
    trace = seen(model, hidden())
    (uncaptured,) = trace.uncaptured
    assert (uncaptured.name, uncaptured.type) == ("1.attention", "DecayMixer")
    assert "name it in `sites=`" in uncaptured.reason


def test_a_part_that_does_not_run_is_unseen():
    model = nn.ModuleDict({"used": stack_of(depth=1), "spare": stack_of(depth=1)}).eval()
    with torch.no_grad(), rw.capture(model) as trace:
        model["used"](hidden())
    assert [(module.name, module.reason) for module in trace.uncaptured] == [
        ("spare.blocks.0.attention", "never called in this capture")
    ]


MIXERS = [
    *("SelfAttention", "LlamaSdpaAttention", "BertSelfAttention", "CausalSelfAttn", "Mamba2Mixer", "S4D"),
    *("HyenaOperator", "GatedDeltaNet", "RecurrentGemmaRglru", "LSTM", "FNetBasicFourierTransform"),
]
OTHER_MODULES = [
    *("FunnelAttentionStructure", "BertSelfOutput", "AttentionDropout", "AttentionBlock"),
    *("AttentionPooling", "LayerNorm", "MixerMlp"),
]


@pytest.mark.parametrize("name", MIXERS + OTHER_MODULES)
def test_names_that_look_like_mixers(name):
    assert looks_like_mixer(type(name, (nn.Module,), {})()) is (name in MIXERS)


@pytest.mark.parametrize("pair", [("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk")])
def test_projections_that_look_like_mixers(pair):
    module = nn.Module()
    setattr(module, pair[0], nn.Linear(1, 1))
    assert not looks_like_mixer(module)
    setattr(module, pair[1], nn.Linear(1, 1))
    assert looks_like_mixer(module)


# --- errors -------------------------------------------------------------------------------------------------


def test_a_model_without_mixers_is_an_error_that_says_how_to_name_them():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    told = r"model Sequential: expected at least one mixing operator, got none"
    way_out = r"rw\.capture\(model, sites=\{'layers\.0\.mixer': f\}\)"
    with pytest.raises(CaptureError, match=f"{told}.*{way_out}"), rw.capture(model):
        model(hidden())


def test_the_error_names_the_mixers_it_could_not_see_by_their_reason():
    model = Stack(lambda: Block(DecayMixer()), 5).eval()
    names = r"blocks\.0\.attention \(DecayMixer\), blocks\.1\.attention .*, .* and 2 more: called, but"
    with torch.no_grad(), pytest.raises(CaptureError, match=names), rw.capture(model):
        model(hidden())


def test_a_model_that_is_not_called_is_an_error():
    told = r"no call of it or of any of its modules.*Call the captured model itself.*model\(\*\*batch\)"
    with pytest.raises(CaptureError, match=told), rw.capture(stack_of()):
        pass


def test_another_model_than_the_captured_one_is_an_error():
    with pytest.raises(CaptureError, match="no call of it"), rw.capture(stack_of()):
        stack_of()(hidden())


@pytest.mark.parametrize("thing", ["bert-base-uncased", lambda x: x, None])
def test_an_object_other_than_a_module_is_an_error(thing):
    told = rf"expected a torch\.nn\.Module, got {type(thing).__name__}.*`\.model`"
    with unchecked(), pytest.raises(CaptureError, match=told):
        rw.capture(thing)


def test_a_bare_attention_has_no_states_and_a_note():
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval()
    x = hidden()
    trace = seen(attention, x, x, x)
    assert [(site.name, site.layer) for site in trace.mixers] == [("", 0)]
    (note,) = trace.notes
    assert "no token states were found" in note
    assert "`blocks=`" in note
