"""`rankwise audit` with real models in folders: files, output, exit statuses and refusals."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.nets import NETS
from typer.testing import Result

import rankwise as rw
from rankwise.auditing import Audit, remedy_text, text_batches
from rankwise.cli.audit import parse_importance
from rankwise.errors import InputError, RankwiseError

Run = Callable[..., Result]
DATA = ("--text", "text.txt", "--tokens", 16)


def audit_of(tmp_path: Path) -> Audit:
    return Audit.load(tmp_path / "rankwise-audit")


def test_writes_report_and_says_where(run: Run, tiny: Path, tmp_path: Path) -> None:
    result = run("audit", tiny, *DATA, "--sequences", 3, "--batch-size", 2)
    assert result.exit_code == 0, result.output
    audit = audit_of(tmp_path)
    assert [len(audit.heads), len(audit.states), audit.heads[0].sequences] == [4, 3, 3]
    assert audit.provenance.batches == 2
    assert "16 tokens" in audit.provenance.data
    for name in ("audit.json", "index.html"):
        assert (tmp_path / "rankwise-audit" / name).stat().st_size > 0
        assert name in result.output


def test_initialization_is_shown_next_to_the_model(run: Run, tiny: Path, tmp_path: Path) -> None:
    result = run("audit", tiny, *DATA, "--sequences", 2, "--at-init", 2, "--verbose")
    assert result.exit_code == 0, result.output
    audit = audit_of(tmp_path)
    assert audit.at_init is not None
    assert audit.at_init.seeds == [0, 1]
    assert all(head.at_init.seeds == 2 for head in audit.heads)
    said = " ".join(result.output.split())
    assert "at initialization, built from its configuration, on the same data, seeds 0, 1" in said


def test_a_chosen_head_keeps_its_matrix_with_the_tokens(run: Run, tiny: Path, tmp_path: Path) -> None:
    data = (*DATA, "--sequences", 2)
    assert run("audit", tiny, *data, "--attention-maps", "1:0").exit_code == 0
    audit = audit_of(tmp_path)
    assert [(head.layer, head.head) for head in audit.heads if head.attention_map] == [(1, 0)]
    assert len(audit.texts["input_ids"]) == audit.head(1, 0).attention_map.tokens == 16
    assert "".join(audit.texts["input_ids"]) == "It␣is␣a␣truth␣un"
    assert run("audit", tiny, *data).exit_code == 0
    assert not any(head.attention_map for head in audit_of(tmp_path).heads)


def test_windows_longer_than_the_model_are_cut_with_a_note(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert run("audit", tiny, "--text", "text.txt", "--tokens", 500, "--sequences", 1).exit_code == 0
    audit = audit_of(tmp_path)
    assert audit.heads[0].tokens == 64
    assert any("64 tokens" in note for note in audit.provenance.notes)


def test_rows_of_a_jsonl_file_are_padded_if_the_model_takes_a_mask(run, tiny, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "x" * n}) for n in (25, 9, 4)))
    for model, special in (
        (tiny, 1),
        (f"{NETS}:build", 0),
    ):  # the tokenizer adds </s>; padding is not counted
        assert run("audit", model, "--text", "rows.jsonl", "--tokens", 40).exit_code == 0
        audit = audit_of(tmp_path)
        assert audit.heads[0].tokens == pytest.approx((25 + 9 + 4) / 3 + special)
        assert any("padding" in note for note in audit.provenance.notes) == (special == 0)


def test_an_encoder_decoder_model_is_audited(run: Run, tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=259, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained("t5")
    ByT5Tokenizer(extra_ids=0).save_pretrained("t5")
    result = run("audit", "t5", "--text", "text.txt", "--tokens", 12, "--sequences", 2)
    assert result.exit_code == 0, result.output
    heads = audit_of(tmp_path).heads
    assert {(head.stack, head.cross) for head in heads} == {
        ("encoder.block", False), ("decoder.block", False), ("decoder.block", True),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_the_part_that_reads_the_data_is_audited(run: Run, tmp_path: Path, name: str) -> None:
    import transformers

    image = pytest.importorskip("PIL.Image")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    text = {**sizes, "vocab_size": 300, "max_position_embeddings": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 8}
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    model.save_pretrained("both")
    tokenizer, photo = (
        transformers.ByT5Tokenizer(extra_ids=0),
        image.effect_noise((32, 32), 60).convert("RGB"),
    )
    tokenizer.save_pretrained("both")
    photo.save(tmp_path / "photo.png")
    given = {"text": DATA, "vision": ("--images", "photo.png")}
    for kind, data in given.items():
        result = run("audit", "both", *data, "--sequences", 1, "--out", kind)
        assert result.exit_code == 0, result.output
        assert f"only {kind}_model of {name}Model was audited" in " ".join(result.stdout.split())
    pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None] / 127.5 - 1
    words = text_batches(Path("text.txt").read_text(), tokenizer, tokens=16, sequences=1)
    whole = rw.audit(model, [next(words) | {"pixel_values": pixels}])
    for kind in given:
        own = [head for head in whole.heads if head.stack.startswith(f"{kind}_model")]
        found = Audit.load(tmp_path / kind).heads
        assert [head.effective_rank for head in found] == pytest.approx([head.effective_rank for head in own])
        assert len(found) >= 4


def test_a_vision_model_is_audited_on_images(run: Run, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained("vit")
    (tmp_path / "photos").mkdir()
    for number in range(3):
        image.effect_noise((40, 50), 60 + number).convert("RGB").save(tmp_path / "photos" / f"{number}.png")
    result = run("audit", "vit", "--images", "photos", "--sequences", 3)
    assert result.exit_code == 0, result.output
    assert (audit_of(tmp_path).heads[0].sequences, audit_of(tmp_path).heads[0].tokens) == (3, 17)


def test_a_factory_reads_bytes_or_its_own_batches(run: Run, tmp_path: Path) -> None:
    assert (
        run("audit", f"{NETS}:build", "--text", "text.txt", "--tokens", 20, "--sequences", 2).exit_code == 0
    )
    audit = audit_of(tmp_path)
    assert audit.heads[0].tokens == 20
    assert any("bytes" in note for note in audit.provenance.notes)
    assert run("audit", f"{NETS}:with_batches").exit_code == 0
    assert audit_of(tmp_path).heads[0].tokens == 9


@pytest.mark.parametrize("option", ["--sequences", "--tokens", "--batch-size"])
@pytest.mark.parametrize("command", ["audit", "compress"])
def test_sizes_of_data_are_refused_for_the_batches_of_a_factory(run: Run, command: str, option: str) -> None:
    result = run(command, f"{NETS}:with_batches", option, 8)
    assert f"{option}: expected no such option for the batches of {NETS}:with_batches, got 8" in str(
        result.exception
    )


def test_fail_on_a_finding_that_is_absent_does_not_fail(run: Run, tiny: Path) -> None:
    assert run("audit", tiny, *DATA, "--sequences", 1, "--fail-on", "nonfinite").exit_code == 0


@pytest.mark.parametrize("options", [(), ("--importance",), ("--importance", "exact", "--resume")])
def test_nan_weights_fail_the_gate_with_and_without_importance(run, tiny, tmp_path, options) -> None:
    """Importance fails if no loss is finite; the finding still sets the exit status."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(math.nan)
    model.save_pretrained("broken")
    AutoTokenizer.from_pretrained(tiny).save_pretrained("broken")
    asked = ("audit", "broken", *DATA, *options)
    result = run(*asked, "--fail-on", "NONFINITE")
    assert result.exit_code == 3, result.output
    assert "found NONFINITE (--fail-on)" in result.stderr
    assert ("Look for NaN" in result.stderr) == bool(options)
    [page] = (tmp_path / "rankwise-audit").rglob("index.html")
    assert "NONFINITE" in page.read_text()
    if options:
        assert isinstance(run(*asked, "--fail-on", "SINK").exception, RankwiseError)


