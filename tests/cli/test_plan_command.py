"""`rankwise plan`: plans from numbers, texts, images and models; refusals; Ctrl-C."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.nets import NETS
from transformers import (
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    FalconConfig,
    FalconModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)
from typer.testing import Result

import rankwise as rw
from rankwise.cli.load_model import demo_model, demo_text, load_model
from rankwise.cli.plan import model_states
from rankwise.errors import InputError
from rankwise.plan import HeadDimPlan

Run = Callable[..., Result]


@pytest.fixture
def run(run: Run, tmp_path: Path) -> Run:
    """Run `rankwise plan` with a text of eleven different words and signs."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    return lambda *arguments: run("plan", *arguments)


def test_the_plan_is_printed_and_written(run: Run) -> None:
    few = ("--tokens", 64, "--trials", 2, "--out", "here")
    done = run(*few, "--width", 64, "--heads", 2, "--kv-heads", 1)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("here")
    assert f"At 2 heads, rank at random weights saturates at K* = {plan.head_dim} (95 %" in done.output
    assert (plan.heads, plan.kv_heads, plan.costs[0].head_dim) == (2, 1, 32)
    assert f"{plan.costs[0].parameters:,}" in done.output
    assert "plan: here/plan.json" in done.output.replace(str(Path.cwd()) + "/", "")
    assert Path("here/index.html").read_text().startswith("<!doctype html>")
    again = run("--tokens", 64, "--out", "here")
    assert "--overwrite" in str(again.exception)
    again = run(*few, "--overwrite")
    assert again.exit_code == 0, again.output


def test_the_length_that_is_named_for_short_texts_is_possible(run: Run) -> None:
    Path("short.jsonl").write_text('{"text": "to be or not to be"}\n{"text": "to be"}\n')
    few = ("--model", demo_model(), "--text", "short.jsonl", "--trials", 2)
    refused = str(run(*few, "--tokens", 64).exception)
    named = re.search(r"Pass a longer text, or --tokens (\d+)", refused)
    assert named
    done = run(*few, "--tokens", named[1], "--overwrite")
    assert done.exit_code == 0, done.output


def test_for_texts_of_one_token_no_length_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(batches=[{"input_ids": torch.tensor([[5]])}], notes=[], data="a text")
    monkeypatch.setattr("rankwise.cli.load_data.load_data", lambda *_, **__: given)
    with pytest.raises(InputError, match=r"got at most 1\. Pass a longer text\.$"):
        model_states(load_model(str(demo_model())), Path("short.txt"), None, 64, 1)


SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=2)
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str, int]] = {
    "a classifier with a causal mask": (lambda: LlamaForSequenceClassification(LLAMA), "causal", 2),
    "one key head for all heads": (lambda: FalconModel(FalconConfig(**SIZES, multi_query=True)), "causal", 1),
    "an encoder": (lambda: BertModel(BertConfig(**SIZES, intermediate_size=32)), "full", 4),
}


@pytest.mark.parametrize("case", MODELS)
def test_mask_and_key_heads_are_those_of_the_running_model(case: str, run: Run, tmp_path: Path) -> None:
    make, mask, key_heads = MODELS[case]
    make().save_pretrained(tmp_path / "model")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "model")
    done = run("--model", "model", "--text", "text.txt", "--tokens", 32, "--sequences", 2, "--trials", 2)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    assert (plan.mask, plan.kv_heads) == (mask, key_heads)


def test_a_model_brings_its_tokens_positions_and_heads(run: Run) -> None:
    few = ("--text", demo_text(), "--tokens", 48, "--sequences", 2, "--trials", 2)
    done = run("--model", demo_model(), *few)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    assert (plan.positions, plan.mask, plan.width, plan.heads) == ("rope", "causal", 128, 4)
    assert plan.costs[0].head_dim == 32
    assert len(plan.trained) == 16
    assert all(0 <= head.required <= head.width == 32 for head in plan.trained)
    assert "Widths that trained heads require" in done.output
    assert run("--model", demo_model(), *few, "--tolerance", 0.2, "--out", "tolerant").exit_code == 0
    other = HeadDimPlan.load("tolerant")  # the tolerance is of rank/T
    assert other.head_dim < plan.head_dim
    assert other.trained == plan.trained
    wider = sum(head.required > plan.head_dim for head in plan.trained)
    assert f"{wider} of 16 require more than K*" in " ".join(done.output.split())
    done = run("--model", demo_model(), *few, "--heads", 8, "--out", "other")
    assert done.exit_code == 0, done.output
    other = HeadDimPlan.load("other")
    assert (other.heads, other.kv_heads, other.costs[0].head_dim) == (8, 8, 16)


