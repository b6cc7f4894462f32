"""`rankwise skip` as its user meets it: real models in folders, real files, what it writes and says."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from rankwise import skips
from rankwise.cli import load_data as subject_inputs
from rankwise.cli import load_model as subjects
from rankwise.cli import skip
from rankwise.cli.load_data import LoadedData
from rankwise.cli.load_model import LoadedModel
from rankwise.errors import InputError, RankwiseError
from rankwise.skips import (
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


def test_a_negative_number_is_set(run: Run, folder: Path) -> None:
    """The remedy of a COLLAPSE has one if λ is negative."""
    result = run(folder, "--init", -2, "--text", "text.txt", "--out", "new", *SMALL)
    assert result.exit_code == 0, result.output
    assert numbers("new") == {"0": -2, "1": -2}


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
    assert f"--per {asked}: expected --per {saved}, as the λ saved in some" in str(result.exception)
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
    names = [line.removeprefix("wrote: new/") for line in result.output.splitlines() if "model-0" in line]
    assert names == sorted(names)
    said = {line.removeprefix("wrote: new/") for line in result.output.splitlines() if "wrote: new/" in line}
    shards = {path.name for path in (tmp_path / "new").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert said >= shards | {"model.safetensors.index.json"}
    assert not said & {"model.safetensors", "model-of-mine.txt"}


def test_certifies_without_writing(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--text", "text.txt", "--certify", *SMALL)
    assert result.exit_code == 0, result.output
    for words in ("What each layer does", "Least |λ|", "any mixing", "model.layers: keeps"):
        assert words in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_certificates_are_written_beside_the_skips(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run(
        folder, "--text", "text.txt", "--init", 0.5, "--certify", "--a", 0.25, "--out", "new", *SMALL
    )
    assert result.exit_code == 0, result.output
    certificate = json.loads((tmp_path / "new" / "certificate.json").read_text())
    assert certificate["a"] == 0.25
    assert [layer["lambda_value"] for layer in certificate["layers"]] == [0.5, 0.5]
    named = [Path(line).name for line in result.output.splitlines()[-2:]]
    assert named == ["certificate.json", "certificate.html"]
    assert "Certificate of λ-skips" in (tmp_path / "new" / "certificate.html").read_text()
    result = run(folder, "--text", "text.txt", "--init", 2, "--out", "new", *SMALL)
    assert result.exit_code == 0, result.output
    assert not list((tmp_path / "new").glob("certificate.*"))  # they were of other λ


def test_a_certificate_that_fails_costs_no_fit(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "certificate.json").write_text("of other λ")
    called(monkeypatch, skips, "certify_skip", Stop())
    fit = ("--learn-on", "text.txt", "--steps", 2, "--lr", 0.1, "--out", "new", "--certify")
    result = run(folder, *fit, *SMALL)
    assert isinstance(result.exception, Stop)
    assert all(value != 1 for value in numbers("new").values())
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written >= {"model.safetensors", "skips.json"}
    assert "certificate.json" not in written


def test_a_masked_language_model_learns_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertConfig, BertForMaskedLM, ByT5Tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(vocab_size=300, **sizes)).save_pretrained("bert")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained("bert")
    masks = called(monkeypatch, skips, "fit_skips")
    losses = called(monkeypatch, skips, "mean_loss")
    result = run("bert", "--learn-on", "text.txt", "--steps", 2, "--out", "new", *SMALL)
    assert result.exit_code == 0, result.output
    assert has_skips(tmp_path / "new")
    assert {call["mask_token"] for call in (*masks, *losses)} == {tokenizer.mask_token_id}


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
        (("--text", "text.txt"), InputError, "what to do: expected --out DIR, --certify, or both"),
        (("--text", "text.txt", "--certify", "--per", "chanel"), InputError, "Did you mean channel"),
        (("--text", "text.txt", "--certify", "--init", "nan"), SkipError, "`init`: expected a finite number"),
        (("--text", "text.txt", "--certify", "--sites", "model.layer.0"), SkipError, "Did you mean"),
        (
            ("--text", "text.txt", "--certify", "--a", "1.5"),
            RankwiseError,
            "`a`: expected a number in (0, 1), got 1.5",
        ),
        (
            ("--learn-on", "a.txt", "--text", "b.txt", "--certify"),
            InputError,
            "--learn-on a.txt --text b.txt: expected one of the two",
        ),
        (("--certify", "--lr", "-1"), InputError, "--lr: expected a finite number above 0, got -1"),
        (("--certify", "--lr", "inf"), InputError, "--lr: expected a finite number above 0, got inf"),
        (("--certify",), InputError, "expected one of --text FILE"),
        (("--learn-on", "text.txt", "--sequences", "1", "--certify"), InputError, "two sequences or more"),
    ],
    ids=[
        "nothing to do",
        "per",
        "init",
        "sites",
        "a",
        "two texts",
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


@pytest.mark.parametrize("wrong", [("--a", 1.5), ("--text", "b")], ids=["a", "two texts"])
def test_nothing_is_loaded_for_what_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: tuple[object, ...]
) -> None:
    loads = called(monkeypatch, subjects, "load_model", Stop())
    result = run("some", "--learn-on", "text.txt", "--certify", "--out", "new", *wrong)
    assert isinstance(result.exception, RankwiseError)
    assert not loads
    assert not (tmp_path / "new").exists()


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
    assert "expected a finite number" in str(result.exception)
    assert "Use a lower learning rate" in str(result.exception)


# --- which sequences are learnt from, and which are kept ----------------------------------------------------


def split(batches: list[Any], model: nn.Module | None = None, **how: Any) -> tuple[list[Any], list[Any]]:
    subject = LoadedModel(nn.Linear(1, 1) if model is None else model, "tiny")
    return skip._split(LoadedData(batches, "made up"), subject, **how)


def rows(batches: list[dict[str, Tensor]]) -> list[int]:
    """The first token of every sequence."""
    return [row[0] for batch in batches for row in batch["input_ids"].tolist()]


def sequences(lengths: list[int]) -> list[dict[str, Tensor]]:
    """One in a batch, told apart by what they hold."""
    full = [torch.full((1, length), at) for at, length in enumerate(lengths)]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in full]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("number", [2, 5, 6, 7, 23])
def test_every_fifth_sequence_is_kept_and_the_others_are_learnt_from(number: int, size: int) -> None:
    learning, held = split(sequences([4] * number), learn=True, batch_size=size)
    assert rows(held) == list(range(0, number, 5))
    assert rows(learning) == [at for at in range(number) if at % 5]
    assert {len(batch["input_ids"]) for batch in held} == {1}
    assert [len(batch["input_ids"]) for batch in learning[:-1]] == [size] * (len(learning) - 1)
    assert 1 <= len(learning[-1]["input_ids"]) <= size
    assert all(batch["attention_mask"].shape == batch["input_ids"].shape for batch in learning)


def test_sequences_of_different_lengths_are_not_joined() -> None:
    given = sequences([4, 4, 3, 4])
    learning, held = split(given, learn=True, batch_size=2)
    assert (rows(held), rows(learning)) == ([0], [1, 2, 3])


def test_where_nothing_is_learnt_all_is_measured_on() -> None:
    assert [rows(part) for part in split(sequences([4] * 7), learn=False, batch_size=2)] == [[], [*range(7)]]


def test_batches_go_where_the_model_is() -> None:
    _, held = split(sequences([4]), nn.Linear(1, 1, device="meta"), learn=False, batch_size=1)
    assert {value.device.type for value in held[0].values()} == {"meta"}


# --- every option goes where it belongs ---------------------------------------------------------------------


class Stop(Exception):
    """Enough is known."""


def called(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, then: Any = None) -> list[Any]:
    """The arguments of every call of a function, by name; it goes on, unless it is told what to raise."""
    calls: list[dict[str, Any]] = []
    whole = getattr(module, name)

    def note(*args: Any, **settings: Any) -> Any:
        bound = inspect.signature(whole).bind(*args, **settings)
        bound.apply_defaults()
        calls.append(dict(bound.arguments))
        if then is not None:
            raise then
        return whole(*args, **settings)

    monkeypatch.setattr(module, name, note)
    return calls


@pytest.mark.parametrize(
    ("options", "loads"),
    [
        (
            (),
            {
                "revision": None,
                "dtype": "auto",
                "device": "cpu",
                "device_map": None,
                "offload_folder": None,
                "trust_remote_code": False,
                "tokenizer": None,
            },
        ),
        (
            ("--revision", "v1", "--dtype", "float16", "--device", "cuda:1", "--trust-remote-code"),
            {
                "revision": "v1",
                "dtype": "float16",
                "device": "cuda:1",
                "device_map": None,
                "offload_folder": None,
                "trust_remote_code": True,
                "tokenizer": None,
            },
        ),
    ],
    ids=["defaults", "all"],
)
def test_what_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], loads: dict[str, Any]
) -> None:
    calls = called(monkeypatch, subjects, "load_model", Stop())
    assert isinstance(run("some", "--text", "text.txt", "--certify", *options).exception, Stop)
    assert calls == [{"spec": "some", **loads}]


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        (("--text", "a"), {"text": "a", "tokens": 128, "sequences": 40, "batch_size": 4}),
        (("--learn-on", "a"), {"text": "a", "tokens": 128, "sequences": 40, "batch_size": 1}),
        (
            ("--learn-on", "a", *SMALL),
            {"text": "a", "tokens": 16, "sequences": 6, "batch_size": 1},
        ),
        (("--text", "b", *SMALL), {"text": "b", "tokens": 16, "sequences": 6, "batch_size": 2}),
    ],
    ids=["text", "learn", "learn, all", "text, all"],
)
def test_what_is_read(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...], reads: dict[str, Any]
) -> None:
    from transformers.utils import logging

    calls = called(monkeypatch, subject_inputs, "load_data", Stop())
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    assert isinstance(run(folder, "--certify", *options).exception, Stop)
    assert logging.get_verbosity() == logging.ERROR
    assert not logging.is_progress_bar_enabled()
    (call,) = calls
    assert {name: str(call[name]) for name in reads} == {name: str(reads[name]) for name in reads}


@pytest.mark.parametrize("options", [(), ("--steps", 0, "--lr", 0.5)], ids=["defaults", "all"])
def test_what_is_fitted_and_measured(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...]
) -> None:
    """λ are fitted on what is learnt from; loss and collapse, before and after, are of what is kept."""
    monkeypatch.setattr("sys.argv", ["/bin/rankwise", "skip", "a model"])
    fits = called(monkeypatch, skips, "fit_skips", None if options else Stop())
    losses = called(monkeypatch, skips, "mean_loss")
    collapses = called(monkeypatch, skips, "spread_by_layer")
    certificates = called(monkeypatch, skips, "certify_skip")
    result = run(folder, "--learn-on", "text.txt", "--out", "new", *SMALL, *options)
    (fit,) = fits
    assert (fit["steps"], fit["lr"], fit["mask_token"]) == ((0, 0.5, None) if options else (50, 0.02, None))
    assert [len(batch["input_ids"]) for batch in fit["batches"]] == [2, 2]
    kept = {len(call["batches"]) for call in (*losses, *collapses)}
    assert kept == {2}
    assert not certificates
    if not options:
        assert isinstance(result.exception, Stop)
        return
    assert (len(losses), len(collapses)) == (2, 2)
    shown = [rows(call["batches"]) for call in (*losses, *collapses)]
    assert shown == [shown[0]] * 4
    fitted = json.loads((tmp_path / "new" / "skips.json").read_text())["fitted"]
    assert fitted["command"] == "rankwise skip 'a model'"
    assert fitted["data"] == "text.txt, up to 16 tokens"
    assert fitted["collapse"][0] == fitted["collapse"][1]  # no step, no change
    assert not (tmp_path / "new" / "certificate.json").exists()


def test_progress_is_no_output(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    result = run(folder, "--learn-on", "text.txt", "--steps", 2, "--certify", *SMALL)
    assert result.exit_code == 0, result.output
    assert "fitting λ: loss" in result.stderr
    assert "fitting" not in result.stdout


def test_a_certificate_is_of_the_first_batch(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = called(monkeypatch, skips, "spread_by_layer")
    certificates = called(monkeypatch, skips, "certify_skip", Stop())
    assert isinstance(run(folder, "--text", "text.txt", "--certify", *SMALL).exception, Stop)
    (certificate,), (first, *others) = certificates, measured[0]["batches"]
    assert certificate["a"] == 0.5
    assert torch.equal(certificate["batch"]["input_ids"], first["input_ids"])
    assert not any(torch.equal(first["input_ids"], other["input_ids"]) for other in others)


@pytest.mark.parametrize(
    ("option", "least"), [("--steps", 0), ("--tokens", 2), ("--sequences", 1), ("--batch-size", 1)]
)
def test_numbers_have_a_least_value(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str, least: int
) -> None:
    called(monkeypatch, subjects, "load_model", Stop())
    assert run("some", "--certify", option, least - 1).exit_code == 2
    assert isinstance(run("some", "--certify", option, least).exception, Stop)


# --- λ that are put in, and those that are there ------------------------------------------------------------


def put(run: Run, *words: object) -> dict[str, Tensor]:
    """λ by layer, as the command writes them."""
    result = run(*words, "--text", "text.txt", "--out", "put", *SMALL)
    assert result.exit_code == 0, result.output
    return {name.split(".")[2]: value for name, value in load_file("put/skips.safetensors").items()}


@pytest.mark.parametrize(("per", "width"), [(None, 1), ("layer", 1), ("channel", 32)])
def test_new_skips_are_of_the_kind_that_is_asked_for_and_change_nothing(
    run: Run, folder: Path, per: str | None, width: int
) -> None:
    found = put(run, folder, *(("--per", per) if per else ()))
    assert {name: value.tolist() for name, value in found.items()} == {"0": [1.0] * width, "1": [1.0] * width}


@pytest.mark.parametrize("saved", [True, False])
def test_a_scale_of_0_is_a_scale(run: Run, folder: Path, saved: bool) -> None:
    if saved:
        saved_in_layer_0(folder)
    with pytest.warns(UserWarning, match="λ = 0"):
        found = put(run, "some" if saved else folder, "--init", 0)
    assert {value.item() for value in found.values()} == {0.0}


def test_a_saved_skip_takes_no_scale_that_is_none(run: Run, folder: Path) -> None:
    saved_in_layer_0(folder)
    result = run("some", "--init", "nan", "--text", "text.txt", "--certify", *SMALL)
    assert isinstance(result.exception, SkipError)
    assert "--init: expected a finite number" in str(result.exception)


def test_a_new_skip_beside_those_of_channels_is_one_too(run: Run, folder: Path) -> None:
    saved_in_layer_0(folder, "channel")
    found = put(run, "some", "--sites", "model.layers.1")
    assert {name: value.tolist() for name, value in found.items()} == {"0": [0.75] * 32, "1": [1.0] * 32}


def test_without_sites_none_is_added(run: Run, folder: Path) -> None:
    saved_in_layer_0(folder)
    assert {name: value.item() for name, value in put(run, "some").items()} == {"0": 0.75}


def test_skips_that_were_saved_frozen_learn(run: Run, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    add_lambda_skip(model, init=0.75, learnable=False)
    save_skips(model, "some")
    remove_lambda_skip(model)
    model.save_pretrained("some")
    AutoTokenizer.from_pretrained(folder).save_pretrained("some")
    fit = ("--learn-on", "text.txt", "--steps", 2, "--lr", 0.1, *SMALL)
    result = run("some", *fit, "--out", "new")
    assert result.exit_code == 0, result.output
    assert all(value != 0.75 for value in numbers("new").values())


# --- models that Python makes -------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(256, 8), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x))


def named():
    return LlamaForCausalLM.from_pretrained(FOLDER)


def masked():
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    return BertForMaskedLM(BertConfig(vocab_size=300, **sizes))
"""


