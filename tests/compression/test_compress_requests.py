"""Refused requests to compress with their remedies, notes, and timing."""

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.compression.compression_cases import (
    GPT,
    SIZES,
    Make,
    bert,
    deberta,
    gpt2,
    ids,
    latent_layers,
    llama,
    made,
    mpnet,
    qwen3,
)
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.auditing.text_inputs import longest_sequence
from rankwise.compression import Latency, evaluate
from rankwise.compression.kv_modules import LatentCache
from rankwise.errors import CompressionError, InputError


@pytest.mark.filterwarnings("ignore:.*became slower")
@pytest.mark.parametrize(
    ("positions", "timed"), [(20, []), (28, []), (48, [20]), (56, [28]), (64, [36]), (112, [1, 84])]
)
def test_decoding_is_timed_where_the_context_has_room(
    positions: int, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.compression.evaluate.SECONDS", 0.0)
    model = made("GPT2", "LMHeadModel", **{**GPT, "n_layer": 1}, n_positions=positions)
    done = rw.compress(model, [ids(4, 16)], keep=3 / 8, time=True)
    assert [one.tokens for one in done.latency if one.phase == "decode"] == timed
    assert sum(one.phase == "prefill" for one in done.latency) == 2
    assert sum("was not timed" in note for note in done.notes) == 2 - len(timed)


@pytest.mark.filterwarnings("ignore:.*became slower")
def test_an_encoder_decoder_is_timed_on_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.compression.evaluate.SECONDS", 0.0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    model = made("T5", "ForConditionalGeneration", vocab_size=61, decoder_start_token_id=0, **sizes)
    labels = ids(4, 9, seed=1)["input_ids"]
    labels[:, 6:] = -100
    done = rw.compress(model, [{**ids(), "labels": labels}], keep=0.5, time=True)
    assert [(one.phase, one.tokens) for one in done.latency] == [("prefill", 128), ("prefill", 512)]


def encoder_decoder() -> Any:
    """Two models of 40 positions, under a configuration without a number of positions."""
    sizes = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 40}
    decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    coders = transformers.BertConfig(**sizes), decoder
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*coders)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config).eval()


@pytest.mark.filterwarnings("ignore:.*became slower")
def test_inner_configurations_limit_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.compression.evaluate.SECONDS", 0.0)
    model = encoder_decoder()
    assert longest_sequence(model) == 40
    batch = {**ids(), "decoder_input_ids": ids(4, 9)["input_ids"]}
    with pytest.raises(InputError, match="more than the 40 positions"):
        rw.compress(model, [{**ids(2, 41), "decoder_input_ids": ids(2, 9)["input_ids"]}], keep=0.5)
    done = rw.compress(model, [batch], keep=0.5, time=True)
    assert [one.tokens for one in done.latency] == [9, 38]


def test_timing_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no clock\nmore")

    monkeypatch.setattr("rankwise.compression.evaluate.measure_latency", fails)
    model = gpt2()
    done = rw.compress(model, [ids()], keep=0.5, time=True)
    assert not done.latency
    assert "Latency was not measured: RuntimeError: no clock." in done.notes
    assert (
        done.parameters_after == sum(weight.numel() for weight in model.parameters()) < done.parameters_before
    )


def test_a_part_may_report_the_cost_of_a_mixer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    part = rw.compression.part
    solution = part.Solution(part.Change(gpt2()), kl={"transformer.h.1.attn": 0.25})
    monkeypatch.setattr("rankwise.compression.run.solve_part", lambda *_: solution)
    [layer] = rw.compress(gpt2(), [ids()]).layers
    assert (layer.site, layer.layer, layer.kl, layer.output_error) == ("transformer.h.1.attn", 1, 0.25, 0)


