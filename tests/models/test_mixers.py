"""Every mixer: pieces equal the whole, padding changes nothing, operators are exact, recurrences hold."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unchecked import unchecked
from torch.nn import functional as F
from tost_cases import BOTH_WAYS, CAUSAL, HEADS, VARIANTS, WIDTH, config, mixer, stirred, texts
from transformers import AutoModelForCausalLM

import rankwise as rw
from rankwise.errors import InputError, ShapeError
from rankwise.models import (
    MIXERS,
    Mixer,
    SoftmaxAttention,
    TokenStatisticsAttention,
    ToSTForCausalLM,
    ToSTForImageClassification,
)
from rankwise.models.mixers import RecurrentMixer, build_mixer
from rankwise.models.mixers.recurrent import ShortConvolution

# float64, values of order 1, sums over at most 24 tokens, 12 channels, 8 states: rounding stays under 1e-12;
# a Fourier transform's is 1e-16 of the largest entry, at most some 100
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
KINDS = {
    "tssa": "diagonal", "tssa-scan": "sum", "tssa-both": "sum", "softmax": "softmax", "linear": "linear",
    "s4d": "toeplitz", "mamba": "selective", "mamba2": "semiseparable",
}  # fmt: skip
causal_ones = pytest.mark.parametrize("name", CAUSAL)
every_one = pytest.mark.parametrize("name", [*CAUSAL, *BOTH_WAYS])


def kind_of(name: str) -> str:
    plain = name.split(",")[0].split("-")[0]
    assert plain in KINDS, f"KINDS of this file: expected the kind of operator of the mixer {plain!r}"
    return KINDS.get(name, KINDS[plain])


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@every_one
def test_the_output_is_the_projection_of_operator_times_values(name: str) -> None:
    one = mixer(name)
    for x in (tokens(2, 1), tokens(2, 7)):
        operator, values = one.mixing_operator(x), one.mixing_values(x)
        for mixed in (operator @ values, operator.dense() @ values):
            output = one.out_proj(mixed.transpose(1, 2).flatten(2))
            torch.testing.assert_close(output, one(x).output, **CLOSE)
        assert operator.kind == kind_of(name)


@causal_ones
def test_a_state_continues_the_rows_of_the_operator(name: str) -> None:
    one, x = mixer(name), tokens(2, 7)
    state = one(x[:, :4], return_state=True).state
    operator, values = one.mixing_operator(x[:, 4:], None, state), one.mixing_values(x[:, 4:], None, state)
    whole = one.mixing_operator(x) @ one.mixing_values(x)
    torch.testing.assert_close(operator @ values, whole[:, :, 4:], **CLOSE)
    torch.testing.assert_close(operator.dense() @ values, whole[:, :, 4:], **CLOSE)


@causal_ones
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_pieces_equal_the_whole(name: str, cuts: list[int], seed: int) -> None:
    one, x = mixer(name), tokens(2, sum(cuts), seed)
    state, pieces = None, []
    for piece in x.split(cuts, 1):
        output, state = one(piece, state=state, return_state=True)
        pieces.append(output)
    torch.testing.assert_close(torch.cat(pieces, 1), one(x).output, **CLOSE)


@causal_ones
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_padding_anywhere_in_any_piece_is_as_if_it_were_not_there(name: str, data: st.DataObject) -> None:
    """Also between real tokens, and right of them before a text continues."""
    flags = data.draw(st.lists(st.booleans(), min_size=2, max_size=9).filter(any))
    cut = data.draw(st.integers(1, len(flags) - 1))
    one, x, mask = mixer(name), tokens(2, len(flags)), torch.ones(2, len(flags), dtype=torch.bool)
    mask[0] = torch.tensor(flags)
    x[0, ~mask[0]] *= 7.0
    alone, whole = one(x[:1, mask[0]]).output, one(x[1:]).output
    first = one(x[:, :cut], mask[:, :cut], return_state=True)
    second = one(x[:, cut:], mask[:, cut:], first.state).output
    for output in (one(x, mask).output, torch.cat([first.output, second], 1)):
        torch.testing.assert_close(output[:1, mask[0]], alone, **CLOSE)
        torch.testing.assert_close(output[1:], whole, **CLOSE)
        assert output.isfinite().all()


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_padding_does_not_reach_bidirectional_mixing(name: str) -> None:
    rows = ["000111111", "111111000", "001111110", "011010111", "111111111"]
    one, x, mask = mixer(name), tokens(5, 9), torch.tensor([[float(flag) for flag in row] for row in rows])
    output = one(x, mask).output
    for row, real in enumerate(mask.bool()):
        alone = one(x[row : row + 1, real]).output
        torch.testing.assert_close(output[row : row + 1, real], alone, **CLOSE)
    assert output.isfinite().all()


@pytest.mark.parametrize("name", [name for name in CAUSAL if name.startswith("tssa")])
def test_values_of_padding_do_not_matter(name: str) -> None:
    one, x = mixer(name), tokens(1, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    real, holes = mask.bool(), x.masked_fill(mask[..., None] == 0, torch.nan)
    torch.testing.assert_close(one(holes, mask).output[real], one(x, mask).output[real], **CLOSE)


@pytest.mark.parametrize("name", [name for name in BOTH_WAYS if "rotary" not in name])
def test_bidirectional_mixers_have_no_order(name: str) -> None:
    one, x = mixer(name), tokens(1, 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(one(x[:, order]).output, one(x).output[:, order], **CLOSE)


@causal_ones
def test_the_state_has_the_size_it_states_and_is_not_changed_in_place(name: str) -> None:
    one = mixer(name)
    for count in (1, 5):
        state = one(tokens(3, count), return_state=True).state
        assert sum(tensor.numel() for tensor in state) == 3 * one.state_size(count)
        assert all(tensor.shape[0] == 3 for tensor in state)
        kept = [tensor.clone() for tensor in state]
        one(tokens(3, 2, seed=1), state=state, return_state=True)
        assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
    assert (one.state_size(1) == one.state_size(1_000_000)) == (not name.startswith("softmax"))
    assert one(tokens(3, 2)).state is None


@every_one
def test_gradients_reach_every_parameter(name: str) -> None:
    one, x = mixer(name), tokens(1, 5).requires_grad_()
    one(x).output.square().sum().backward()
    still = {n for n, p in one.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    # a bias of keys shifts all logits of a row by one number
    assert still <= ({"k_proj.bias"} if name.startswith("softmax") else set())
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", ["softmax", "softmax, both ways"])
def test_no_row_of_softmax_is_empty(name: str) -> None:
    """Backends differ in the output of a query without keys."""
    x, mask = tokens(2, 5), torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    matrix = mixer(name).mixing_operator(x, mask).dense()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, HEADS, 5, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(matrix[1], torch.eye(5, dtype=torch.float64).expand(HEADS, -1, -1), **CLOSE)


def gains(name: str, seed: int) -> torch.Tensor:
    """Return the factor per channel that the last token, the same in all texts, has before out_proj."""
    one, x = mixer(name), tokens(1, 7, seed)
    x[:, -1] = tokens(1, 1, seed=9)[:, 0]
    mixed = (one.mixing_operator(x) @ one.mixing_values(x)).transpose(1, 2)[0, -1]
    return mixed / one.mixing_projection(x)[0, -1]


@pytest.mark.parametrize("name", ["tssa", "tssa-bias", "tssa-decayed"])
def test_in_tssa_the_past_decides_how_much_of_a_token_is_kept_and_nothing_else(name: str) -> None:
    """No content moves: each channel of w is multiplied by a number from -1 to 0, whatever came before."""
    of_pasts = torch.stack([gains(name, seed) for seed in range(8)])
    assert (of_pasts <= 0).all()
    assert (of_pasts >= -1).all()
    assert of_pasts.std(0).max() > 1e-3


@pytest.mark.parametrize("name", ["tssa-scan", "tssa-both"])
def test_a_scan_moves_content(name: str) -> None:
    assert max(gains(name, seed).max() for seed in range(8)) > 0.05


def test_membership_and_subspaces() -> None:
    one, x = mixer("tssa"), tokens(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    share = one.memberships(x, mask)
    torch.testing.assert_close(share.sum(-1), mask.double(), **CLOSE)
    torch.testing.assert_close(one.mixing_projection(x).flatten(2), one.in_proj(x), **CLOSE)
    assert one.mixing_projection(x).shape == (2, 5, HEADS, WIDTH // HEADS)


def test_mamba_is_its_recurrence() -> None:
    """Token by token, as the paper writes it; no operator in sight."""
    one, x = mixer("mamba-plain"), tokens(1, 6)
    read = F.silu(one.in_proj(x) * one.convolution.weight[:, 0, 0] + one.convolution.bias)[0]
    low, b, c = one.x_proj(read).split([2, 3, 3], -1)
    step = F.softplus(one.step_proj(low))
    state, outputs = torch.zeros(WIDTH, 3, dtype=torch.float64), []
    for t in range(6):
        decay = torch.exp(-step[t, :, None] * one.log_rate.exp())
        state = decay * state + (step[t] * read[t])[:, None] * b[t]
        outputs.append(state @ c[t])
    torch.testing.assert_close(one(x).output[0], one.out_proj(torch.stack(outputs)), **CLOSE)


def test_mamba2_is_its_recurrence() -> None:
    one, x = mixer("mamba2-groups"), tokens(1, 6)
    read, raw = one.in_proj(x).split([20, 4], -1)
    past = F.pad(read, (0, 0, 1, 0))[:, :-1]
    weight = one.convolution.weight[:, 0]
    read = F.silu(past * weight[:, 0] + read * weight[:, 1] + one.convolution.bias)[0]
    value, b, c = read[:, :8].view(6, 4, 2), read[:, 8:14].view(6, 2, 3), read[:, 14:].view(6, 2, 3)
    step = F.softplus(raw[0] + one.step_bias)
    state, outputs = torch.zeros(4, 3, 2, dtype=torch.float64), []
    for t in range(6):
        decay = torch.exp(-step[t] * one.log_rate.exp())[:, None, None]
        group = [0, 0, 1, 1]
        state = decay * state + step[t, :, None, None] * b[t, group][:, :, None] * value[t][:, None]
        outputs.append((c[t, group][:, None] @ state).flatten())
    torch.testing.assert_close(one(x).output[0], one.out_proj(torch.stack(outputs)), **CLOSE)


def test_s4d_is_its_recurrence() -> None:
    one, x = mixer("s4d"), tokens(1, 6)
    a = torch.complex(-one.log_rate.exp(), one.frequency)
    step, read = one.log_step.exp()[:, None], torch.view_as_complex(one.read)
    held = torch.expm1(a * step) / a
    state, outputs = torch.zeros(WIDTH, 3, dtype=torch.complex128), []
    for value in one.v_proj(x)[0]:
        state = (a * step).exp() * state + held * value[:, None]
        outputs.append(2 * (read * state).sum(-1).real)
    torch.testing.assert_close(one(x).output[0], one.out_proj(torch.stack(outputs)), **CLOSE)


def test_linear_attention_averages_with_positive_features() -> None:
    one, x = mixer("linear"), tokens(1, 5)
    q, k = (F.elu(p(x)[0, :, :4]) + 1 for p in (one.q_proj, one.k_proj))
    products = (q @ k.T).tril()
    matrix = one.mixing_operator(x).dense()[0, 0]
    torch.testing.assert_close(matrix, products / products.sum(-1, keepdim=True), **CLOSE)
    sums = mixer("linear-sums")
    torch.testing.assert_close(sums.mixing_operator(x).dense()[0, 0], products, **CLOSE)


@pytest.mark.parametrize("name", sorted(name for name in MIXERS if issubclass(MIXERS[name], RecurrentMixer)))
def test_a_recurrence_cannot_look_ahead(name: str) -> None:
    wanted = f"the mixer '{name}': expected causal=True, got causal=False. A recurrence runs forward only"
    with pytest.raises(InputError, match=wanted):
        build_mixer(config(layer_types=name, causal=False), 0)


@pytest.mark.parametrize("name", ["tssa", "softmax", "mamba2"])
def test_a_mask_of_another_length_is_refused(name: str) -> None:
    wanted = r"`attention_mask`: expected one value for each token, \(1, 5\), got \(1, 6\)"
    with unchecked(), pytest.raises(ShapeError, match=wanted):
        mixer(name)(tokens(1, 5), torch.ones(1, 6))


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_options_reach_the_mixer(name: str) -> None:
    known = inspect.signature(MIXERS[name]).parameters
    own = [option for option in ("state_dim", "feature_dim", "query_dim", "head_dim") if option in known][:1]
    options = {"dropout": 0.25} | dict.fromkeys(own, 2)
    made = build_mixer(config(layer_types=name, mixer_options={name: options}), 0)
    assert isinstance(made, MIXERS[name])
    assert made.dropout.p == 0.25
    assert all(getattr(made, option) == 2 for option in own)


VALUES = {
    "num_heads": [1], "head_dim": [2], "causal": [True], "bias": [False], "dropout": [0.0, 0.5],
    "max_positions": [0, 24], "membership": ["softmax"], "half_life": [[2, None, 9.0], 4],
    "conv_tokens": [1, 3], "features": [2], "impl": ["reference"], "query_dim": [2],
    "rotary_base": [50.0, 1e4], "feature_dim": [2], "normalized": [False], "state_dim": [3], "expand": [1],
    "step_rank": [2], "groups": [3],
}  # fmt: skip
"""Values of each option of a mixer."""
ALL_OPTIONS = [
    (name, option, value)
    for name in sorted(MIXERS)
    for option in list(inspect.signature(MIXERS[name]).parameters)[1:]
    for value in VALUES[option]
]


@pytest.mark.parametrize(("name", "option", "value"), ALL_OPTIONS, ids=str)
def test_every_option_is_saved_and_loaded(name: str, option: str, value, tmp_path) -> None:
    """`from_pretrained` builds a model on the device meta, in the dtype of the file.

    float16 has both the rounding and the range in which a number made in another dtype shows.
    """
    made, dtype = config(layer_types=name, mixer_options={name: {option: value}}), torch.float16
    lm, ids = stirred(ToSTForCausalLM(made), scale=0.2).to(dtype), texts(1, 5)
    lm.save_pretrained(tmp_path)
    again = ToSTForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert again.dtype == dtype
    assert torch.equal(again(ids).logits, lm(ids).logits)
    with torch.device("meta"):
        empty = ToSTForCausalLM(made).to(dtype)
        assert empty(ids.to("meta"), attention_mask=ids.to("meta")).logits.shape == (1, 5, 29)
    start = AutoModelForCausalLM.from_config(made, dtype=dtype)
    assert all(weight.isfinite().all() for weight in start.parameters())


def test_the_protocol_cannot_be_half_kept() -> None:
    class Half(Mixer):
        def forward(self, hidden_states, attention_mask=None, state=None, *, return_state=False):
            return hidden_states

    with pytest.raises(TypeError, match="abstract method"):
        Half()


@pytest.mark.parametrize("name", ["tssa", "softmax"])
def test_a_mask_that_is_added_to_scores_is_refused(name: str) -> None:
    added = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1e9]])
    with pytest.raises(InputError, match=r"`attention_mask`: expected 1 .or true. for real tokens"):
        mixer(name)(tokens(1, 5), added)


SIZES = [
    ({"hidden_size": 10}, "heads: expected a number that divides the width 10, got 3"),
    ({"num_heads": 0}, "`num_heads`: expected a whole number of at least 1, got 0"),
    ({"head_dim": 0}, "`head_dim`: expected a whole number of at least 1, got 0"),
    ({"dropout": 2.0}, r"`dropout`: expected a number in \[0, 1\], got 2.0"),
]


@pytest.mark.parametrize("name", ["tssa", "softmax", "linear", "mamba2"])
def test_sizes_that_cannot_be_are_refused(name: str) -> None:
    for changes, match in SIZES:
        with pytest.raises(InputError, match=match):
            MIXERS[name](**{"hidden_size": WIDTH, "num_heads": HEADS, **changes})


OPTIONS = {
    "impl": ({"impl": "cppu"}, r"`impl`.* got 'cppu'. Did you mean cpu"),
    "half-lives": ({"half_life": [1.0, 2.0]}, "`half_life`.* one for each of 3 heads"),
    "half-life 0": ({"half_life": [1.0, 2.0, 0.0]}, "`half_life`.* numbers of tokens above 0"),
    "half-lives both ways": ({"half_life": [1.0] * 3, "causal": False}, "`half_life`: expected causal=True"),
    "convolution both ways": ({"conv_tokens": 4, "causal": False}, "`conv_tokens`: expected 0, or more with"),
    "scan both ways": ({"features": 4, "causal": False}, "`features`: expected 0, or more with causal=True"),
    "fewer than no features": ({"features": -1}, "`features`: expected 0.* got -1"),
    "positions both ways": (
        {"max_positions": 5, "causal": False},
        "`max_positions`: expected 0, or more with",
    ),
}


@pytest.mark.parametrize("case", sorted(OPTIONS))
def test_options_that_cannot_be_are_refused(case: str) -> None:
    changes, match = OPTIONS[case]
    with pytest.raises(InputError, match=match):
        TokenStatisticsAttention(WIDTH, HEADS, **{"causal": True, **changes})


def test_rotary_scores_see_distances_alone() -> None:
    one, x = mixer("softmax-rotary"), tokens(1, 1)
    logs = one.mixing_operator(x.expand(-1, 7, -1)).dense().log()[0]  # logits of one repeated token
    scores = logs - logs.diagonal(0, 1, 2)[..., None]
    for distance in (1, 2, 3):
        values = scores.diagonal(-distance, 1, 2)
        torch.testing.assert_close(values, values[:, :1].expand_as(values), **CLOSE)
    assert (scores[:, 6, 5] - scores[:, 6, 3]).abs().max() > 1e-3


def test_rotary_positions_need_pairs() -> None:
    with pytest.raises(InputError, match="even width, got 3"):
        SoftmaxAttention(WIDTH, HEADS, query_dim=3, rotary_base=50.0)
    for base in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="expected a number in"):
            SoftmaxAttention(WIDTH, HEADS, query_dim=4, rotary_base=base)


def test_rotary_positions_count_real_tokens() -> None:
    one, x = mixer("softmax-rotary"), tokens(1, 6)
    real = [0, 1, 3, 4, 5]
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    torch.testing.assert_close(one(x, mask).output[:, real], one(x[:, real]).output, **CLOSE)
    begun = one(x[:, :3], mask[:, :3], return_state=True).state
    rest = one(x[:, 3:], mask[:, 3:], begun).output
    torch.testing.assert_close(rest, one(x[:, real]).output[:, 2:], **CLOSE)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_a_model_starts_as_published_not_as_its_linear_layers_do(name: str) -> None:
    torch.manual_seed(0)
    one = ToSTForCausalLM(config(layer_types=name)).model.layers[0].mixer
    steps = {
        "mamba": lambda: F.softplus(one.step_proj.bias),
        "mamba2": lambda: F.softplus(one.step_bias),
        "s4d": lambda: one.log_step.exp(),
    }[name]()
    # in float32 the way to a bias and back loses up to 1e-4 of a step of 0.001
    assert 0.00099 < steps.min() < steps.max() < 0.1001
    assert steps.max() > 2 * steps.min()


@pytest.mark.parametrize("reach", [1, 4])
def test_the_short_convolution_sees_real_tokens_alone(reach: int) -> None:
    torch.manual_seed(0)
    convolution, x = ShortConvolution(3, reach).double(), tokens(1, 6)[..., :3]
    mask = torch.tensor([[True, False, True, True, False, True]])
    output, state = convolution(x, mask)
    alone, last = convolution(x[:, mask[0]])
    torch.testing.assert_close(output[:, mask[0]], alone, **CLOSE)
    assert torch.equal(state, last)


@pytest.mark.parametrize("variant", VARIANTS)
def test_capture_sees_a_language_model_whole(variant: str) -> None:
    lm, ids = stirred(ToSTForCausalLM(config(**VARIANTS[variant])).double(), scale=0.2), texts(2, 7)
    ids[0, :3] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}
    read = []
    for layer in lm.model.layers:
        layer.mixer.register_forward_pre_hook(lambda _, args, kwargs: read.append(args), with_kwargs=True)
    before = lm(**batch).logits
    with rw.capture(lm) as trace:
        after = lm(**batch).logits
    assert torch.equal(before, after)
    assert trace.uncaptured == []
    kinds = KINDS | ({"tssa": "sum"} if variant == "scanned" else {})
    assert [site.kind for site in trace.mixers] == [kinds[name] for name in lm.config.layer_types]
    assert [site.layer for site in trace.mixers] == [0, 1]
    assert [state.layer for state in trace.states] == [0, 1, 2]
    for site, layer, args in zip(trace.mixers, lm.model.layers, read, strict=False):
        mixed = site.operator @ layer.mixer.mixing_values(*args)
        output = layer.mixer.out_proj(mixed.transpose(1, 2).flatten(2))
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(output[real], layer.mixer(*args).output[real], **CLOSE)


def test_capture_sees_an_image_classifier_as_one_stack() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "patch_size": 8, "causal": False, "num_labels": 3}
    made = stirred(ToSTForImageClassification(config(**sizes)).double(), scale=0.2)
    with rw.capture(made) as trace:
        made(torch.randn(2, 3, 16, 24, dtype=torch.float64))
    assert trace.uncaptured == []
    found = [(site.layer, site.kind, tuple(site.operator.shape)) for site in trace.mixers]
    patches, one = (2, 4, 6, 6), (2, 4, 1, 7)
    assert found == [
        (0, "diagonal", patches),
        (1, "diagonal", patches),
        (2, "softmax", one),
        (3, "softmax", one),
    ]
