"""Certificates: numbers checked against the model's own weights and runs, bounds against what happens."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND
from torch import nn

from rankwise.errors import RankwiseError, RecordError
from rankwise.measures import token_spread
from rankwise.skips import SkipCertificate, SkipError, add_lambda_skip, certify_skip, skips_of
from rankwise.skips.observe import normed, observe, sites_in
from rankwise.tracing import capture

EPS = (0.0, 1e-12)
"""Of what is read, whose directions count, and of BERT's norms."""
FAMILIES = ["BERT", "GPT-2", "Llama", "Gemma-2", "T5", "ViT", "Mamba", "Mamba-2", "ALBERT", "nanoGPT style"]
gpt2 = hugging_face("GPT2Model", **GPT)
bert = hugging_face("BertModel", **BERT)
llama = hugging_face("LlamaModel", **LLAMA)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_bound_is_broken_in_any_family(name: str) -> None:
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, example=batch)
    with torch.no_grad():
        for at, parameter in enumerate(skips.values()):
            parameter.fill_((-1) ** at * (0.4 + at))
    certificate = certify_skip(model, batch)
    assert {layer.site for layer in certificate.layers} == set(skips)
    for layer in certificate.layers:
        assert layer.kept_lower_bound <= layer.kept * (1 + 1e-9)
        assert layer.mixing_share >= 0
        if layer.min_lambda_any_mixing is not None:
            assert layer.min_lambda_proved <= layer.min_lambda_any_mixing * (1 + 1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_keeps_what_the_sound_scale_promises(name: str) -> None:
    """λ set to it in one layer at a time, so that the layer reads what it read before."""
    model, batch = FOUND[name][0]()
    if name == "ALBERT":
        model.config.num_hidden_layers = model.encoder.config.num_hidden_layers = 1  # its layers share one λ
    skips = add_lambda_skip(model, example=batch)
    sites = list(skips.sites.values())
    a = 0.36
    for number, layer in enumerate(certify_skip(model, batch, a).layers):
        if not math.isfinite(layer.min_lambda_proved):
            continue
        for factor in (1.0, -1.3):
            scales = dict.fromkeys(skips, 1.0) | {layer.site: factor * layer.min_lambda_proved}
            added = observe(model, batch, sites, scales)[number]
            ends = [added.x.double(), added.total.double()]
            if layer.norm != "none":
                ends = [
                    normed(rows, layer.norm == "LayerNorm", eps) for rows, eps in zip(ends, EPS, strict=True)
                ]
            before, after = (token_spread(x, added.mask, normalized=False) for x in ends)
            assert (after >= math.sqrt(a) * before * (1 - 1e-5)).all()  # sums are taken in float32


def test_value_weights_of_gpt2_are_its_own() -> None:
    model = gpt2()
    layer = certify_skip(model, text_inputs()).layers[1]
    attention = model.h[1].attn
    values, out = attention.c_attn.weight[:, 64:], attention.c_proj.weight
    heads = [values[:, 8 * h : 8 * h + 8] @ out[8 * h : 8 * h + 8] for h in range(4)]
    assert layer.value_norm == pytest.approx(math.sqrt(sum(float(c.square().sum()) for c in heads)), rel=1e-5)


def test_value_weights_of_grouped_heads_are_their_own() -> None:
    model = llama()
    layer = certify_skip(model, text_inputs()).layers[2]
    attention = model.layers[2].self_attn
    heads = []
    for head in range(4):
        group = head // 2
        values = attention.v_proj.weight[8 * group : 8 * group + 8]
        heads.append(attention.o_proj.weight[:, 8 * head : 8 * head + 8] @ values)
    assert layer.value_norm == pytest.approx(math.sqrt(sum(float(c.square().sum()) for c in heads)), rel=1e-5)


def test_mixing_norm_is_that_of_the_captured_matrices() -> None:
    model = bert()
    with torch.no_grad(), capture(model) as trace:
        model(**text_inputs())
    wanted = [float(site.operator.dense().square().sum((-3, -2, -1)).max().sqrt()) for site in trace.mixers]
    found = [layer.mixing_norm for layer in certify_skip(model, text_inputs()).layers]
    assert found == pytest.approx(wanted, rel=1e-5)


def test_collapse_is_that_of_the_states() -> None:
    model = gpt2()
    with torch.no_grad(), capture(model) as trace:
        model(**text_inputs())
    certificate = certify_skip(model, text_inputs())
    for layer, state in zip(certificate.layers, trace.states[:-1], strict=True):
        mu = token_spread(state.tokens, normalized=False)
        assert layer.spread_in == pytest.approx(float(mu.mean()), rel=1e-5)
        assert layer.relative_spread_in == pytest.approx(float(token_spread(state.tokens).mean()), rel=1e-5)


def test_norms_are_told() -> None:
    assert {layer.norm for layer in certify_skip(bert(), text_inputs()).layers} == {"LayerNorm"}
    for name in ("GPT-2", "Llama", "Mamba", "Gemma-2"):
        model, batch = FOUND[name][0]()
        assert {layer.norm for layer in certify_skip(model, batch).layers} == {"none"}


def test_padding_changes_nothing() -> None:
    model, batch = bert(), text_inputs()
    ids = torch.cat([batch["input_ids"], torch.full((2, 3), 7)], 1)
    mask = torch.tensor([[1] * 12 + [0] * 3] * 2)
    plain, padded = (
        certify_skip(model, batch),
        certify_skip(model, {"input_ids": ids, "attention_mask": mask}),
    )
    for one, other in zip(plain.layers, padded.layers, strict=True):
        for name, value in one.model_dump().items():
            assert getattr(other, name) == (
                value if isinstance(value, str | bool | None) else pytest.approx(value, rel=1e-3)
            )


@pytest.mark.parametrize("padded", [True, False])
def test_padding_that_is_counted_as_tokens_is_noted(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 4] = padded
    notes = certify_skip(layer, {"src": torch.randn(2, 5, 8), "src_key_padding_mask": mask}).notes
    assert any("`src_key_padding_mask` of the batch marks padding" in note for note in notes) == padded


def test_a_model_is_left_as_it_was() -> None:
    model = gpt2().train()
    add_lambda_skip(model, init=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certify_skip(model, text_inputs())
    assert model.training
    assert len(skips_of(model)) == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == 12  # four for each skip


def test_without_skips_they_are_found_and_stay_out() -> None:
    model = gpt2()
    assert [layer.lambda_value for layer in certify_skip(model, text_inputs()).layers] == [1.0] * 3
    assert not skips_of(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_no_skip_promises_nothing() -> None:
    model = gpt2()
    with pytest.warns(UserWarning, match="λ = 0"):
        add_lambda_skip(model, init=0.0, sites="h.1")
    certificate = certify_skip(model, text_inputs())
    layer = certificate.layers[0]
    assert (layer.site, layer.lambda_value, layer.kept_lower_bound) == ("h.1.attn", 0.0, 0.0)
    assert any("λ = 0 somewhere" in note for note in certificate.notes)


def test_one_number_for_each_channel_is_bounded_by_the_least() -> None:
    for build in (gpt2, bert):
        model = build()
        skips = add_lambda_skip(model, per="channel")
        with torch.no_grad():
            for parameter in skips.values():
                parameter.copy_(torch.linspace(2.0, 6.0, 32))
        for layer in certify_skip(model, text_inputs()).layers:
            assert layer.lambda_value == 2.0
            assert layer.kept_lower_bound <= layer.kept


def test_writing_it_down(tmp_path: Path) -> None:
    certificate = certify_skip(bert(), text_inputs(), a=0.25)
    path = certificate.save(tmp_path / "certificate.json")
    read = json.loads(path.read_text())
    assert read["a"] == 0.25
    assert len(read["layers"]) == len(certificate.layers) == 3
    assert SkipCertificate.load(path) == SkipCertificate.load(tmp_path) == certificate


def test_infinity_is_written_and_read(tmp_path: Path) -> None:
    """No λ keeps apart tokens that are equal."""
    certificate = certify_skip(llama(), {"input_ids": torch.full((1, 12), 7)})
    assert certificate.layers[0].kept == math.inf
    certificate.save(tmp_path / "certificate.json")
    assert SkipCertificate.load(tmp_path) == certificate


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    for content in ("[]", "{", '{"layers": 3}', '{"format": "rankwise-audit"}'):
        path.write_text(content)
        with pytest.raises(RecordError, match="certificate"):
            SkipCertificate.load(path)


# --- what is refused


def test_a_sequence_of_padding() -> None:
    batch = text_inputs() | {"attention_mask": torch.tensor([[1] * 12, [0] * 12])}
    with pytest.raises(
        SkipError, match=r"`attention_mask` of the batch: expected a real token.*1 of 2 sequences"
    ):
        certify_skip(bert(), batch)


def test_one_token() -> None:
    model = bert()
    add_lambda_skip(model)
    with pytest.raises(SkipError, match=r"`batch`: expected two real tokens in a sequence, or more, got one"):
        certify_skip(model, {"input_ids": torch.tensor([[5], [6]])})


def test_scales_that_are_none() -> None:
    model = bert()
    skips = add_lambda_skip(model)
    with torch.no_grad():
        next(iter(skips.values())).fill_(math.nan)
    with pytest.raises(SkipError, match=r"λ of 'encoder.layer.0.attention.output': expected finite numbers"):
        certify_skip(model, text_inputs())


@pytest.mark.parametrize("a", [0.0, 1.0, math.nan])
def test_shares_that_are_none(a: float) -> None:
    with pytest.raises(RankwiseError, match=r"`a`: expected a number in \(0, 1\)"):
        certify_skip(bert(), text_inputs(), a=a)


def test_no_residual_mixer() -> None:
    certificate = certify_skip(nn.Linear(4, 4), torch.randn(1, 3, 4))
    assert certificate.layers == certificate.stacks == []
    assert certificate.notes[0].startswith("residual connections around mixers: none")


def test_sums_have_the_same_numbers_for_one_sequence_and_for_several() -> None:
    """Words + positions is a sum of two states of one shape just if there is one sequence."""
    model = gpt2()
    add_lambda_skip(model)  # with one sequence
    with_skips, without = certify_skip(model, text_inputs()), certify_skip(gpt2(), text_inputs())
    assert with_skips == without
    wrong = {"inputs_embeds": torch.randn(1, 1, 32)}
    with pytest.raises(SkipError, match="expected two real tokens"):
        certify_skip(model, wrong)


def _nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(iter(model.parameters())).fill_(math.nan)
    return model


def _infinite_mixer(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.layers[1].self_attn.o_proj.weight[0, 0] = math.inf
    return model


@pytest.mark.parametrize(
    ("breaks", "got"),
    [
        (_nan, r"states at 'layers.0.self_attn'.*NaN or infinity in the residual"),
        (_infinite_mixer, r"states at 'layers.1.self_attn'.*NaN or infinity in the output of the mixer"),
    ],
    ids=["embeddings", "mixer"],
)
def test_states_that_are_not_finite(breaks, got: str) -> None:
    model = llama()
    add_lambda_skip(model)
    with pytest.raises(SkipError, match=got):
        certify_skip(breaks(model), text_inputs())


# --- stacks


CONSTANT = torch.full((1, 12), 7)
mu = partial(token_spread, normalized=False)


def test_a_sequence_of_equal_tokens_is_left_out() -> None:
    """It has no positions in its embeddings, so all its states are equal: 0 of 0."""
    model, ids = llama(), text_inputs()["input_ids"]
    plain = certify_skip(model, {"input_ids": ids})
    mixed = certify_skip(model, {"input_ids": torch.cat([CONSTANT, ids])})
    for name in ("kept", "kept_mu"):
        assert getattr(mixed.stacks[0], name) == pytest.approx(getattr(plain.stacks[0], name), rel=1e-4)
    assert (plain.stacks[0].left_out, mixed.stacks[0].left_out) == (0, 1)
    assert any("sequences of equal tokens at the start of layers: 1;" in note for note in mixed.notes)
    assert not any("equal tokens" in note for note in plain.notes)
    (alone,) = certify_skip(model, {"input_ids": CONSTANT}).stacks
    assert (alone.kept, alone.kept_mu, alone.left_out) == (None, None, 1)


@pytest.mark.parametrize("build", [llama, bert], ids=["pre-norm", "post-norm"])
def test_both_shares_of_a_stack_are_means_of_ratios(build) -> None:
    model, batch = build(), text_inputs()
    seen = observe(model, batch, sites_in(model, batch)[0], {})
    first, last = seen[0].x.double(), seen[-1].total.double()
    share = (mu(last) / last.norm(dim=(-2, -1))) / (mu(first) / first.norm(dim=(-2, -1)))
    end = normed(last, True, 1e-12) if build is bert else last
    (stack,) = certify_skip(model, batch).stacks
    assert stack.kept == pytest.approx(float(share.mean()))
    assert stack.kept_mu == pytest.approx(float((mu(end) / mu(first)).mean()))
