"""Certificates: their numbers follow from the weights and states of a model, and no bound is broken."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.skips.cases import FOUND
from tests.support.modules import Block, SelfAttention
from tests.support.untouched import untouched
from torch import Tensor, nn

from rankwise.errors import InputError, RecordError, SkipError
from rankwise.measures import absolute_spread as mu
from rankwise.skips import (
    SkipCertificate,
    add_lambda_skip,
    certify_skip,
    skips_of,
)
from rankwise.skips.observe import normed, observe

EPS = (0.0, 1e-12)
"""ε of the input, of which only directions count, and ε of BERT's norms."""
FAMILIES = ["BERT", "GPT-2", "Llama", "Gemma-2", "T5", "ViT", "Mamba", "Mamba-2", "ALBERT", "nanoGPT style"]
gpt2 = hugging_face("GPT2Model", **GPT)
bert = hugging_face("BertModel", **BERT)
llama = hugging_face("LlamaModel", **LLAMA)


# --- bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_no_bound_is_broken_in_any_family(name: str) -> None:
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, example=batch)
    for at, parameter in enumerate(skips.values()):
        parameter.data.fill_((-1) ** at * (0.4 + at))
    certificate = certify_skip(model, batch)
    assert {layer.site for layer in certificate.layers} == set(skips)
    for layer in certificate.layers:
        assert layer.norm == ("LayerNorm" if name in ("BERT", "ALBERT") else "none")
        assert layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio * (1 + 1e-9)
        assert layer.mixing_share >= 0


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_keeps_the_promised_spread_at_the_proved_lambda(name: str) -> None:
    """λ is set in one layer at a time, so that the input of the layer stays the same."""
    model, batch = FOUND[name][0]()
    if name == "ALBERT":
        model.config.num_hidden_layers = model.encoder.config.num_hidden_layers = 1  # its layers share one λ
    skips = add_lambda_skip(model, example=batch)
    places = list(skips.places.values())
    for number, layer in enumerate(certify_skip(model, batch, 0.6).layers):
        if not math.isfinite(layer.min_lambda_proved):
            continue
        for factor in (1.0, -1.3):
            scales = dict.fromkeys(skips, 1.0) | {layer.site: factor * layer.min_lambda_proved}
            added = observe(model, batch, places, scales)[number]
            ends = [added.x.double(), added.total.double()]
            if layer.norm != "none":
                pairs = zip(ends, EPS, strict=True)
                ends = [normed(rows, layer.norm == "LayerNorm", eps) for rows, eps in pairs]
            before, after = (mu(x, added.mask) for x in ends)
            assert (after >= 0.6 * before * (1 - 1e-5)).all()  # sums are computed in float32


def test_nothing_is_proved_for_a_lambda_of_0() -> None:
    model = gpt2()
    with pytest.warns(UserWarning, match="λ = 0"):
        add_lambda_skip(model, init=0.0, sites="h.1")
    certificate = certify_skip(model, text_inputs())
    layer = certificate.layers[0]
    assert (layer.site, layer.lambda_value, layer.absolute_spread_ratio_bound) == ("h.1.attn", 0.0, 0.0)
    assert any("λ = 0 somewhere" in note for note in certificate.notes)


# --- λ per channel ---------------------------------------------------------------------------------------


WIDTH = 8
SIGNS = torch.tensor([1.0, -1.0] * 4)