def test_a_factory_of_a_model_of_transformers(run: Run, folder: Path, tmp_path: Path) -> None:
    """It has no folder: no saved skips are its own, and no weights are written."""
    saved_in_layer_0(folder)
    for path in (tmp_path / "some").glob("skips.*"):
        path.rename(tmp_path / path.name)
    (tmp_path / "net.py").write_text(FACTORY.replace("FOLDER", repr(str(folder))))
    assert {name: value.item() for name, value in put(run, "net.py:named").items()} == {"0": 1, "1": 1}
    assert {path.name for path in (tmp_path / "put").iterdir()} == {"skips.json", "skips.safetensors"}


def test_a_factory_of_a_masked_model_has_no_mask_token_to_learn_with(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    result = run("net.py:masked", "--learn-on", "text.txt", "--certify", *SMALL)
    assert isinstance(result.exception, SkipError)
    assert "expected the id of the mask token, got none" in str(result.exception)


def test_a_factory_of_a_model_that_takes_a_tensor_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    result = run("net.py:Plain", "--text", "text.txt", "--certify", *SMALL)
    assert isinstance(result.exception, InputError)
    assert "expected a model that takes its inputs by name" in str(result.exception)


# --- tokenizers ---------------------------------------------------------------------------------------------


def test_the_tokenizer_is_that_of_the_revision_and_goes_with_the_model(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    whole, asked = AutoTokenizer.from_pretrained, []

    def note(source: str, **settings: Any) -> Any:
        asked.append((str(source), settings["revision"], settings["trust_remote_code"]))
        return whole(source)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", note)
    put(run, folder, "--trust-remote-code", "--revision", "v1")
    assert set(asked) == {(str(folder), "v1", True)}
    text = "It is a truth"
    assert whole("put")(text)["input_ids"] == whole(folder)(text)["input_ids"]