@pytest.mark.parametrize(
    "wrong", [("--mask", "causall"), ("--trials", 1), ("--kv-heads", 0), ("--text", "no.txt")]
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(run, monkeypatch, wrong) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("rankwise.cli.load_model.load_model", load)
    done = run("--model", demo_model(), "--text", "text.txt", *wrong)
    said = f"{done.exception} {done.output}"
    assert str(wrong[0]).removeprefix("--") in said or f"{wrong[1]}: expected a text file" in said
    assert not Path("rankwise-plan").exists()


def test_a_text_without_a_model_goes_through_a_random_embedding(run: Run) -> None:
    done = run("--text", "text.txt", "--tokens", 32, "--width", 16, "--trials", 2)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    assert max(mean for _, mean, _ in plan.curve) <= 11 / 32  # 9 words, a comma and a full stop
    assert "words of text.txt" in plan.inputs


def test_images_without_a_model_go_through_a_random_patch_embedding(run: Run) -> None:
    """Eight different patches, each in eight places: no head has more winners than that."""
    tiles = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 4, 3), dtype=np.uint8)
    rows = np.concatenate([tiles] * 8, 1).reshape(3, 8, 8, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5)
    Path("tiles").mkdir()
    for number, pixels in enumerate(rows.reshape(3, 32, 32, 3)):
        Image.fromarray(pixels).save(f"tiles/{number}.png")
    few = ("--trials", 3, "--width", 24)
    done = run("--images", "tiles", "--tokens", 100, *few)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    assert plan.tokens == 64
    assert 4 / 64 <= max(mean for _, mean, _ in plan.curve) <= 8 / 64
    assert plan.inputs == "patches of tiles through a random embedding (3 images)"
    assert any("64 patches of 4 × 4 of 32 × 32 pixels" in note for note in plan.notes)