def post_norm(size: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    layer.self_attn.out_proj.weight.data.mul_(size)
    return layer


def certified(model: nn.Module, scales: Tensor, x: Tensor) -> SkipCertificate:
    (skip,) = add_lambda_skip(model, per="channel", example=torch.randn(2, 5, WIDTH)).values()
    skip.data.copy_(scales)
    return certify_skip(model, x)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    centre=st.sampled_from([0.0, 0.5, 1.0, -3.0]),
    apart=st.sampled_from([0.01, 0.3, 3.0, 1e3]),
    flips=st.sampled_from([0.0, 0.2, 0.5]),
    like_signs=st.booleans(),
)
def test_the_bound_after_a_norm_holds(
    seed: int, centre: float, apart: float, flips: float, like_signs: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = centre + apart * torch.randn(WIDTH, generator=generator)
    scales *= torch.where(torch.rand(WIDTH, generator=generator) < flips, -1.0, 1.0)
    x = torch.randn(2, 5, WIDTH, generator=generator)
    if like_signs:  # λ∘x is then nearly constant over channels, and centering removes it
        x = 0.01 * x + x[..., :1] * scales.sign()
    layer = certified(post_norm(0.001), scales, x).layers[0]
    assert layer.norm == "LayerNorm"
    assert layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio * (1 + 1e-5)
    assert layer.min_lambda_proved is layer.min_lambda_proved_relative is None


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), largest=st.sampled_from([1.0, 3.0, 1e3]))
def test_without_a_norm_each_channel_may_have_any_larger_lambda(seed: int, largest: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    block, x = Block(SelfAttention(), before=nn.LayerNorm(WIDTH)), torch.randn(2, 5, WIDTH)
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH)).eval()
    (skip,) = add_lambda_skip(model, per="channel", example=x).values()
    least = certify_skip(model, x).layers[0].min_lambda_proved
    factors = 1 + (largest - 1) * torch.rand(WIDTH, generator=generator)
    skip.data.copy_(least * (1 + 1e-5) * factors * SIGNS)
    layer = certify_skip(model, x).layers[0]
    assert layer.norm == "none"
    assert layer.absolute_spread_ratio >= math.sqrt(0.5)
    assert layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio * (1 + 1e-5)
    assert layer.min_lambda_proved == pytest.approx(least)
    assert layer.min_lambda_proved_relative is None


def test_a_bound_is_small_if_centering_removes_the_scaled_states() -> None:
    x = torch.tensor([1.0, -1, 1, -1, 1])[None, :, None] * SIGNS + 0.001 * torch.randn(1, 5, WIDTH)
    layer = certified(post_norm(0.001), SIGNS, x).layers[0]
    assert layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio < 0.5


def test_one_large_channel_makes_tokens_similar_after_a_norm() -> None:
    x = torch.randn(2, 6, WIDTH)
    x[..., 0] = x[..., 0].abs() + 1
    least = certified(post_norm(), torch.ones(WIDTH), x).layers[0].min_lambda_proved
    scales = torch.full((WIDTH,), 1.01 * least)
    scales[0] = 1e4
    certificate = certified(post_norm(), scales, x)
    assert certificate.layers[0].absolute_spread_ratio < 0.01
    assert certificate.layers[0].min_lambda_proved is None
    assert any("no single least |λ|" in note for note in certificate.notes)


def test_nearly_equal_channels_have_a_useful_bound() -> None:
    layer = certified(post_norm(), torch.linspace(9.0, 11.0, WIDTH), torch.randn(2, 5, WIDTH)).layers[0]
    assert layer.lambda_value == 9
    assert 0.5 < layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio


@pytest.mark.parametrize("scale", [2.0, -0.7])
def test_equal_channels_have_the_certificate_of_one_lambda(scale: float) -> None:
    model, x = post_norm(), torch.randn(2, 5, WIDTH)
    add_lambda_skip(model, init=scale, example=x)
    assert certified(post_norm(), torch.full((WIDTH,), scale), x) == certify_skip(model, x)


# --- numbers ---------------------------------------------------------------------------------------------


def test_padding_does_not_change_the_numbers() -> None:
    model, batch = bert(), text_inputs()
    ids = torch.cat([batch["input_ids"], torch.full((2, 3), 7)], 1)
    longer = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 12 + [0] * 3] * 2)}
    plain, padded = certify_skip(model, batch), certify_skip(model, longer)
    for one, other in zip(plain.layers, padded.layers, strict=True):
        for name, value in one.model_dump().items():
            close = value if isinstance(value, str | bool | None) else pytest.approx(value, rel=1e-3)
            assert getattr(other, name) == close


@pytest.mark.parametrize("padded", [True, False])
def test_padding_that_counts_as_tokens_is_noted(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 4] = padded
    notes = certify_skip(layer, {"src": torch.randn(2, 5, 8), "src_key_padding_mask": mask}).notes
    assert any("`src_key_padding_mask` of the batch marks padding" in note for note in notes) == padded


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_mu_that_is_the_norm_of_one_token_is_noted(size: float) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 9, 8)
    x[:, 3] *= size
    certificate = certify_skip(layer, x)
    (skip,) = certificate.layers
    y = x.double() + certify_branch(layer, x)
    apart = (y - y.mean(1, keepdim=True)).square().sum(-1)
    share = (apart.amax(1) / apart.sum(1)).max().item()
    assert skip.largest_token_share == pytest.approx(share, rel=1e-5)
    assert any("one token has more than half of μ²" in note for note in certificate.notes) == (size > 1)


