"""Linear attention and state spaces: the mixers' promises, and the recurrences they are named for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unchecked import unchecked
from torch import nn
from torch.nn import functional as F
from tost_cases import WIDTH, config, stirred, texts

import rankwise as rw
from rankwise.errors import InputError, ShapeError
from rankwise.models import (
    S4D,
    LinearAttention,
    Mamba,
    Mamba2,
    ToSTForCausalLM,
    ToSTForSequenceClassification,
)
from rankwise.models.mixers import build_mixer
from rankwise.models.mixers.convolution import ShortConvolution

# float64, values of order 1, sums over at most 20 tokens, 12 channels, 8 states: rounding stays under 1e-12;
# a Fourier transform's is 1e-16 of the largest entry, at most some 100
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
KINDS = {"linear": "linear", "s4d": "toeplitz", "mamba": "selective", "mamba2": "semiseparable"}


def made(name: str) -> nn.Module:
    """A small one of each kind and option, in float64."""
    builders = {
        "linear": lambda: LinearAttention(WIDTH, 3),
        "linear-narrow": lambda: LinearAttention(WIDTH, 3, feature_dim=2, head_dim=5, bias=False),
        "linear-sums": lambda: LinearAttention(WIDTH, 3, normalized=False),
        "linear-full": lambda: LinearAttention(WIDTH, 3, causal=False),
        "s4d": lambda: S4D(WIDTH, state_dim=3),
        "mamba": lambda: Mamba(WIDTH, state_dim=4),
        "mamba-plain": lambda: Mamba(WIDTH, state_dim=3, expand=1, conv_tokens=1, step_rank=2, bias=False),
        "mamba2": lambda: Mamba2(WIDTH, 3, state_dim=4),
        "mamba2-groups": lambda: Mamba2(WIDTH, 4, head_dim=2, state_dim=3, groups=2, conv_tokens=2),
    }
    torch.manual_seed(0)
    return stirred(builders[name]().double(), scale=0.3)


CAUSAL = ["linear", "linear-narrow", "linear-sums", "s4d", "mamba", "mamba-plain", "mamba2", "mamba2-groups"]
ALL = [*CAUSAL, "linear-full"]


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("count", [1, 7])
def test_the_operator_times_the_values_is_what_is_projected(name: str, count: int) -> None:
    mixer, x = made(name), tokens(2, count)
    operator, values = mixer.mixing_operator(x), mixer.values(x)
    for mixed in (operator @ values, operator.dense() @ values):
        output = mixer.out_proj(mixed.transpose(1, 2).flatten(2))
        torch.testing.assert_close(output, mixer(x).output, **CLOSE)
    assert operator.kind == KINDS[name.split("-")[0]]


@pytest.mark.parametrize("name", CAUSAL)
def test_the_operator_in_the_middle_of_a_text_is_that_of_its_rows(name: str) -> None:
    mixer, x = made(name), tokens(2, 7)
    state = mixer(x[:, :4], return_state=True).state
    operator, values = mixer.mixing_operator(x[:, 4:], None, state), mixer.values(x[:, 4:], None, state)
    whole = mixer.mixing_operator(x) @ mixer.values(x)
    torch.testing.assert_close(operator @ values, whole[:, :, 4:], **CLOSE)
    torch.testing.assert_close(operator.dense() @ values, whole[:, :, 4:], **CLOSE)


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_equal_the_whole(name: str, cuts: list[int], seed: int) -> None:
    mixer, x = made(name), tokens(2, sum(cuts), seed)
    state, pieces = None, []
    for piece in x.split(cuts, 1):
        output, state = mixer(piece, state=state, return_state=True)
        pieces.append(output)
    torch.testing.assert_close(torch.cat(pieces, 1), mixer(x).output, **CLOSE)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", CAUSAL)
def test_padding_anywhere_in_any_piece_is_as_if_it_were_not_there(name: str, data: st.DataObject) -> None:
    """Also between real tokens, and right of them before a text goes on."""
    flags = data.draw(st.lists(st.booleans(), min_size=2, max_size=9).filter(any))
    cut = data.draw(st.integers(1, len(flags) - 1))
    mixer, x, mask = made(name), tokens(2, len(flags)), torch.ones(2, len(flags), dtype=torch.bool)
    mask[0] = torch.tensor(flags)
    alone, whole = mixer(x[:1, mask[0]]).output, mixer(x[1:]).output
    first = mixer(x[:, :cut], mask[:, :cut], return_state=True)
    second = mixer(x[:, cut:], mask[:, cut:], first.state).output
    for output in (mixer(x, mask).output, torch.cat([first.output, second], 1)):
        torch.testing.assert_close(output[:1, mask[0]], alone, **CLOSE)
        torch.testing.assert_close(output[1:], whole, **CLOSE)
        assert output.isfinite().all()


def test_padding_is_no_source_of_bidirectional_attention() -> None:
    mixer, x = made("linear-full"), tokens(1, 6)
    mask = torch.tensor([[False, True, True, False, True, False]])
    output = mixer(x, mask).output
    torch.testing.assert_close(output[:, mask[0]], mixer(x[:, mask[0]]).output, **CLOSE)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(mixer(x[:, order]).output, mixer(x).output[:, order], **CLOSE)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_token_sees_a_later_one(name: str) -> None:
    mixer, x = made(name), tokens(1, 9)
    changed = x.clone()
    changed[:, 5:] += 2.0
    before, after = mixer(x).output, mixer(changed).output
    torch.testing.assert_close(before[:, :5], after[:, :5], **CLOSE)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", CAUSAL)
def test_the_state_has_the_size_it_states_and_is_not_changed_in_place(name: str) -> None:
    mixer = made(name)
    state = mixer(tokens(3, 5), return_state=True).state
    assert sum(tensor.numel() for tensor in state) == 3 * mixer.state_size(5) == 3 * mixer.state_size(10**6)
    assert all(tensor.shape[0] == 3 for tensor in state)
    kept = [tensor.clone() for tensor in state]
    mixer(tokens(3, 2, seed=1), state=state, return_state=True)
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
    assert mixer(tokens(3, 2)).state is None


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_every_parameter(name: str) -> None:
    mixer, x = made(name), tokens(1, 5).requires_grad_()
    mixer(x).output.square().sum().backward()
    assert {n for n, p in mixer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0} == set()
    assert torch.isfinite(x.grad).all()


def test_mamba_is_its_recurrence() -> None:
    """Token by token, as the paper writes it; no operator in sight."""
    mixer, x = made("mamba-plain"), tokens(1, 6)
    read = F.silu(mixer.in_proj(x) * mixer.convolution.weight[:, 0, 0] + mixer.convolution.bias)[0]
    low, b, c = mixer.x_proj(read).split([2, 3, 3], -1)
    step = F.softplus(mixer.step_proj(low))
    state, outputs = torch.zeros(WIDTH, 3, dtype=torch.float64), []
    for t in range(6):
        decay = torch.exp(-step[t, :, None] * mixer.log_rate.exp())
        state = decay * state + (step[t] * read[t])[:, None] * b[t]
        outputs.append(state @ c[t])
    torch.testing.assert_close(mixer(x).output[0], mixer.out_proj(torch.stack(outputs)), **CLOSE)


def test_mamba2_is_its_recurrence() -> None:
    mixer, x = made("mamba2-groups"), tokens(1, 6)
    read, raw = mixer.in_proj(x).split([20, 4], -1)
    past = F.pad(read, (0, 0, 1, 0))[:, :-1]
    weight = mixer.convolution.weight[:, 0]
    read = F.silu(past * weight[:, 0] + read * weight[:, 1] + mixer.convolution.bias)[0]
    value, b, c = read[:, :8].view(6, 4, 2), read[:, 8:14].view(6, 2, 3), read[:, 14:].view(6, 2, 3)
    step = F.softplus(raw[0] + mixer.step_bias)
    state, outputs = torch.zeros(4, 3, 2, dtype=torch.float64), []
    for t in range(6):
        decay = torch.exp(-step[t] * mixer.log_rate.exp())[:, None, None]
        group = [0, 0, 1, 1]
        state = decay * state + step[t, :, None, None] * b[t, group][:, :, None] * value[t][:, None]
        outputs.append((c[t, group][:, None] @ state).flatten())
    torch.testing.assert_close(mixer(x).output[0], mixer.out_proj(torch.stack(outputs)), **CLOSE)


def test_s4d_is_its_recurrence() -> None:
    mixer, x = made("s4d"), tokens(1, 6)
    a = torch.complex(-mixer.log_rate.exp(), mixer.frequency)
    step, read = mixer.log_step.exp()[:, None], torch.view_as_complex(mixer.read)
    held = torch.expm1(a * step) / a
    state, outputs = torch.zeros(WIDTH, 3, dtype=torch.complex128), []
    for value in mixer.v_proj(x)[0]:
        state = (a * step).exp() * state + held * value[:, None]
        outputs.append(2 * (read * state).sum(-1).real)
    torch.testing.assert_close(mixer(x).output[0], mixer.out_proj(torch.stack(outputs)), **CLOSE)


def test_linear_attention_averages_with_positive_features() -> None:
    mixer, x = made("linear"), tokens(1, 5)
    q, k = (F.elu(p(x)[0, :, :4]) + 1 for p in (mixer.q_proj, mixer.k_proj))
    products = (q @ k.T).tril()
    matrix = mixer.mixing_operator(x).dense()[0, 0]
    torch.testing.assert_close(matrix, products / products.sum(-1, keepdim=True), **CLOSE)
    sums = made("linear-sums")
    torch.testing.assert_close(sums.mixing_operator(x).dense()[0, 0], products, **CLOSE)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_a_recurrence_cannot_look_ahead(name: str) -> None:
    wanted = f"the mixer '{name}': expected causal=True, got causal=False. A recurrence runs forward only"
    with pytest.raises(InputError, match=wanted):
        build_mixer(config(layer_types=name, causal=False), 0)


def test_a_mask_of_another_length_is_refused() -> None:
    wanted = "`attention_mask`: expected one value for each token"
    with unchecked(), pytest.raises(ShapeError, match=wanted):
        made("mamba2")(tokens(1, 5), torch.ones(1, 6))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_options_reach_the_mixer(name: str) -> None:
    options = {"linear": {"feature_dim": 7}}.get(name, {"state_dim": 5})
    key, value = next(iter(options.items()))
    mixer = build_mixer(config(layer_types=name, mixer_options={name: options}), 0)
    assert getattr(mixer, key) == value


def model(name: str, **changes) -> ToSTForCausalLM:
    torch.manual_seed(1)
    return stirred(ToSTForCausalLM(config(layer_types=name, **changes)).double(), scale=0.2)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_language_model_is_seen_whole(name: str) -> None:
    lm, ids = model(name), texts(2, 7)
    ids[0, :3] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}
    read = []
    for layer in lm.model.layers:
        layer.mixer.register_forward_pre_hook(lambda mixer, args, kwargs: read.append(args), with_kwargs=True)
    before = lm(**batch).logits
    with rw.capture(lm) as trace:
        after = lm(**batch).logits
    assert torch.equal(before, after)
    assert trace.uncaptured == []
    assert [(site.layer, site.kind) for site in trace.mixers] == [(0, KINDS[name]), (1, KINDS[name])]
    real = batch["attention_mask"].bool()
    for site, layer, args in zip(trace.mixers, lm.model.layers, read, strict=False):
        mixed = site.operator @ layer.mixer.values(*args)
        output = layer.mixer.out_proj(mixed.transpose(1, 2).flatten(2))
        torch.testing.assert_close(output[real], layer.mixer(*args).output[real], **CLOSE)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_generation_with_a_state_equals_generation_without(name: str) -> None:
    lm, ids = model(name), texts(2, 5)
    ids[1, :2] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    fast, slow = (lm.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(fast.sequences, slow.sequences)
    torch.testing.assert_close(torch.stack(fast.logits), torch.stack(slow.logits), **CLOSE)
    sizes = [lm(texts(1, count), use_cache=True).past_key_values.numel() for count in (3, 9)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_saved_models_come_back_the_same(name: str, tmp_path) -> None:
    lm = model(name)
    lm.save_pretrained(tmp_path)
    again = ToSTForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = texts(1, 6)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in lm.state_dict().items())
    torch.testing.assert_close(again(ids).logits, lm(ids).logits, **CLOSE)  # memory may lie otherwise


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_few_steps_lower_the_loss(name: str) -> None:
    torch.manual_seed(0)
    lm, ids = ToSTForCausalLM(config(layer_types=name)), texts(2, 8)
    optimizer = torch.optim.Adam(lm.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = lm(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_half_precision_is_near_single(name: str) -> None:
    """bfloat16 has 8 bits: two layers of rounding leave outputs of order 1 within a tenth."""
    torch.manual_seed(0)
    lm = ToSTForCausalLM(config(layer_types=name)).eval()
    ids = texts(2, 6)
    single = lm(ids, use_cache=False).logits
    half = lm.to(torch.bfloat16)(ids, use_cache=True)
    assert half.logits.dtype == torch.bfloat16
    torch.testing.assert_close(half.logits.float(), single, atol=0.1, rtol=0.1)
    more = lm(texts(2, 1), past_key_values=half.past_key_values)
    assert more.logits.isfinite().all()


def test_a_classifier_of_linear_attention_reads_both_ways() -> None:
    made_of = config(layer_types="linear", causal=False, num_labels=3)
    classifier = stirred(ToSTForSequenceClassification(made_of).double())
    ids = texts(1, 6)
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % 28 + 1
    first, second = (classifier.model(x).last_hidden_state[:, 0] for x in (ids, changed))
    assert (first - second).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_a_model_starts_as_published_not_as_its_linear_layers_do(name: str) -> None:
    torch.manual_seed(0)
    mixer = ToSTForCausalLM(config(layer_types=name)).model.layers[0].mixer
    steps = {
        "mamba": lambda: F.softplus(mixer.step_proj.bias),
        "mamba2": lambda: F.softplus(mixer.step_bias),
        "s4d": lambda: mixer.log_step.exp(),
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
