"""The command `rankwise compress`."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.compression.compression_cases import SIZES, gpt2
from tests.compression.test_evaluate import TwoWidths
from transformers import ByT5Tokenizer, ViTConfig, ViTForImageClassification, ViTImageProcessor
from typer.testing import CliRunner, Result

import rankwise as rw
from rankwise.cli import app
from rankwise.cli.load_data import split_held_out
from rankwise.compression import Compression

Run = Callable[..., Result]
TEXT = "to be or not to be, that is the question: whether tis nobler in the mind to suffer the slings. " * 20
FACTORY = """
from tests.compression.compression_cases import gpt2, ids
def build():
    return gpt2(), [ids(6, 30, seed) for seed in range(4)]
"""
PLAIN = """
import torch
from tests.compression.test_evaluate import TwoWidths
def build():
    torch.manual_seed(0)
    return TwoWidths().eval(), [torch.randn(6, 30, 32) for _ in range(2)]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("short.txt").write_text("to be")
    for name, code in {"own": FACTORY, "plain": PLAIN}.items():
        Path(f"{name}.py").write_text(code)

    def call(*arguments: object, works: bool = True) -> Result:
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert (result.exit_code == 0) == works, result.output
        return result

    return call


def save_gpt2() -> None:
    """Save a model with a tokenizer into the folder `model`."""
    model = gpt2()
    model.resize_token_embeddings(400)
    model.save_pretrained("model")
    ByT5Tokenizer().save_pretrained("model")


def words(result: Result) -> str:
    return " ".join(result.output.split())


def load_line(result: Result) -> str:
    [line] = [line for line in result.output.splitlines() if line.startswith("model = ")]
    return line


def loaded(line: str, **scope: Any) -> Any:
    """Run the line that loads a compressed model."""
    scope["rankwise"] = rw
    exec(line, scope)
    return scope["model"]