@pytest.mark.parametrize("place", ["snapshot", "solve_part", "evaluate"])
def test_an_error_of_the_code_of_a_model_is_one_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("own code\nmore")

    monkeypatch.setattr(f"rankwise.compression.run.{place}", fails)
    model = gpt2()
    said = "GPT2LMHeadModel: expected code that works for .*, got KeyError: .*The model is unchanged"
    with untouched(model), pytest.raises(CompressionError, match=said) as error:
        rw.compress(model, [ids()], keep=0.5)
    assert "\n" not in str(error.value)


def test_measurements_that_fail_are_found_before_the_work() -> None:
    model: Any = gpt2()
    forward = model.forward

    def without_cache(input_ids: Any, attention_mask: Any = None) -> Any:
        return forward(input_ids, attention_mask=attention_mask)

    model.forward = without_cache
    steps: list[str] = []
    with pytest.raises(CompressionError, match="use_cache"):
        rw.compress(model, [ids()], keep=0.5, on_step=steps.append)
    assert not steps


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_outputs_without_names_are_measured(name: str) -> None:
    records = []
    for named in (True, False):
        model: Any = gpt2() if "GPT2" in name else made("Bert", "ForMaskedLM", **SIZES)
        model.config.return_dict = named
        records.append(rw.compress(model, [ids()], keep=0.5))
        assert model.config.return_dict == named
    assert records[0].output_kl == records[1].output_kl > 0


def test_each_model_decodes_from_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = llama(), set()
    run = type(model).forward

    @wraps(run)
    def recorded(model: nn.Module, *args: Any, **given: Any) -> Any:
        cache = given.get("past_key_values")
        if cache is not None and given["input_ids"].shape[1] == 1:  # a step of decoding
            pairs.add((bool(latent_layers(model)), isinstance(cache.layers[0], LatentCache)))
        return run(model, *args, **given)

    monkeypatch.setattr(evaluate, "SECONDS", 0.0)
    monkeypatch.setattr(type(model), "forward", recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        done = rw.compress(model, [ids(8, 30)], keep=0.4, parts="kv", time=True)
    assert pairs == {(True, True), (False, False)}
    assert {timing.phase for timing in done.latency} == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("make", "part", "target"),
    [
        (gpt2, "qk", {"tolerance": 1e-30}),
        (gpt2, "qk", {"keep": 0.9999}),
        (llama, "rotary", {"tolerance": 1e-30}),
        (llama, "kv", {"tolerance": 1e-30}),
    ],
)
def test_a_target_that_removes_nothing_changes_nothing(
    make: Make, part: str, target: dict[str, float]
) -> None:
    model = make()
    with untouched(model):
        done = rw.compress(model, [ids()], parts=part, calibrate=1, **target)
    assert done.output_kl == done.output_error == 0
    assert part == "kv" or done.kl == 0
    assert any(note.startswith(f"{part}: nothing was removed. Lower `keep`") for note in done.notes)
    assert not any("above the tolerance" in note for note in done.notes)


def test_a_slower_model_is_noted_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Latency(phase="decode", tokens=9, before=1, after=2, ratio=2, low=2, high=2)
    later = late.model_copy(update={"tokens": 99, "ratio": 3})
    monkeypatch.setattr(evaluate, "measure_latency", lambda *_: ([late, later], []))
    said = (
        "The model became slower on this machine: decode at 9 tokens 2.00 times the time, decode at 99 tokens"
    )
    with pytest.warns(UserWarning, match=said):
        done = rw.compress(gpt2(), [ids()], keep=5 / 8, time=True)
    assert [note.startswith(said) for note in done.notes if "slower" in note] == [True]


@pytest.mark.parametrize("part", ["heads", "kv"])
def test_calibration_without_effect_on_a_part_is_noted(part: str) -> None:
    model = gpt2() if part == "heads" else llama()
    done = rw.compress(model, [ids()], keep=0.5, parts=part, calibrate=3)
    assert any("for qk and rotary alone" in note for note in done.notes)


