"""Refused requests to compress with their remedies, notes, and timing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import (
    BART,
    Make,
    bert,
    deberta,
    gpt2,
    ids,
    llama,
    made,
    mpnet,
    qwen3,
)
from tests.support.documents import compression_document
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import nn

import rankwise as rw
from rankwise.compression.width_modules import NarrowProjection
from rankwise.errors import CompressionError, InputError


def bart() -> nn.Module:
    return made("Bart", "ForConditionalGeneration", **BART)


@pytest.mark.parametrize(
    ("make", "batch", "timed"),
    [
        (gpt2, ids(4, 16), "decoding step after 15 tokens"),
        (gpt2, ids(4, 64), "decoding step after 63 tokens"),
        (bert, ids(4, 16), "pass"),
        (bart, {**ids(), "decoder_input_ids": ids(4, 9)["input_ids"]}, "pass"),
    ],
)
def test_a_step_or_a_pass_is_timed(make: Make, batch: dict[str, Any], timed: str) -> None:
    done = rw.compress(make(), [batch], keep={"width": 0.5}, time=True)
    assert done.timed == timed
    assert min(done.seconds_before, done.seconds_after) > 0
    assert not any("not timed" in note for note in done.notes)
    assert [f"{timed}, ms"] in [row[:1] for row in compression_document(done).sections[0].tables[1].rows]


def test_the_medians_of_both_models_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by 1 second per pass, and by 3 per narrow layer."""
    clock, model = [0.0], gpt2()
    monkeypatch.setattr("rankwise.compression.evaluate.time.perf_counter", lambda: clock[0])
    forward = NarrowProjection.forward

    def slow(self: NarrowProjection, tokens: torch.Tensor) -> torch.Tensor:
        clock[0] += 3
        return forward(self, tokens)

    monkeypatch.setattr(NarrowProjection, "forward", slow)
    model.lm_head.register_forward_pre_hook(lambda *_: clock.__setitem__(0, clock[0] + 1))
    done = rw.compress(model, [ids()], keep={"width": 0.5}, time=True)
    assert (done.seconds_before, done.seconds_after) == (1, 7)


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
        rw.compress(model, [ids()], keep=0.5, on_progress=lambda step, _: steps.append(step))
    assert steps == ["the parts that the model allows"]


def test_all_parts_are_tried_before_the_work_and_named_in_one_message() -> None:
    """A late refusal of one part would lose the work of the parts before it."""
    model, steps = bert(), list[str]()
    said = r"expected a decoder that caches.*\. Parts that work: heads, width\.$"
    with untouched(model), pytest.raises(CompressionError, match=said):
        rw.compress(
            model,
            [ids()],
            keep=0.5,
            parts=("heads", "width", "kv"),
            on_progress=lambda step, _: steps.append(step),
        )
    assert steps == ["the parts that the model allows"]
    assert rw.compress(model, [ids()], keep=0.5, parts=("heads", "width")).parts == ["heads", "width"]


@pytest.mark.parametrize(
    ("make", "part", "target"),
    [
        (gpt2, "width", {"tolerance": 1e-30}),
        (gpt2, "width", {"keep": 0.9999}),
        (llama, "width", {"tolerance": 1e-30}),
        (llama, "kv", {"tolerance": 1e-30}),
    ],
)
def test_a_target_that_removes_nothing_changes_nothing(
    make: Make, part: str, target: dict[str, float]
) -> None:
    model = make()
    with untouched(model):
        done = rw.compress(model, [ids()], parts=part, calibrate=1, **target)
    assert done.worst.output_kl == done.worst.output_error == 0
    assert part == "kv" or done.attention_kl == 0
    assert any(note.startswith(f"{part}: nothing was removed. Lower `keep`") for note in done.notes)
    assert not any("above the tolerance" in note for note in done.notes)


def test_a_latent_of_full_rank_that_halves_the_cache_is_a_change() -> None:
    done = rw.compress(gpt2(), [ids()], keep={"kv": 0.75})
    assert all(latent.rank == latent.full_rank < latent.channels for latent in done.latents)
    assert done.kept_cache.after * 2 == done.kept_cache.before
    assert not any("nothing was removed" in note for note in done.notes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"calibrate": 1.5}, "`calibrate`: expected a whole number of at least 0, got 1.5"),
        ({"keep": True}, "got True"),
        ({"keep": "half"}, "`keep`.*got 'half'"),
        ({"keep": 0}, "`keep`: expected a number in .0, 1., got 0"),
        ({"keep": 0.05, "parts": "width"}, "a width of at least 1 on average"),
        ({"keep": {"kv": 0.01}}, "Keep more"),
        ({"tolerance": 0}, "in .0, ∞."),
        ({"parts": ("widths",)}, "got 'widths'. Did you mean width"),
        ({"parts": ()}, "`parts`: expected at least one part, got none"),
        ({"keep": {"qq": 0.5}}, "`parts`: expected one of .* got 'qq'"),
        ({"keep": {}}, "`parts`: expected at least one part, got none"),
        (
            {"keep": {"width": None}},
            "part 'width': expected a share .* or a tolerance.*, got none. Omit the part",
        ),
        ({"keep": {"width": 0.5}, "tolerance": {"width": 0.1}}, "got keep and tolerance. Omit one"),
        ({"keep": 0.5, "tolerance": 0.1}, "a share to keep or a tolerance.*got keep and tolerance"),
        ({"keep": {"width": 0.5}, "parts": "kv"}, "`parts`: expected None, .* got 'kv'"),
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

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        outputs = base_layer.out_features if isinstance(base_layer, nn.Linear) else base_layer.nf
        inputs = base_layer.weight.numel() // outputs
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})
        nn.init.normal_(self.lora_B["default"].weight, std=1.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted(make: Make, *layers: str) -> Make:
    """Models with adapters on the layers whose names end as given."""

    def build() -> nn.Module:
        model = make()
        for name, module in list(model.named_modules()):
            if name.endswith(layers):
                model.set_submodule(name, Adapter(module))
        return model.eval()

    return build


def tanh_bert() -> nn.Module:
    """A model whose queries are not linear."""
    model: Any = bert()
    for layer in model.encoder.layer:
        layer.attention.self.query = nn.Sequential(layer.attention.self.query, nn.Tanh())
    return model


def torch_layer() -> nn.Module:
    return nn.Sequential(nn.Embedding(61, 32), nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)).eval()