@pytest.mark.parametrize(
    ("how", "demo", "exact"),
    [(None, True, True), ("auto", True, True), ("estimate", True, False), ("auto", False, None)],
)
def test_bare_importance_is_exact_for_the_demo(how, demo, exact) -> None:
    assert parse_importance(how, demo, 0.01, "auto").exact is exact


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_loaded(run: Run, tiny: Path, tmp_path: Path, dtype: str) -> None:
    assert run("audit", tiny, *DATA, "--dtype", dtype).exit_code == 0
    assert audit_of(tmp_path).provenance.model_dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "none.txt"], "no such file"),
        (["--text", "empty.txt"], "empty"),
        (["--text", "latin.txt"], "UTF-8"),
        (["--text", "short.txt"], "--tokens"),
        (["--images", "photos"], "expected a model that reads images, got one that reads input_ids"),
        ([], "expected one of --text, --images, --dataset, got none. Pass one, such as --text FILE"),
        (["--dataset", "./none.csv"], "got no such file"),
        (["--text", "text.txt", "--dataset", "imdb"], "--text and --dataset"),
        (["--text", "text.txt", "--fail-on", "COLAPSE"], "Did you mean COLLAPSE"),
        (["--text", "text.txt", "--delta", "-1"], "delta"),
        (["--text", "text.txt", "--attention-maps", "3;7"], "flagged"),
        (["--text", "text.txt", "--device", "gpu0"], "device"),
        (["--text", "text.txt", "--dtype", "float99"], "float99"),
        (["--text", "text.txt", "--out", "text.txt/report"], "can be written"),
        (["--text", "text.txt", "--out", "text.txt"], "got a file. Choose"),
    ],
)
def test_wrong_options_and_data_are_refused(run, tiny, tmp_path, arguments, says) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes("Málaga".encode("latin-1") * 50)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    result = run("audit", tiny, *arguments)
    assert isinstance(result.exception, RankwiseError), result.output
    assert says in str(result.exception)
    assert not (tmp_path / "rankwise-audit").exists()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere/model", "Hugging Face name"),
        (f"{NETS}:missing", "has no attribute 'missing'"),
        (f"{NETS}:wrong", "torch.nn.Module"),
        (f"{NETS}:broken", "no weights"),
        (f"{NETS}:leaving", "SystemExit: no license"),
        ("absent.py:build", "a factory without arguments in a Python file, got FileNotFoundError"),
        ("empty-folder", "config.json"),
        ("damaged", r"damaged.*[^.]\. Save it again"),
        ("no-weights", r"no-weights.*[^.]\. Save it again"),
    ],
)
def test_models_that_cannot_be_loaded_are_refused(run, tiny, tmp_path, spec, says) -> None:
    import shutil

    (tmp_path / "empty-folder").mkdir()
    shutil.copytree(tiny, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x00" * 100)
    shutil.copytree(tiny, tmp_path / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    result = run("audit", spec, *DATA)
    assert isinstance(result.exception, RankwiseError), result.output
    assert re.search(says, str(result.exception))


def test_a_disk_that_fills_up_late_loses_nothing(run, tiny, monkeypatch) -> None:
    def full(self: Audit, path: Any) -> Path:
        raise InputError("report", expected="room", got="No space left on device", fix="Make room.")

    monkeypatch.setattr(Audit, "to_html", full)
    result = run("audit", tiny, *DATA)
    assert "No space left" in str(result.exception)
    rescued = str(result.exception).split("kept in ")[1].rstrip(".")
    assert len(Audit.load(rescued).heads) == 4


def test_a_forward_that_fails_later_writes_the_batches_before_it(run: Run, tmp_path: Path) -> None:
    result = run("audit", f"{NETS}:late")
    assert isinstance(result.exception, RankwiseError)
    assert "batch 2" in str(result.exception)
    audit = audit_of(tmp_path)
    assert not audit.complete
    assert audit.heads[0].sequences == 1
    assert "INCOMPLETE" in result.output


def test_ctrl_c_writes_the_finished_batches_but_not_over_a_finished_audit(run: Run, tmp_path: Path) -> None:
    assert run("audit", f"{NETS}:with_batches").exit_code == 0
    record = json.loads((tmp_path / "rankwise-audit" / "audit.json").read_text())
    assert record.pop("complete")  # older files lack it
    (tmp_path / "rankwise-audit" / "audit.json").write_text(json.dumps(record))
    finished = {path: path.read_bytes() for path in (tmp_path / "rankwise-audit").iterdir()}
    result = run("audit", f"{NETS}:interrupted")
    assert result.exit_code == 130
    assert "audit.json is complete and kept" in result.stderr
    assert all(path.read_bytes() == content for path, content in finished.items())
    assert not Audit.load(tmp_path / "rankwise-audit" / "incomplete").complete
    assert run("audit", f"{NETS}:interrupted", "--out", "new").exit_code == 130
    assert not Audit.load(tmp_path / "new").complete


def test_help_names_options_and_shows_examples(run: Run) -> None:
    text = run("audit", "--help").output
    assert "NAME[@config][:split[:column]]" in text
    for words in (
        "--text",
        "--batch-size",
        "--fail-on",
        "Examples",
        "\n   rankwise audit gpt2 --text book.txt",
    ):
        assert words in text


def test_markup_in_names_has_no_effect(run: Run, tiny: Path) -> None:
    result = run("audit", tiny, *DATA, "--out", "x [bold]y")
    assert result.exit_code == 0
    assert "x [bold]y/audit.json" in result.output


def test_a_reader_that_leaves_early_loses_nothing(run: Run, tmp_path: Path, monkeypatch) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("rankwise.report.print_document", closed)
    assert run("audit", f"{NETS}:with_batches").exit_code == 0
    assert len(audit_of(tmp_path).heads) == 4


def test_a_collapse_is_followed_by_a_recommended_lambda(run: Run, tmp_path: Path) -> None:
    result = run("audit", f"{NETS}:collapsing")
    assert result.exit_code == 0, result.output
    audit = audit_of(tmp_path)
    assert audit.provenance.batches == 2
    (finding,) = [one for one in audit.findings if one.code == "COLLAPSE"]
    assert "lambda_tried" in finding.evidence
    assert finding.remedy is not None
    assert f"`rankwise skip {NETS}:collapsing --lambda " in remedy_text(finding.remedy, audit.provenance)
    said = "the model ran again on the first batch, 2 sequences, for λ against COLLAPSE"
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("where", "name", "error", "status", "note"),
    [
        (
            "skips.recommendation",
            "certify_places",
            RuntimeError("lost"),
            0,
            "no λ is named for COLLAPSE: lost",
        ),
        (
            "cli.audit_job",
            "recommend",
            KeyboardInterrupt(),
            130,
            "not looked at: interrupted from the keyboard",
        ),
    ],
)
def test_a_failed_or_interrupted_recommendation_does_not_cost_the_audit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, error: BaseException,
    status: int, note: str,
) -> None:  # fmt: skip
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(f"rankwise.{where}.{name}", failing)
    result = run("audit", f"{NETS}:collapsing")
    assert result.exit_code == status, result.output
    assert note in " ".join(result.output.split())
    audit = audit_of(tmp_path)
    assert (audit.complete, audit.provenance.batches) == (True, 2)
    [finding] = [finding for finding in audit.findings if finding.code == "COLLAPSE"]
    assert "lambda_tried" not in finding.evidence


def test_a_tokenizer_of_another_folder(run: Run, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained("bare")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(vocab_size=300, **sizes)).save_pretrained("bert")
    for folder in ("bare", "bert"):  # transformers would create an empty tokenizer for BERT
        result = run("audit", folder, *DATA)
        assert isinstance(result.exception, RankwiseError)
        assert "no file of a tokenizer in this folder. Pass --tokenizer" in str(result.exception)
    result = run("audit", "bare", *DATA, "--tokenizer", "nowhere")
    assert str(result.exception).startswith("tokenizer nowhere: expected")
    assert run("audit", "bare", *DATA, "--tokenizer", tiny).exit_code == 0
    mine = audit_of(tmp_path)
    assert run("audit", tiny, *DATA).exit_code == 0
    assert [head.numerical_rank for head in mine.heads] == [
        head.numerical_rank for head in audit_of(tmp_path).heads
    ]