def test_latents_that_add_parameters_are_in_the_headline(tmp_path: Path) -> None:
    done = rw.compress(llama(), [ids(8, 24)], keep=0.9, parts="kv")
    more = done.parameters_after / done.parameters_before - 1
    assert more > 0
    assert f"{more:.1%} more parameters" in done.to_html(tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"calibrate": 1.5}, "`calibrate`: expected a whole number of at least 0, got 1.5"),
        ({"calibrate": True}, "got True"),
        ({"calibrate": -1}, "at least 0"),
        ({"keep": True}, "got True"),
        ({"keep": "half"}, "`keep`.*got 'half'"),
        ({"keep": 0}, "`keep`: expected a number in .0, 1., got 0"),
        ({"keep": 1}, "in .0, 1."),
        ({"keep": float("nan")}, "in .0, 1."),
        ({"keep": 0.05}, "a width of at least 1 on average"),
        ({"keep": {"kv": 0.01}}, "Keep more"),
        ({"keep": {"qk": 0.5, "kv": 1.5}}, "`keep`: expected a number in .0, 1., got 1.5"),
        ({"tolerance": "0.1"}, "`tolerance`.*got '0.1'"),
        ({"tolerance": 0}, "in .0, ∞."),
        ({"parts": ("qks",)}, "got 'qks'. Did you mean qk"),
        ({"parts": ()}, "`parts`: expected at least one part, got none"),
        ({"parts": ("qk", "qk")}, "twice"),
        ({"keep": {"qq": 0.5}}, "`parts`: expected one of .* got 'qq'"),
        ({"keep": {}}, "`parts`: expected at least one part, got none"),
        ({"keep": {"qk": None}}, "part 'qk': expected a share .* or a tolerance, got None. Omit the part"),
        ({"keep": {"qk": 0.5}, "tolerance": {"qk": 0.1}}, "part 'qk': .* got both. Omit one"),
        ({"keep": {"qk": 0.5}, "tolerance": 0.1}, "`tolerance`: expected a mapping of parts.* got 0.1"),
        ({"keep": 0.5, "tolerance": 0.1}, "a share to keep or a tolerance, got both"),
        ({"keep": {"qk": 0.5}, "parts": "kv"}, "`parts`: expected None, .* got 'kv'"),
        ({"parts": 3}, f"`parts`: expected one of {', '.join(rw.compression.PARTS)}, got 3"),
    ],
)
def test_targets_that_cannot_be_met_are_refused(asked: dict[str, Any], said: str) -> None:
    with unchecked(), pytest.raises(CompressionError, match=said):
        rw.compress(gpt2(), [ids()], **asked)


WRONG_IDS = {
    "0 elements": torch.zeros(2, 0, dtype=torch.long),
    "not below the 61": torch.full((2, 9), 61),
    "more than the 64 positions": torch.ones(2, 65, dtype=torch.long),
}


@pytest.mark.parametrize("said", WRONG_IDS)
@pytest.mark.parametrize("name", ["batches", "held_out"])
def test_a_batch_on_which_the_model_does_not_run_is_named(name: str, said: str) -> None:
    model, given = gpt2(), {"batches": [ids()], name: [ids(), {"input_ids": WRONG_IDS[said]}]}
    with untouched(model), pytest.raises(InputError, match=f"`{name}`, batch 2.*{said}"):
        rw.compress(model, **given)


def test_the_name_of_a_model_is_refused() -> None:
    with unchecked(), pytest.raises(InputError, match=r"`model`: .* got str. Load it first"):
        rw.compress("gpt2", [ids()])


class Adapter(nn.Module):
    """A linear layer with low-rank adapters, as peft builds it."""

    def __init__(self, base_layer: Any, size: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        outputs = base_layer.out_features if isinstance(base_layer, nn.Linear) else base_layer.nf
        inputs = base_layer.weight.numel() // outputs
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})
        nn.init.normal_(self.lora_B["default"].weight, std=size)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(make: Make, *layers: str, size: float = 1.0) -> Make:
    """Models with adapters on the layers whose names end as given."""

    def build() -> nn.Module:
        model = make()
        for name, module in list(model.named_modules()):
            if name.endswith(layers):
                model.set_submodule(name, Adapter(module, size))
        return model.eval()

    return build