MERGE = "whose adapter is not merged: `merge_and_unload"
REFUSED_MODELS = [
    (deberta, "width", "plus terms that all sequences share"),
    (qwen3, "width", "queries come from .*q_norm', which is of class Qwen3RMSNorm, not nn.Linear"),
    (adapted(gpt2, "c_attn"), "heads", MERGE),
    (adapted(gpt2, "c_attn"), "width", f"its queries come from .*c_attn', {MERGE}"),
    (adapted(gpt2, "c_attn"), "kv", f"its values come from .*c_attn', {MERGE}"),
    (adapted(gpt2, "attn.c_proj"), "heads", MERGE),
    (adapted(llama, "k_proj"), "width", f"its keys come from .*k_proj', {MERGE}"),
    (adapted(llama, "k_proj"), "kv", f"its keys come from .*k_proj', {MERGE}"),
    (torch_layer, "width", r"not from an nn.Linear: '(self_attn\.)?in_proj_weight' \(96, 32\)"),
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
        rw.compress(mpnet(), [batch, ids()], keep=0.5, parts="width")


def test_the_part_kv_names_batches_without_names() -> None:
    with pytest.raises(CompressionError, match=r"got a tuple as batch. Pass a dict: .{'input_ids': ids}"):
        rw.compress(gpt2(), [(ids()["input_ids"],)], keep={"kv": 0.5})


def test_a_model_without_data_or_compression_is_refused() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        rw.compress(gpt2(), [], keep=0.5)
    with pytest.raises(CompressionError, match="Compress it first"):
        rw.compression.save_compressed(gpt2(), "nowhere")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (gpt2, ["width", "kv"]),
        (llama, ["width", "kv"]),
        (bert, ["width"]),
        (qwen3, ["kv"]),
        (tanh_bert, ["heads"]),
    ],
    ids=["gpt2", "llama", "bert", "qwen3", "tanh"],
)
def test_without_names_the_parts_that_the_model_allows_are_done(make: Make, parts: list[str]) -> None:
    assert rw.compress(make(), [ids(8, 30)], keep=0.75).parts == parts


def attention(model: nn.Module, kind: str) -> nn.Module:
    model.set_attn_implementation(kind)  # type: ignore[operator]
    return model


def test_eager_attention_with_rotary_positions_is_refused_with_its_remedy() -> None:
    model = attention(llama(), "eager")
    with pytest.raises(CompressionError, match=r"`model.set_attn_implementation\('sdpa'\)` may show more"):
        rw.compress(model, [ids()], keep=0.5, parts="width")
    done = rw.compress(attention(model, "sdpa"), [ids()], keep=0.5, parts="width")
    assert done.parameters_after < done.parameters_before


def with_linear() -> nn.Module:
    model = gpt2()
    model.transformer.h[1].mlp.c_fc = nn.Linear(32, 128)  # a Conv1D is not quantized
    return model


def quantized(model: nn.Module) -> nn.Module:
    kinds = {nn.Linear}
    return torch.ao.quantization.quantize_dynamic(model, kinds, dtype=torch.qint8)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_weights_are_refused_before_the_work() -> None:
    model = quantized(with_linear())
    said = r"got 'transformer\.h\.1\.mlp\.c_fc', quantized .*Compress the original model, then quantize"
    with untouched(model), pytest.raises(CompressionError, match=said):
        rw.compress(model, [ids()], keep=0.5)
    rw.compress(original := with_linear(), [ids()], keep=0.5)
    with torch.no_grad():
        assert quantized(original)(**ids()).logits.isfinite().all()


def test_inference_mode_is_refused_before_the_work() -> None:
    said = "expected a model with derivatives, got torch.inference_mode"
    model = gpt2()
    with torch.inference_mode(), pytest.raises(CompressionError, match=said):
        rw.compress(model, [ids()], keep=0.5)
    assert rw.compress(model, [ids()], keep=0.5).parts


@pytest.mark.parametrize("verb", ["compress", "add λ-skips", "certify"])
def test_offloaded_weights_are_refused_with_the_true_reason(verb: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(gpt2(), execution_device=torch.device("cpu"))
    verbs: dict[str, Callable[[], object]] = {
        "compress": lambda: rw.compress(model, [ids(4, 24)], keep=0.5),
        "add λ-skips": lambda: rw.add_lambda_skip(model, example=ids(2, 8)),
        "certify": lambda: rw.certify_skip(model, ids(2, 8)),
    }
    with pytest.raises(rw.RankwiseError, match=r"offloaded weights\. Load the model without `device_map`"):
        verbs[verb]()