def test_images_of_several_sizes_are_resized_with_a_note(run: Run) -> None:
    for side in (20, 30):
        pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"{side}.png")
    few = ("--trials", 2, "--width", 24)
    done = run("--images", ".", "--tokens", 49, *few)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    assert plan.tokens == 49
    assert any("resized to 224 × 224" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--width", 0), "--width"),
        (("--tokens", 1), "--tokens"),
        (("--tolerance", 1), "--tolerance: "),
        (("--text", "text.txt", "--tokens", 5000), "longer text"),
        (("--text", "none.txt"), "none.txt"),
        (("--model", f"{NETS}:layer"), "--text FILE"),
        (("--images", "text.txt"), "an image"),
        (("--images", "odd.png", "--tokens", 9), "3 × 7 pixels"),
        (("--images", "odd.png", "--text", "text.txt"), "one of --text"),
        (("--text", "."), "a text file, got a folder"),
        (("--model", demo_model(), "--text", "text.txt", "--images", "odd.png"), "one of --text"),
        (("--model", demo_model(), "--text", "text.txt", "--width", 100), "--width 100: expected 128"),
        (("--model", f"{NETS}:latent", "--text", "text.txt"), "one latent"),
        (("--model", f"{NETS}:widths", "--text", "text.txt"), "head_dim depends on the layer"),
        (("--device", "cuda:99"), "--device cuda:99"),
        (("--width", 64), "Add --heads, or"),
        (("--heads", 4), "Add --width, or"),
        (("--heads", 3, "--kv-heads", 2, "--width", 12), "--kv-heads: expected a divisor"),
        (("--out", "text.txt"), "a file"),
        (("--model", f"{NETS}:linear", "--text", "text.txt"), "attention heads"),
        (("--model", demo_model(), "--text", "short.txt", "--tokens", 64), "longer text"),
        (("--model", f"{NETS}:few_words", "--text", "text.txt", "--tokens", 32), "model's own tokenizer"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: tuple[object, ...], said: str) -> None:
    Path("short.txt").write_text("short")
    Image.new("RGB", (7, 3)).save("odd.png")
    done = run(*arguments, "--trials", 2)
    assert done.exit_code != 0
    assert said in f"{done.exception} {done.output}"


def test_saved_skips_are_part_of_the_model(run: Run, tiny: Path) -> None:
    def trained(model: Path) -> HeadDimPlan:
        few = ("--tokens", 32, "--trials", 2, "--sequences", 2)
        assert run("--model", model, "--text", "text.txt", *few, "--out", model.name).exit_code == 0
        return HeadDimPlan.load(model.name)

    model = LlamaForCausalLM.from_pretrained(tiny)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 100  # else a width of 0 is enough
    for name in ("plain", "skips"):
        shutil.copytree(tiny, f"models/{name}")
        model.save_pretrained(f"models/{name}")
    rw.add_lambda_skip(model, init=0.01)
    rw.skips.save_skips(model, "models/skips")
    with_skips, without = trained(Path("models/skips")), trained(Path("models/plain"))
    assert "with the 2 λ-skips saved next to the model" in with_skips.notes
    first, second = with_skips.trained, without.trained
    assert first[:2] == second[:2]  # λ has no effect on the first layer
    assert first[2:] != second[2:]


def test_the_number_of_heads_with_nan_is_noted(run: Run, tiny: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained("nan")
    shutil.copytree(tiny, "nan", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    few = ("--text", "text.txt", "--tokens", 32, "--trials", 2, "--sequences", 2)
    assert run("--model", "nan", *few).exit_code == 0
    assert "NaN or infinity in 1 of 4 heads" in HeadDimPlan.load("rankwise-plan").notes[-1]


@pytest.mark.parametrize("before", ['{"complete": true}', "{", None])
def test_ctrl_c_keeps_the_curve_and_the_finished_plan(run, monkeypatch, before) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankwise.plan.trained_widths", stop)
    if before is not None:
        Path("here").mkdir()
        Path("here/plan.json").write_text(before)
    done = run(
        "--model", demo_model(), "--text", demo_text(), "--tokens", 32, "--trials", 2, "--sequences", 1,
        "--out", "here", "--overwrite",
    )  # fmt: skip
    assert done.exit_code == 130
    is_finished = before == '{"complete": true}'
    out = Path("here/incomplete" if is_finished else "here")
    plan = HeadDimPlan.load(out)
    assert not plan.complete
    assert plan.curve
    assert (out / "index.html").exists()
    assert not is_finished or Path("here/plan.json").read_text() == before


def test_heads_of_the_demo_require_the_widths_that_plans_without_a_model_state(run: Run) -> None:
    stated = " ".join(run("--tokens", 16, "--trials", 2, "--out", "none").output.split())
    assert "15 to 30 of 32 channels in the bundled demo and in all-MiniLM-L6-v2, whose K* is 8" in stated
    assert run("--model", demo_model(), "--text", demo_text(), "--tokens", 256).exit_code == 0
    plan = HeadDimPlan.load("rankwise-plan")
    assert plan.head_dim == 8
    assert all(15 <= head.required <= 30 and head.width == 32 for head in plan.trained)


def test_the_recorded_command_plans_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my text.txt").write_text(Path("text.txt").read_text())
    few = ("--text", "my text.txt", "--tokens", "32", "--trials", "2", "--width", "16", "--heads", "2")
    monkeypatch.setattr("sys.argv", ["rankwise", "plan", *few])
    assert run(*few).exit_code == 0
    first = HeadDimPlan.load("rankwise-plan")
    shutil.rmtree("rankwise-plan")
    name, command, *arguments = shlex.split(first.about["command"])
    assert (name, command) == ("rankwise", "plan")
    assert run(*arguments).exit_code == 0
    again = HeadDimPlan.load("rankwise-plan")
    assert again.model_copy(update={"about": first.about}) == first


def test_help_shows_examples(run: Run) -> None:
    assert "rankwise plan --tokens 2048 --mask causal" in run("--help").output
