"""`rankwise skip` as its user meets it: real models in folders, real files, what it writes and says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from rankwise.cli import skip
from rankwise.errors import InputError, RankwiseError
from rankwise.surgery import (
    SkipError,
    add_lambda_skip,
    apply_saved_skips,
    has_skips,
    remove_lambda_skip,
    save_skips,
)

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 40
Run = Callable[..., Result]
APP = typer.Typer()
APP.command()(skip.command)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in an empty folder with a text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "text.txt").write_text(TEXT)

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(APP, [str(argument) for argument in arguments])

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model over bytes, with its tokenizer."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(path)
    return path


SMALL = ("--tokens", 16, "--sequences", 6, "--batch-size", 2)


def test_fits_the_skips_alone_and_says_what_it_did(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run(
        folder, "--init", 0.5, "--learn-on", "text.txt", "--steps", 8, "--lr", 0.05, "--out", "new", *SMALL
    )
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "new" / "skips.json").read_text())
    before, after = facts["fitted"]["loss"]
    assert before != after
    assert f"{before:.4f} → {after:.4f}" in result.output
    scales = load_file(tmp_path / "new" / "skips.safetensors")
    assert list(scales) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for name, value in scales.items():
        start, end = facts["fitted"]["scales"][name]
        assert start == 0.5
        assert end == pytest.approx(value.item())
        assert end != start
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "new"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for words in ("λ before", "λ after", "loss, held out", "μ/‖Y‖ by layer", "new/skips.json"):
        assert words in result.output


def test_what_it_writes_can_be_loaded_and_changed_again(run: Run, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert run(folder, "--init", 2, "--text", "text.txt", "--out", "new", *SMALL).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    skips = apply_saved_skips(model, tmp_path / "new")
    assert skips is not None
    assert [value.item() for value in skips.values()] == [2.0, 2.0]
    # again, without --init: those saved stay; with it and --sites: some change
    assert run("new", "--text", "text.txt", "--out", "same", *SMALL).exit_code == 0
    assert [v.item() for v in load_file(tmp_path / "same" / "skips.safetensors").values()] == [2.0, 2.0]
    site = ("--sites", "model.layers.1")
    assert run("new", "--init", 1, *site, "--text", "text.txt", "--out", "other", *SMALL).exit_code == 0
    assert [v.item() for v in load_file(tmp_path / "other" / "skips.safetensors").values()] == [2.0, 1.0]


def saved_in_layer_0(folder: Path, per: str = "layer") -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    add_lambda_skip(model, init=0.75, per=per, sites="model.layers.0")  # type: ignore[arg-type]
    save_skips(model, "some")
    remove_lambda_skip(model)
    model.save_pretrained("some")
    AutoTokenizer.from_pretrained(folder).save_pretrained("some")


def numbers(folder: str) -> dict[str, float]:
    return {name.split(".")[2]: v.item() for name, v in load_file(f"{folder}/skips.safetensors").items()}


def test_sites_that_have_no_saved_skip_get_one(run: Run, folder: Path) -> None:
    saved_in_layer_0(folder)
    given = ("--text", "text.txt", "--out", "new", *SMALL)
    result = run("some", "--init", 2, "--sites", "model.layers.1", *given)
    assert result.exit_code == 0, result.output
    assert numbers("new") == {"0": 0.75, "1": 2}
    result = run("some", "--sites", "model.layers.2", *given)
    assert isinstance(result.exception, SkipError)
    assert "Known: model.layers.0, model.layers.1" in str(result.exception)


@pytest.mark.parametrize("start", ["saved", "new"])
def test_sites_are_fitted_alone(run: Run, folder: Path, start: str) -> None:
    fit = ("--learn-on", "text.txt", "--steps", 2, "--lr", 0.1, *SMALL)
    assert run(folder, "--init", 0.5, "--text", "text.txt", "--out", "saved", *SMALL).exit_code == 0
    where = folder if start == "new" else "saved"
    result = run(where, "--init", 0.5, "--sites", "model.layers.1", *fit, "--out", "new")
    assert result.exit_code == 0, result.output
    fitted = numbers("new")
    assert fitted.pop("1") != 0.5
    assert fitted == ({} if start == "new" else {"0": 0.5})
    # what was frozen in one fit learns in the next
    assert run("new", *fit, "--out", "after").exit_code == 0
    assert all(numbers("after")[name] != value for name, value in numbers("new").items())


@pytest.mark.parametrize(("saved", "asked"), [("layer", "channel"), ("channel", "layer")])
def test_saved_skips_keep_their_kind(run: Run, folder: Path, saved: str, asked: str) -> None:
    saved_in_layer_0(folder, saved)
    given = ("--text", "text.txt", "--certify", *SMALL)
    result = run("some", "--per", asked, *given)
    assert isinstance(result.exception, InputError)
    assert f"--per {asked}: wanted --per {saved}, as the λ saved in some" in str(result.exception)
    assert run("some", *given).exit_code == 0
    assert run("some", "--per", saved, *given).exit_code == 0


def test_names_the_shards_it_writes(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model-of-mine.txt").write_text("older")
    whole = LlamaForCausalLM.save_pretrained
    monkeypatch.setattr(
        LlamaForCausalLM, "save_pretrained", lambda self, out: whole(self, out, max_shard_size="20KB")
    )
    result = run(folder, "--text", "text.txt", "--out", "new", *SMALL)
    assert result.exit_code == 0, result.output
    said = {line.removeprefix("wrote: new/") for line in result.output.splitlines() if "wrote: new/" in line}
    shards = {path.name for path in (tmp_path / "new").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert said >= shards | {"model.safetensors.index.json"}
    assert not said & {"model.safetensors", "model-of-mine.txt"}


def test_certifies_without_writing(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--text", "text.txt", "--certify", *SMALL)
    assert result.exit_code == 0, result.output
    for words in ("what each layer does", "least |λ|", "Eq. 7", "sound", "model.layers: keeps"):
        assert words in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_certificates_are_written_beside_the_skips(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--text", "text.txt", "--certify", "--a", 0.25, "--out", "new", *SMALL)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "new" / "certificate.json").read_text())["a"] == 0.25


def test_a_masked_language_model_learns_too(run: Run, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, ByT5Tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(vocab_size=300, **sizes)).save_pretrained("bert")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained("bert")
    result = run("bert", "--learn-on", "text.txt", "--steps", 2, "--out", "new", *SMALL)
    assert result.exit_code == 0, result.output
    assert has_skips(tmp_path / "new")


def test_a_fit_that_is_lost_writes_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run(
        folder, "--learn-on", "text.txt", "--steps", 1, "--lr", "1e30", "--out", "new", *SMALL
    )  # fmt: skip
    assert isinstance(result.exception, SkipError)
    assert "loss after step 1" in str(result.exception)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--text", "text.txt"), InputError, "what to do: wanted --out DIR, --certify, or both"),
        (("--text", "text.txt", "--certify", "--per", "chanel"), InputError, "Did you mean channel"),
        (("--text", "text.txt", "--certify", "--init", "nan"), SkipError, "`init`: wanted a finite number"),
        (("--text", "text.txt", "--certify", "--sites", "model.layer.0"), SkipError, "Did you mean"),
        (("--text", "text.txt", "--certify", "--a", "1.5"), RankwiseError, "`a`: wanted a number between"),
        (("--certify", "--lr", "-1"), InputError, "--lr: wanted a finite number above 0, got -1"),
        (("--certify", "--lr", "inf"), InputError, "--lr: wanted a finite number above 0, got inf"),
        (("--certify",), InputError, "wanted one of --text FILE"),
        (("--learn-on", "text.txt", "--sequences", "1", "--certify"), InputError, "two sequences or more"),
    ],
    ids=[
        "nothing to do",
        "per",
        "init",
        "sites",
        "a",
        "rate below 0",
        "rate without end",
        "no data",
        "one sequence",
    ],
)
def test_what_is_refused(run: Run, folder: Path, arguments: tuple[str, ...], error: type, words: str) -> None:
    result = run(folder, "--tokens", 16, *arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, error)
    assert words in str(result.exception)


def test_skips_of_another_model_in_the_folder(run: Run, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48
    )
    other = LlamaForCausalLM(config)
    add_lambda_skip(other)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained("mixed")
    AutoTokenizer.from_pretrained(folder).save_pretrained("mixed")
    save_skips(other, "mixed")
    result = run("mixed", "--text", "text.txt", "--certify", *SMALL)
    assert isinstance(result.exception, SkipError)
    assert "a site 'model.layers.2.self_attn'" in str(result.exception)


def test_a_loss_that_is_lost_is_said(run: Run, folder: Path) -> None:
    result = run(
        folder, "--learn-on", "text.txt", "--steps", 3, "--lr", "1e30", "--certify", "--tokens", 16,
        "--sequences", 6,
    )  # fmt: skip
    assert isinstance(result.exception, SkipError)
    assert "wanted a finite number" in str(result.exception)
    assert "Use a lower learning rate" in str(result.exception)