def count(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_the_command_reports_costs_and_writes_a_model(run: Run) -> None:
    options = ("--keep", "width=0.5", "--calibration-steps", 4, "--time", "--out", "half")
    done = run("compress", "own.py:build", *options)
    record = Compression.load("half")
    assert sum(head.width for head in record.heads) == 4 * len(record.heads)
    assert record.measured_on == "held-out data"
    assert math.isfinite(record.worst.loss_before)
    assert record.worst.loss_after != record.worst.loss_before
    losses = record.worst.loss_before, record.worst.loss_after
    added = f"{record.worst.loss_added:+.4f} ± {record.worst.spread:.4f}"
    headline = f"loss {losses[0]:.4f} → {losses[1]:.4f} ({added}) on held-out data of 30 tokens"
    assert headline in words(done)
    assert "nothing was removed" not in words(done)
    milliseconds = f"{1e3 * record.seconds_before:.2f} {1e3 * record.seconds_after:.2f}"
    assert f"decoding step after 29 tokens, ms {milliseconds}" in words(done)
    assert f"Attention KL: {record.attention_kl:.4f} nats" in words(done)
    page = Path("half/index.html").read_text()
    assert all(text in page for text in ("Layers", "Costs", "Savings", "rankwise.load_compressed"))
    assert count(loaded(load_line(done))) == record.parameters_after
    again = run("compress", "own.py:build", "--out", "half", works=False)
    assert "new or empty" in str(again.exception)


def test_a_plain_module_is_loaded_into_a_new_one(run: Run) -> None:
    load = load_line(run("compress", "plain.py:build", "--keep", 0.5, "--out", "less"))
    assert count(loaded(load, model=TwoWidths())) == Compression.load("less").parameters_after


def test_a_model_of_images_is_compressed_on_images(run: Run) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(image_size=16, patch_size=4, **sizes)
    ViTForImageClassification(config).save_pretrained("model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained("model")
    Path("images").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"images/{number}.png")
    done = run("compress", "model", "--images", "images", "--keep", 0.5, "--out", "less")
    assert loaded(load_line(done)).config.hidden_size == 32
    run("audit", "less", "--images", "images")


def test_a_model_folder_with_other_files_is_compressed_and_audited(run: Run) -> None:
    save_gpt2()
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "../own"}]
    Path("model/modules.json").write_text(json.dumps(modules))
    Path("model/1_Pooling").mkdir()
    Path("model/1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    folder = 'the "small" one'
    done = run(
        "compress", "model", "--text", "text.txt", "--keep", 3 / 8, "--tokens", 32, "--sequences", 8,
        "--batch-size", 4, "--out", folder,
    )  # fmt: skip
    assert "the second half of the text, or every second text, was held out" in words(done)
    copied, original = (Path(name, "1_Pooling", "config.json") for name in (folder, "model"))
    assert copied.read_text() == original.read_text()
    assert Path(folder, "modules.json").exists()
    assert not Path("own").exists()
    record = Compression.load(folder)
    model = loaded(load_line(done))
    assert count(model) == record.parameters_after
    assert model.config.use_cache
    for name, out in (("model", "before"), (folder, "after")):
        run("audit", name, "--text", "text.txt", "--tokens", 32, "--loss", "--out", out)
    compared = words(run("compare", "before", "after"))
    assert f"{rw.Audit.load('before').loss:.4g} → {rw.Audit.load('after').loss:.4g}" in compared
    assert "other data" not in compared
    again = run("compress", folder, "--text", "text.txt", "--tokens", 32, "--out", "twice", works=False)
    assert "not compressed yet" in str(again.exception)


def test_without_a_change_nothing_is_written(run: Run) -> None:
    few = ("compress", "own.py:build", "--parts", "heads", "--out", "new", "--keep")
    done = run(*few, 0.99, works=False)
    assert "Nothing was written. Lower --keep" in str(done.exception)
    assert not done.output
    assert not Path("new").exists()
    assert "load_compressed" in run(*few, 0.5).output  # the remedy


REFUSED: list[tuple[tuple[object, ...], str]] = [
    (("--keep", 0.5, "--tolerance", 0.1), "got keep and tolerance"),
    (("--parts", "heads,qqk"), f"one of {', '.join(rw.compression.PARTS)}"),
    (("--keep", "=0.5"), "--keep: expected a number, or PART=NUMBER, got =0.5"),
    (("--out", "text.txt"), "a file"),
    (("--keep", "half"), "--keep: expected a number, or PART=NUMBER, got half"),
    (("--keep", "kv=0.5", "--keep", "kv=0.4"), "one PART=NUMBER per part, got kv=0.5 and kv=0.4"),
    (("--tolerance", "0.1", "--tolerance", "kv=0.4"), "--tolerance: expected one number"),
    (("--keep", "kv=0.5", "--parts", "kv"), "--parts: expected None, because the targets name"),
    (("--keep", "vk=0.5"), "got 'vk'"),
    (("--text", "text.txt", "--images", "text.txt"), "--text and --images"),
    (("--text", "short.txt", "--tokens", 32), "longer text"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_wrong_arguments_are_refused(run: Run, arguments: tuple[object, ...], said: str) -> None:
    assert said in str(run("compress", "own.py:build", *arguments, works=False).exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--text", "none.txt"), "none.txt: expected a text file, got no such file"),
        ((), "data: expected one of --text, --images, --dataset, got none. Pass one, such as --text"),
        (("--text", "text.txt", "--calibration-steps", -1), "Invalid value for '--calibration-steps'"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(run, arguments, said) -> None:
    done = run("compress", "nobody/nothing", *arguments, works=False)
    assert said in f"{done.exception} {done.output}"


def test_a_text_without_longer_windows_is_noted(run: Run, tiny: Path) -> None:
    """The model reads 64 tokens: windows of 32 could be measured next to windows of 8, and are not."""
    Path("lines.jsonl").write_text('{"text": "to be or"}\n' * 8)
    options = ("--tokens", 8, "--sequences", 2, "--parts", "kv", "--keep", 0.5)
    for text, noted in (("lines.jsonl", True), ("text.txt", False)):
        done = run("compress", tiny, "--text", text, *options, "--out", text.partition(".")[0])
        assert ("no 16 tokens in a row were held out" in words(done)) == noted


def test_one_text_is_too_few_because_every_second_is_held_out(run: Run, tiny: Path) -> None:
    Path("texts.jsonl").write_text('{"text": "A text of some words."}\n')
    done = run("compress", tiny, "--text", "texts.jsonl", "--out", "new", works=False)
    assert "texts.jsonl: expected at least two texts, because every second text is held out" in str(
        done.exception
    )


@pytest.mark.parametrize("name", ["skips.json", "skips.safetensors"])
@pytest.mark.parametrize("options", [("--out", "new"), ("--preview",)])
def test_a_folder_with_skips_is_refused_before_the_model_is_loaded(
    run: Run, name: str, options: tuple[str, ...]
) -> None:
    Path("skipped").mkdir()
    Path("skipped", name).touch()
    done = run("compress", "skipped", "--text", "text.txt", *options, works=False)
    assert "model skipped: expected a model without λ-skips, got saved λ-skips" in str(done.exception)
    assert not Path("new").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_stopped_command_leaves_no_new_folder(
    run: Run, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_args: object, **_more: object) -> None:
        raise error

    monkeypatch.setattr("rankwise.compression.trials.run_model", stopped)
    Path("there").mkdir()
    for folder, left in (("new", False), ("there", True)):
        done = run("compress", "own.py:build", "--out", folder, works=False)
        assert Path(folder).exists() == left
        if error is MemoryError:
            assert "GPT2LMHeadModel: expected memory for the parts that" in str(done.exception)


def test_sequences_of_one_batch_are_held_out() -> None:
    batch = {"input_ids": torch.arange(10).reshape(5, 2), "scale": torch.tensor(2.0)}
    [own], [other, alone] = split_held_out([batch, {"input_ids": torch.zeros(1, 3)}])
    assert own["input_ids"][:, 0].tolist() == [0, 4, 8]
    assert other["input_ids"][:, 0].tolist() == [2, 6]
    assert other["scale"] == 2
    assert alone["input_ids"].shape == (1, 3)