def certify_branch(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    """Return the output of the self-attention of a pre-norm layer."""
    with torch.no_grad():
        read = layer.norm1(x)
        return layer.self_attn(read, read, read, need_weights=False)[0].double()


def test_sums_have_the_same_names_for_one_sequence_and_for_several() -> None:
    """Words + positions is a sum of states of one shape only if the batch has one sequence."""
    model = gpt2()
    add_lambda_skip(model)  # the example has one sequence
    assert certify_skip(model, text_inputs()) == certify_skip(gpt2(), text_inputs())


def test_the_model_does_not_change() -> None:
    batch = text_inputs()
    for model in (gpt2().train(), gpt2()):
        if model.training:
            add_lambda_skip(model, init=0.5)
        with untouched(model):
            certificate = certify_skip(model, batch)
        value = 0.5 if model.training else 1.0  # λ of plain residual connections
        assert [layer.lambda_value for layer in certificate.layers] == [value] * 3
        assert len(skips_of(model)) == (3 if model.training else 0)


def test_a_cache_in_the_batch_is_the_same_in_every_pass() -> None:
    model, ids = gpt2(), text_inputs()["input_ids"]
    with torch.no_grad():
        batch = {
            "input_ids": ids[:, 6:],
            "past_key_values": model(ids[:, :6], use_cache=True).past_key_values,
        }
    certificates = [certify_skip(model, batch) for _ in range(2)]
    add_lambda_skip(model, example=batch)
    assert certificates == [certify_skip(model, batch)] * 2
    assert batch["past_key_values"].get_seq_length() == 6


# --- files and refusals ----------------------------------------------------------------------------------


CONSTANT = torch.full((1, 12), 7)


def test_a_saved_certificate_is_loaded_with_infinity(tmp_path: Path) -> None:
    certificate = certify_skip(llama(), {"input_ids": CONSTANT}, keep_spread=0.5)
    assert certificate.layers[0].absolute_spread_ratio == math.inf  # equal tokens have no spread to keep
    path = certificate.save(tmp_path)
    assert path == tmp_path / "certificate.json"
    assert "Certificate of λ-skips" in certificate.to_html(tmp_path).read_text()
    assert SkipCertificate.load(path) == SkipCertificate.load(tmp_path) == certificate
    for content in ("[]", "{", '{"layers": 3}', '{"format": "rankwise-audit"}'):
        path.write_text(content)
        with pytest.raises(RecordError, match="certificate"):
            SkipCertificate.load(path)


def test_a_model_without_residual_mixers_has_an_empty_certificate() -> None:
    certificate = certify_skip(nn.Linear(4, 4), torch.randn(1, 3, 4))
    assert certificate.layers == []
    assert certificate.notes[0].startswith("residual connections around mixers: none")


def skipped(build: Callable[..., nn.Module], name: str = "", value: float = math.nan) -> nn.Module:
    """Return a model with λ-skips, in which all entries of a parameter have a value."""
    model = build()
    add_lambda_skip(model)
    if name:
        model.get_parameter(name).data.fill_(value)
    return model


IDS, LAMBDA = text_inputs(), "encoder.layer.0.attention.output.dropout.lambda_skip"
PADDING = IDS | {"attention_mask": torch.tensor([[1] * 12, [0] * 12])}
ONE = {"input_ids": IDS["input_ids"][:, :1]}
EMBEDDING = "embed_tokens.weight"
OUT = "layers.1.self_attn.o_proj.weight"
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "sequence of padding": (bert, PADDING, "`attention_mask` of the batch: .*1 of 2 sequences"),
    "one token": (partial(skipped, bert), ONE, "`batch`: expected two real tokens in a sequence, or more"),
    "one token, no λ": (bert, ONE, "`batch`: expected two real tokens in a sequence, or more, got one at"),
    "NaN as λ": (partial(skipped, bert, LAMBDA), IDS, "λ of 'encoder.layer.0.*expected finite numbers"),
    "NaN in the states": (partial(skipped, llama, EMBEDDING), IDS, "'layers.0.self_attn'.*in the residual"),
    "infinity in a mixer": (partial(skipped, llama, OUT, math.inf), IDS, "layers.1.*in the output of the"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_or_batch_that_cannot_be_certified_is_refused(name: str) -> None:
    build, batch, message = REFUSED[name]
    with pytest.raises(SkipError, match=message):
        certify_skip(build(), batch)


@pytest.mark.parametrize("share", [0.0, 1.0, math.nan])
def test_a_share_outside_of_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(InputError, match=r"`keep_spread`: expected a number in \(0, 1\)"):
        certify_skip(bert(), IDS, keep_spread=share)