class OwnWeights(nn.Module):
    """Attention whose weights (heads, width, D) lie in no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 4, 8, 32) / 5)
        self.output = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = torch.einsum("btd,nhkd->nbhtk", x, self.qkv)
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def own_weights() -> nn.Module:
    return nn.Sequential(nn.Embedding(61, 32), OwnWeights())


def torch_layer() -> nn.Module:
    return nn.Sequential(nn.Embedding(61, 32), nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)).eval()


MERGE = "whose adapter is not merged: `merge_and_unload"
REFUSED_MODELS = [
    (deberta, "qk", "plus terms that all sequences share"),
    (qwen3, "rotary", "queries come from .*q_norm', which is of class Qwen3RMSNorm, not nn.Linear"),
    (qwen3, "qk", "queries come from .*q_norm', which is of class Qwen3RMSNorm"),
    (llama, "qk", "positions are rotated into its queries. Where"),
    (gpt2, "rotary", "positions are not rotated into its queries and keys[.;]"),
    (adapted(gpt2, "c_attn"), "heads", MERGE),
    (adapted(gpt2, "c_attn"), "qk", f"its queries come from .*c_attn', {MERGE}"),
    (adapted(gpt2, "c_attn", size=0), "qk", MERGE),
    (adapted(gpt2, "c_attn"), "kv", f"its values come from .*c_attn', {MERGE}"),
    (adapted(gpt2, "attn.c_proj"), "heads", MERGE),
    (lambda: attention(adapted(gpt2, "c_attn")(), "eager"), "qk", MERGE),
    (adapted(bert, "attention.output.dense"), "heads", f"output.dense., {MERGE}"),
    (adapted(llama, "q_proj"), "rotary", f"its queries come from .*q_proj', {MERGE}"),
    (adapted(llama, "k_proj"), "rotary", f"its keys come from .*k_proj', {MERGE}"),
    (adapted(llama, "k_proj"), "kv", f"its keys come from .*k_proj', {MERGE}"),
    (own_weights, "qk", r"not from an nn.Linear: 'qkv' \(3, 4, 8, 32\)"),
    (own_weights, "rotary", r"not from an nn.Linear: 'qkv' \(3, 4, 8, 32\)"),
    (own_weights, "heads", r"not from an nn.Linear: 'qkv' \(3, 4, 8, 32\)"),
    (torch_layer, "qk", r"'self_attn.in_proj_weight' \(96, 32\)|'in_proj_weight' \(96, 32\)"),
]


@pytest.mark.parametrize(("make", "part", "said"), REFUSED_MODELS)
def test_models_that_a_part_cannot_change_are_refused(make: Make, part: str, said: str) -> None:
    model = make()
    batch = ids() if hasattr(model, "config") else ids()["input_ids"]
    with untouched(model), pytest.raises(CompressionError, match=said):
        rw.compress(model, [batch], keep=0.5, parts=part)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": ids(1)["input_ids"]}, "the first batch has one sequence: begin with two"),
        ({"input_ids": ids(1)["input_ids"].repeat(2, 1)}, "the first two sequences are equal"),
    ],
)
def test_an_explicit_softmax_needs_two_different_sequences(batch: dict[str, Any], said: str) -> None:
    with pytest.raises(CompressionError, match=said):
        rw.compress(mpnet(), [batch, ids()], keep=0.5)


def test_the_part_kv_names_batches_without_names() -> None:
    with pytest.raises(CompressionError, match=r"got a tuple as batch. Pass a dict: .{'input_ids': ids}"):
        rw.compress(gpt2(), [(ids()["input_ids"],)], keep={"kv": 0.5})


@pytest.mark.parametrize("part", ["heads", "qk", "kv"])
def test_adapters_of_peft_are_compressed_after_their_merge(part: str) -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(gpt2(), options).eval()
    with pytest.raises(CompressionError, match=MERGE):
        rw.compress(model, [ids()], keep=0.5, parts=part)
    assert not rw.compress(model.merge_and_unload(), [ids()], keep=0.5, parts=part).left_out


def test_a_model_without_data_or_compression_is_refused() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        rw.compress(gpt2(), [], keep=0.5)
    with pytest.raises(CompressionError, match="Compress it first"):
        rw.compression.save_compressed(gpt2(), "nowhere")


@pytest.mark.parametrize("name", ["batches", "held_out"])
def test_a_single_batch_is_refused_with_its_remedy(name: str) -> None:
    for batch in (ids()["input_ids"], ids()):
        given = {"batches": [ids()], name: batch}
        with pytest.raises(InputError, match=rf"`{name}`.*\[batch\]"):
            rw.compress(bert(), **given, keep=3 / 8)


def test_the_loss_counts_labels_as_a_decoder_shifts_them() -> None:
    model, tokens = gpt2(), ids(4, 16)["input_ids"]
    masked = tokens.clone()
    masked[:, :4], masked[0, 1:] = -100, -100
    batches = [
        {"input_ids": tokens, "labels": masked},
        {"input_ids": tokens[:1], "labels": tokens[:1]},
        {"input_ids": tokens[:1], "labels": torch.full_like(tokens[:1], -100)},
    ]
    total, count = 0.0, 0
    for batch in batches:
        labels = batch["labels"][:, 1:]
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits[:, :-1]
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((labels != -100).sum())
    done = rw.compress(model, batches, keep=3 / 8)
    assert done.loss_before == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(("model", "part"), [(gpt2, "qk"), (llama, "rotary")])
def test_of_two_parts_that_narrow_the_one_that_fits_is_done(
    model: Callable[[], nn.Module], part: str
) -> None:
    done = rw.compress(model(), [ids()], keep=0.5, parts=["qk", "rotary"])
    (note,) = [note for note in done.notes if "no layer has such queries and keys" in note]
    assert done.parts == [part]
    assert not note.startswith(part)


def attention(model: nn.Module, kind: str) -> nn.Module:
    model.set_attn_implementation(kind)  # type: ignore[operator]
    return model


@pytest.mark.parametrize(
    ("model", "parts", "remedy", "other", "others"),
    [
        (gpt2, ["rotary"], "positions are not rotated in.*the part `qk` may do", gpt2, ["qk"]),
        (llama, ["qk"], "positions are rotated in.*replace `qk` by `rotary` in the parts", llama, ["rotary"]),
        (
            lambda: attention(llama(), "eager"), ["qk", "heads", "kv"],
            r"replace `qk` by `rotary` .* needs `model.set_attn_implementation\('sdpa'\)`",
            lambda: attention(attention(llama(), "eager"), "sdpa"), ["rotary", "heads", "kv"],
        ),
        (bert, ["qk", "kv"], "Remove `kv` from the parts", bert, ["qk"]),
        (
            lambda: attention(llama(), "eager"), ["rotary"], "load the model with attn_implementation='sdpa'",
            lambda: attention(llama(), "sdpa"), ["rotary"],
        ),
    ],
    ids=["qk", "rotary", "rotary and sdpa", "without kv", "sdpa"],
)  # fmt: skip
def test_the_remedy_of_a_refusal_helps(
    model: Callable[[], nn.Module], parts: list[str], remedy: str,
    other: Callable[[], nn.Module], others: list[str],
) -> None:  # fmt: skip
    with pytest.raises(CompressionError, match=remedy):
        rw.compress(model(), [ids()], keep=0.5, parts=parts)
    done = rw.compress(other(), [ids()], keep=0.5, parts=others)
    assert done.parameters_after < done.parameters_before
