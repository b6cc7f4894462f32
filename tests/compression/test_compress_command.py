"""`rankwise compress` as its user meets it."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import gpt2
from tests.compression.test_compress_prices import TwoWidths
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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("own.py").write_text(FACTORY)

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["compress", *map(str, arguments)])

    return call


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_it_says_what_it_cost_and_writes_a_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.compression.evaluate.SECONDS", 0.05)
    done = run("own.py:build", "--keep", 0.5, "--calibrate", 4, "--time", "--out", "half")
    assert done.exit_code == 0, done.output
    record = Compression.load("half")
    assert record.mean_width == 4
    assert record.figures == "held-out data"
    assert math.isfinite(record.loss_before)
    assert record.loss_after != record.loss_before
    assert {one.phase for one in record.latency} == {"prefill", "decode"}
    assert len({one.tokens for one in record.latency if one.phase == "prefill"}) == 2
    assert f"attention KL {record.kl:.4f}" in words(done)
    (curve,) = record.curves
    assert [point.width for point in curve.points] == [1, 2, 4, 6]
    assert [point.kl for point in curve.points] == sorted((point.kl for point in curve.points), reverse=True)
    by_head = [head.kl for head in record.heads]
    assert curve.points[2].kl == pytest.approx(sum(by_head) / len(by_head), rel=1e-3)  # kept: 4 of 8
    page = Path("half/index.html").read_text()
    for said in (
        "Remaining width of each key head",
        "Costs",
        "Savings",
        "rankwise.load_compressed",
        "is unchanged",
    ):
        assert said in page
    model = rw.load_compressed("half")
    assert sum(one.numel() for one in model.parameters()) == record.parameters_after
    again = run("own.py:build", "--out", "half")
    assert "new or empty" in str(again.exception)


def test_the_next_steps_load_and_audit_the_model_whatever_its_folder_is_called(run: Run) -> None:
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    model = gpt2()
    model.resize_token_embeddings(400)
    model.save_pretrained("model")
    ByT5Tokenizer().save_pretrained("model")
    done = run(
        "model", "--text", "text.txt", "--keep", 3 / 8, "--tokens", 32, "--sequences", 4,
        "--out", 'the "small" one',
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    load, audit = (
        next(line for line in done.output.splitlines() if line.startswith(start))
        for start in ("model = ", "rankwise audit ")
    )
    scope = {"rankwise": rw}
    exec(load, scope)
    record = Compression.load('the "small" one')
    assert sum(one.numel() for one in scope["model"].parameters()) == record.parameters_after
    program, *arguments = shlex.split(audit.replace("FILE", "text.txt"), comments=True)
    assert program == "rankwise"
    audited = CliRunner().invoke(app, [*arguments, "--tokens", "32", "--out", "seen"])
    assert audited.exit_code == 0, audited.output


def next_steps(result: Result) -> list[str]:
    starts = ("model = ", "rankwise audit ", "# back: ")
    return [line for line in result.output.splitlines() if line.startswith(starts)]


def test_the_next_steps_of_a_model_of_images_audit_it_on_images(run: Run) -> None:
    import numpy as np
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **sizes)).save_pretrained("model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained("model")
    Path("images").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"images/{number}.png")
    done = run("model", "--images", "images", "--keep", 0.5, "--out", "less")
    assert done.exit_code == 0, done.output
    load, audit, _back = next_steps(done)
    scope: dict[str, Any] = {"rankwise": rw}
    exec(load, scope)
    assert scope["model"].config.hidden_size == 32
    _, *arguments = shlex.split(audit.replace("FOLDER", "images"), comments=True)
    audited = CliRunner().invoke(app, [*arguments, "--out", "seen"])
    assert audited.exit_code == 0, audited.output


def test_the_next_steps_of_a_factory_do_not_audit(run: Run) -> None:
    """The folder has no tokenizer."""
    load, back = next_steps(run("own.py:build", "--keep", 0.5, "--out", "less"))
    assert load == 'model = rankwise.load_compressed("less")'
    assert back.startswith("# back: own.py:build")


def test_the_next_steps_of_a_plain_module_pass_a_new_one(run: Run) -> None:
    Path("plain.py").write_text(
        "import torch\nfrom tests.compression.test_compress_prices import TwoWidths\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    return TwoWidths().eval(), [torch.randn(6, 30, 32) for _ in range(2)]\n"
    )
    done = run("plain.py:build", "--keep", 0.5, "--out", "less")
    assert done.exit_code == 0, done.output
    load, _back = next_steps(done)
    scope: dict[str, Any] = {"rankwise": rw, "model": TwoWidths()}
    exec(load, scope)
    assert sum(x.numel() for x in scope["model"].parameters()) == Compression.load("less").parameters_after


def test_each_part_has_its_own_target(run: Run) -> None:
    done = run(
        "own.py:build", "--keep", "heads=0.75", "--tolerance", "qk=0.05", "--keep", "kv=0.5", "--out", "less"
    )
    assert done.exit_code == 0, done.output
    record = Compression.load("less")
    assert record.parts == ["heads", "qk", "kv"]
    assert sum(head.width > 0 for head in record.heads if head.part == "heads") == 6
    assert record.cache_bytes_after <= 0.5 * record.cache_bytes_before


def test_without_a_model_there_are_no_next_steps_and_a_lower_share_writes_one(run: Run) -> None:
    few = ("own.py:build", "--parts", "heads", "--out", "new")
    done = run(*few, "--keep", 0.99)
    assert "lower --keep" in str(done.exception)
    assert "Nothing was written" in str(done.exception)
    assert "Costs" in done.output
    assert "load_compressed" not in done.output
    assert not Path("new").exists()
    done = run(*few, "--keep", 0.5)
    assert done.exit_code == 0, done.output
    assert "load_compressed" in done.output


def test_a_folder_of_transformers_is_compressed_and_audited(run: Run, tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    model = gpt2()
    model.resize_token_embeddings(400)
    model.save_pretrained("model")
    ByT5Tokenizer().save_pretrained("model")
    Path("model/modules.json").write_text(
        json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "../own"}])
    )
    Path("model/1_Pooling").mkdir()
    Path("model/1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    done = run(
        "model", "--text", "text.txt", "--keep", 3 / 8, "--tokens", 32, "--sequences", 8, "--batch-size", 4,
        "--out", "narrow",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "every other sequence was held out" in words(done)
    assert "sentence-transformers were copied (1_Pooling)" in words(done)
    assert Path("narrow/1_Pooling/config.json").read_text() == Path("model/1_Pooling/config.json").read_text()
    assert Path("narrow/modules.json").exists()
    assert not Path("own").exists()
    assert any("1_Pooling" in note for note in Compression.load("narrow").notes)
    assert rw.load_compressed("narrow").config.use_cache
    audited = CliRunner().invoke(
        app, ["audit", "narrow", "--text", "text.txt", "--tokens", "32", "--out", "seen"]
    )
    assert audited.exit_code == 0, audited.output
    again = run("narrow", "--text", "text.txt", "--tokens", 32, "--out", "twice")
    assert "not compressed yet" in str(again.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--keep", 1.5), "in (0, 1)"),
        (("--keep", 0), "in (0, 1)"),
        (("--keep", 0.5, "--tolerance", 0.1), "a share to keep or a tolerance, got both"),
        (("--parts", "heads,qqk"), "one of heads, qk, rotary, kv"),
        (("--out", "text.txt"), "a file"),
        (("--keep", "half"), "--keep: expected a number, or PART=NUMBER, got half"),
        (("--keep", "kv=0.5", "--keep", "kv=0.4"), "one PART=NUMBER per part, got kv=0.5 and kv=0.4"),
        (("--tolerance", "0.1", "--tolerance", "kv=0.4"), "--tolerance: expected one number"),
        (("--keep", "kv=0.5", "--parts", "kv"), "Omit --parts"),
        (("--keep", "kv=0.5", "--tolerance", "0.1"), "`tolerance`: expected a mapping"),
        (("--keep", "vk=0.5"), "one of heads, qk, rotary, kv, got 'vk'"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: tuple[object, ...], said: str) -> None:
    done = run("own.py:build", *arguments)
    assert done.exit_code != 0
    assert said in str(done.exception)


def test_data_that_cannot_be_used_is_named(run: Run) -> None:
    Path("short.txt").write_text("to be")
    both = run("own.py:build", "--text", "short.txt", "--images", ".")
    assert "--text and --images" in str(both.exception)
    short = run("own.py:build", "--text", "short.txt", "--tokens", 32)
    assert "longer text" in str(short.exception)


def test_where_nothing_can_go_the_tables_are_shown_and_nothing_is_written(run: Run) -> None:
    done = run("own.py:build", "--parts", "heads", "--keep", 0.99, "--out", "less")
    assert done.exit_code == 1
    assert "0 of" in words(done)
    assert "0 of 8 heads removed" in words(done)
    assert "Raise --tolerance" in str(done.exception)
    assert not Path("less/model.safetensors").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_where_nothing_comes_of_it_no_folder_is_left(
    run: Run, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_args: object, **_more: object) -> None:
        raise error

    monkeypatch.setattr("rankwise.compression.layers.run_model", stopped)
    Path("there").mkdir()
    for folder, left in (("new", False), ("there", True)):
        done = run("own.py:build", "--out", folder)
        assert done.exit_code != 0
        assert Path(folder).exists() == left
        if error is MemoryError:
            assert "GPT2LMHeadModel: expected memory for a batch" in str(done.exception)


def test_a_head_of_nan_is_named_and_a_layer_without_memory_keeps_what_is_done(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_more: object) -> None:
        raise MemoryError

    broken = "\n    model.transformer.h[1].attn.c_attn.weight.data[:, 8:16] = float('nan')\n"
    Path("broken.py").write_text(
        FACTORY.replace("return gpt2(), ", "model = gpt2()" + broken + "    return model, ")
    )
    done = run("broken.py:build", "--keep", 0.5, "--out", "new")
    assert "layer 'transformer.h.1.attn.c_attn': expected finite weights" in str(done.exception)
    assert not Path("new").exists()
    monkeypatch.setattr("rankwise.compression.qk_solve.calibrate", full)
    done = run("own.py:build", "--keep", 0.5, "--calibrate", 5, "--out", "new")
    assert done.exit_code == 130
    assert "INCOMPLETE" in done.output
    assert "for want of memory at transformer.h.0.attn" in words(done)
    assert sum(one.numel() for one in rw.load_compressed("new").parameters()) == (
        Compression.load("new").parameters_after
    )


def test_names_and_numbers_stay_whole_on_a_narrow_console(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run("own.py:build", "--parts", "qk,kv,heads", "--keep", 0.4, "--out", "less")
    assert done.exit_code == 0, done.output
    record = Compression.load("less")
    assert record.parts == ["heads", "qk", "kv"]
    for layer in record.layers:
        assert f"transformer.h {layer.layer} " in done.output or f"{layer.layer}  " in done.output
        assert f"{layer.output_error:.4f}" in done.output


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "from rankwise.compression import load_compressed\n"
            "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
            "print('rankwise' in AUTO_QUANTIZER_MAPPING)",
            "True",
        ),
        (
            "from rankwise.compression import Compression, HeadWidth\n"
            "from rankwise.report.compression_report import compression_document\n"
            "import sys; print({'torch', 'transformers'} & set(sys.modules))",
            "set()",
        ),
    ],
    ids=["loader", "records"],
)
def test_imports_in_a_new_process(code: str, said: str) -> None:
    """`load_compressed` registers the loader; records import neither torch nor transformers."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == said, done.stderr[-2000:]


def test_few_sequences_in_one_batch_are_held_out_too() -> None:
    batch = {"input_ids": torch.arange(10).reshape(5, 2), "scale": torch.tensor(2.0)}
    [own, alone], [other] = split_held_out([batch, {"input_ids": torch.zeros(1, 3)}])
    assert own["input_ids"][:, 0].tolist() == [0, 4, 8]
    assert other["input_ids"][:, 0].tolist() == [2, 6]
    assert other["scale"] == 2
    assert alone["input_ids"].shape == (1, 3)
