"""`rankwise skip` with real models in folders: files, output and refusals."""

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.nets import NETS
from typer.testing import CliRunner, Result

import rankwise as rw
from rankwise import skips
from rankwise.cli import app, load_data, load_model
from rankwise.compression import save_compressed
from rankwise.errors import InputError
from rankwise.skips import (
    SkipError,
    add_lambda_skip,
    load_skips,
    remove_lambda_skip,
    save_skips,
)

SMALL = ("--tokens", 16, "--sequences", 6, "--batch-size", 2)
ON_TEXT = ("--text", "text.txt", *SMALL)
Run = Callable[..., Result]


@pytest.fixture
def run(run: Run) -> Run:
    """Run `rankwise skip`."""
    return lambda *arguments: run("skip", *arguments)


def saved(tiny: Path, per: str = "layer", **settings: Any) -> None:
    """Save the model of the folder with λ = 0.75 in layer 0, or as the settings say, in the folder "some"."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny)
    add_lambda_skip(model, init=0.75, per=per, **{"sites": "model.layers.0", **settings})  # type: ignore[arg-type]
    save_skips(model, "some")
    remove_lambda_skip(model)
    model.save_pretrained("some")
    AutoTokenizer.from_pretrained(tiny).save_pretrained("some")


def written(tiny: str) -> dict[str, list[float]]:
    """λ by layer, as the command has written them."""
    values = load_file(f"{tiny}/skips.safetensors").items()
    return {name.split(".")[2]: value.flatten().tolist() for name, value in values}


class Stop(Exception):
    """Raised to end a command early."""


def called(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, then: Any = None) -> list[Any]:
    """Record the arguments of every call of a function by name; then call it, or raise."""
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


def test_lambda_is_written_and_no_weight_changes(run, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/rankwise", "skip", "a model"])
    result = run(tiny, "--lambda", 0.5, *ON_TEXT, "--out", "new")
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "new" / "skips.json").read_text())
    assert facts["made"] == {
        "command": "rankwise skip 'a model'", "data": "text.txt, up to 16 tokens", "model": str(tiny)
    }  # fmt: skip
    scales = load_file(tmp_path / "new" / "skips.safetensors")
    assert list(scales) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    one, other = (load_file(path / "model.safetensors") for path in (tiny, tmp_path / "new"))
    (tmp_path / "plain").touch()  # has the mode of the umask
    plain = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "new").iterdir()} == {plain}
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for words in ("λ before", "λ after", "Direction spread by layer", "new/skips.json"):
        assert words in result.output


def test_written_skips_can_be_loaded_and_changed_again(run: Run, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert run(tiny, "--lambda", 2, *ON_TEXT, "--out", "new").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    loaded = load_skips(model, tmp_path / "new")
    assert [value.item() for value in loaded.values()] == [2.0, 2.0]
    # again, without --lambda: those saved stay; with it and --sites: some change
    assert run("new", *ON_TEXT, "--out", "same").exit_code == 0
    assert written("same") == {"0": [2], "1": [2]}
    assert run("new", "--lambda", 1, "--sites", "model.layers.1", *ON_TEXT, "--out", "other").exit_code == 0
    assert written("other") == {"0": [2], "1": [1]}


@pytest.mark.parametrize(
    ("kind", "options", "values"),
    [
        (None, (), {"0": [1], "1": [1]}),
        (None, ("--lambda", -2), {"0": [-2], "1": [-2]}),  # as remedies of COLLAPSE can be
        (None, ("--lambda", 0), {"0": [0], "1": [0]}),
        ("layer", ("--lambda", 0), {"0": [0]}),
        ("layer", (), {"0": [0.75]}),
        ("layer", ("--lambda", 2, "--sites", "model.layers.1"), {"0": [0.75], "1": [2]}),
        ("channel", ("--sites", "model.layers.1"), {"0": [0.75] * 32, "1": [1] * 32}),
    ],
)
def test_new_and_saved_skips(run, tiny, kind, options, values) -> None:
    if kind:
        saved(tiny, kind)
    result = run("some" if kind else tiny, *options, *ON_TEXT, "--out", "new")
    assert result.exit_code == 0, result.output
    assert written("new") == values
    rows = [line.split() for line in result.output.splitlines() if ".self_attn " in line]
    changes = {row[-3].split(".")[2]: tuple(map(float, row[-2:])) for row in rows}
    assert changes == {
        layer: (0.75 if kind and layer == "0" else 1, after[0]) for layer, after in values.items()
    }


def test_it_names_the_shards_it_writes(run, tiny, tmp_path, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    assert run(tiny, *ON_TEXT, "--out", "new").exit_code == 0
    (tmp_path / "new" / "model-of-mine.txt").write_text("older")
    whole = LlamaForCausalLM.save_pretrained
    monkeypatch.setattr(
        LlamaForCausalLM, "save_pretrained", lambda self, out: whole(self, out, max_shard_size="20KB")
    )
    result = run(tiny, *ON_TEXT, "--out", "new")
    assert result.exit_code == 0, result.output
    names = [Path(line).name for line in result.output.splitlines() if line.startswith("wrote: ")]
    shards = {path.name for path in (tmp_path / "new").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert [name for name in names if name in shards] == sorted(shards)
    assert "model.safetensors.index.json" in names
    assert not (tmp_path / "new" / "model.safetensors").exists(), "transformers would read it, not the shards"
    assert not {"model.safetensors", "model-of-mine.txt"}.intersection(names)
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", whole)
    assert run(tiny, *ON_TEXT, "--out", "new").exit_code == 0
    assert [path.name for path in (tmp_path / "new").glob("model.*")] == ["model.safetensors"]


def test_it_certifies_the_first_batch_and_writes_nothing(run, tiny, tmp_path, monkeypatch) -> None:
    measured = called(monkeypatch, skips, "direction_spread_by_layer")
    certificates = called(monkeypatch, skips, "certify_skip")
    result = run(tiny, *ON_TEXT, "--certify")
    assert result.exit_code == 0, result.output
    for words in ("Layers", "least |λ|", "Each layer keeps", "each layer keeps 0.71 of μ"):
        assert words in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]
    (certificate,), (first, *others) = certificates, measured[0]["batches"]
    assert certificate["keep_spread"] == 0.5**0.5
    assert torch.equal(certificate["batch"]["input_ids"], first["input_ids"])
    assert not any(torch.equal(first["input_ids"], other["input_ids"]) for other in others)


def test_certificates_and_their_page_are_written_next_to_the_skips(run, tiny, tmp_path) -> None:
    result = run(tiny, *ON_TEXT, "--lambda", 0.5, "--certify", "--keep-spread", 0.25, "--out", "new")
    assert result.exit_code == 0, result.output
    certificate = json.loads((tmp_path / "new" / "certificate.json").read_text())
    assert certificate["keep_spread"] == 0.25
    assert [layer["lambda_value"] for layer in certificate["layers"]] == [0.5, 0.5]
    named = [Path(line).name for line in result.output.splitlines()[-2:]]
    assert named == ["certificate.json", "certificate.html"]
    assert "Certificate of λ-skips" in (tmp_path / "new" / "certificate.html").read_text()
    result = run(tiny, *ON_TEXT, "--lambda", 2, "--out", "new")
    assert result.exit_code == 0, result.output
    assert not list((tmp_path / "new").glob("certificate.*")), "certificates of another λ were kept"


def test_skips_are_written_before_a_certificate_fails(run, tiny, tmp_path, monkeypatch) -> None:
    called(monkeypatch, skips, "certify_skip", Stop())
    result = run(tiny, *ON_TEXT, "--lambda", 2, "--out", "new", "--certify")
    assert isinstance(result.exception, Stop)
    assert all(value == [2] for value in written("new").values())
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names >= {"model.safetensors", "skips.json"}
    assert "certificate.json" not in names


def test_a_masked_language_model_is_tried(run) -> None:
    from transformers import BertConfig, BertForMaskedLM, ByT5Tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(vocab_size=300, **sizes)).save_pretrained("bert")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained("bert")
    result = run("bert", *ON_TEXT, "--try-steps", 1)
    assert result.exit_code == 0, result.output
    assert "λ = 16" in result.output


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "arguments", "error", "words"),
    [
        ("nowhere", ("--text", "text.txt"), InputError, "what to do: expected --out DIR, --certify, or both"),
        ("nowhere", ("--text", "a", "--dataset", "b", "--certify"), InputError, "got --text and --dataset"),
        (f"{NETS}:few_words", (*ON_TEXT, "--certify"), InputError, "`batch`: expected a batch that Llama"),
        ("nowhere", ("--certify",), InputError, "expected one of --text, --dataset, got none"),
        ("nowhere", ("--certify", "--text", "none.txt"), InputError, "none.txt: expected a text file"),
        ("tiny@v1", (*ON_TEXT, "--certify"), InputError, "revision v1: expected a model on the Hub"),
        ("tiny", (*ON_TEXT, "--certify", "--sites", "model.layer.0"), SkipError, "Did you mean"),
        (
            "nowhere",
            (*ON_TEXT, "--certify", "--keep-spread", 1.5),
            InputError,
            "--keep-spread: expected a number",
        ),
        ("nowhere", ("--certify", "--lr", -1), InputError, "--lr: expected a number in (0, ∞), got -1"),
        ("nowhere", ("--certify", "--lr", "inf"), InputError, "--lr: expected a number in (0, ∞), got inf"),
        (
            "nowhere",
            (*ON_TEXT, "--certify", "--lambda", "nan"),
            SkipError,
            "--lambda: expected a number in",
        ),
        (
            "some",
            (*ON_TEXT, "--certify", "--sites", "model.layers.2"),
            SkipError,
            "Known: model.layers.0, mo",
        ),
        ("nowhere", ("--certify", "--try-steps", 1), InputError, "got --try-steps and --certify"),
        ("nowhere", ("--try-steps", 1, "--sites", "a"), InputError, "got --try-steps and --sites"),
        ("nowhere", ("--certify", "--alternative", "a"), InputError, "got --certify and --alternative"),
        (f"{NETS}:layer", ("--try-steps", 1), InputError, "`batches`: expected labels, or a loss"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded_if_possible(
    run: Run, tiny: Path, tmp_path: Path, model: str, arguments: tuple, error: type, words: str
) -> None:
    if model == "some":
        saved(tiny)
    result = run(model.replace("tiny", str(tiny)), *arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, error)
    assert words in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_the_folder_of_a_model_is_not_overwritten(run: Run, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other = tmp_path / "other[/b]:boom:"
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(other)
    files = {path.name: path.read_bytes() for path in other.iterdir()}
    for out in (other, Path("new")):
        assert run(tiny, *ON_TEXT, "--out", "new").exit_code == 0  # its own results may be replaced
        result = run(tiny if out == other else out, *ON_TEXT, "--out", out)
        assert isinstance(result.exception, InputError)
        assert "Choose another name" in str(result.exception)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == files


def test_a_compressed_model_keeps_its_record(run: Run, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.arange(96).reshape(4, 24) % 50
    record = rw.compress(model, [{"input_ids": ids}], keep=0.5, parts="kv")
    save_compressed(model, "narrow", record)
    AutoTokenizer.from_pretrained(tiny).save_pretrained("narrow")
    assert run("narrow", "--lambda", 2, *ON_TEXT, "--out", "new").exit_code == 0
    for name in ("README.md", "compression.json"):
        assert Path("new", name).read_bytes() == Path("narrow", name).read_bytes()
    again = rw.load_compressed("new")
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert len(load_skips(again, "new")) == 2


@pytest.mark.parametrize("source", [None, "other"])
def test_only_skips_that_the_command_wrote_for_this_model_are_replaced(run: Run, tiny: Path, source) -> None:
    saved(tiny)
    shutil.copytree(tiny, "other")
    if source is not None:
        assert run(source, *ON_TEXT, "--out", "new").exit_code == 0
    out = Path("some" if source is None else "new")
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    result = run(tiny, *ON_TEXT, "--out", out)
    assert "expected a new or empty folder, got a folder with files" in str(result.exception)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_checkpoint_decides_on_the_cache(run: Run, tiny: Path, use_cache: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.use_cache = use_cache
    model.save_pretrained("own")
    AutoTokenizer.from_pretrained(tiny).save_pretrained("own")
    assert run("own", *ON_TEXT, "--out", "new").exit_code == 0
    assert AutoConfig.from_pretrained("new").use_cache is use_cache


@pytest.mark.parametrize(
    ("options", "loaded", "read"),
    [
        (("--text", "text.txt"), (None, "auto", False), (128, 40, 4)),
        (
            (*ON_TEXT, "--device", "cpu:0", "--dtype", "float64", "--trust-remote-code"),
            ("cpu:0", "float64", True),
            (16, 6, 2),
        ),
    ],
)
def test_options_reach_the_model_and_the_data(run, tiny, monkeypatch, options, loaded, read) -> None:
    whole = load_model.load_model
    monkeypatch.setattr(
        load_model, "load_model", lambda name, *, dtype, device, trust_remote_code: whole(str(tiny))
    )
    loads = called(monkeypatch, load_model, "load_model")
    reads = called(monkeypatch, load_data, "load_data", Stop())
    assert isinstance(run(tiny, "--certify", *options).exception, Stop)
    (model,), (data,) = loads, reads
    assert tuple(model[name] for name in ("device", "dtype", "trust_remote_code")) == loaded
    assert data["text"] == Path("text.txt")
    assert tuple(data[name] for name in ("tokens", "sequences", "batch_size")) == read


def test_a_factory_of_a_model_of_transformers(run, tiny, tmp_path, monkeypatch) -> None:
    """A factory's model has no folder: saved skips are not applied, and weights are not written."""
    saved(tiny)
    for path in (tmp_path / "some").glob("skips.*"):
        path.rename(tmp_path / path.name)
    monkeypatch.setenv("FOLDER", str(tiny))
    assert run(f"{NETS}:named", *ON_TEXT, "--out", "new").exit_code == 0
    assert written("new") == {"0": [1], "1": [1]}
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"skips.json", "skips.safetensors"}


FACTORY = f"""
import sys
from pathlib import Path

import torch

import rankwise as rw

sys.path.insert(0, {str(Path(NETS).parent)!r})
from nets import Average, collapsing


def build():
    model, batches = collapsing()
    batches = list(batches)
    if Path("new/load.txt").exists():
        exec(Path("new/load.txt").read_text(), {{"rw": rw, "model": model, "batch": batches[0]}})
    return model, batches


def weak():
    torch.manual_seed(0)
    return torch.nn.Sequential(Average(), Average())


def loss(model, batch):
    return (model(batch) - batch).square().mean() / FACTOR
"""


def printed_line(result: Result) -> str:
    """Return the line of Python that loads λ-skips, as it is printed."""
    (line,) = [line for line in result.output.splitlines() if line.startswith("load: ")]
    return line.removeprefix("load: ")


def test_the_advice_for_a_model_of_a_factory_is_followed(run: Run, tmp_path: Path) -> None:
    """The factory takes tensors; it loads the λ-skips that the command wrote, as the command says."""
    (tmp_path / "own.py").write_text(FACTORY)
    model = load_model.load_model("own.py:build")
    batches = list(model.batches or ())
    choice = skips.choose_lambda(model.model, batches[0], "*")
    result = run("own.py:build", "--lambda", choice.value, "--certify", "--out", "new")
    assert result.exit_code == 0, result.output
    Path("new/load.txt").write_text(printed_line(result))
    repaired = load_model.load_model("own.py:build").model
    assert [float(skip.detach()) for skip in skips.skips_of(repaired).values()] == [choice.value] * 6
    assert "COLLAPSE" not in {one.code for one in rw.audit(repaired, batches).findings}
    result = run("own.py:build", "--certify")  # with the λ that the factory has loaded
    assert "tried: an audit of this batch finds no COLLAPSE" in " ".join(result.output.split())


SHORT = """
import torch
from torch import nn

class Short(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(256, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids):
        return self.layer(self.words(ids) + self.places(torch.arange(ids.shape[1])))

def build():
    return Short()

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.parametrize("how", [("--out", "new"), ("--certify",), ("--try-steps", 1)])
def test_a_text_longer_than_a_model_reads_is_refused_in_the_words_of_an_audit(
    run: Run, tiny: Path, how: tuple[object, ...]
) -> None:
    Path("short.py").write_text(SHORT)
    data = ("--text", "text.txt", "--tokens", 32)
    audit = CliRunner().invoke(app, ["audit", "short.py:build", *map(str, data)])
    said = "a batch that Short runs on, got IndexError: index out of range in self"
    assert said in str(audit.exception)
    skip = run("short.py:build", *data, *how)
    assert isinstance(skip.exception, InputError)
    assert said in str(skip.exception)
    assert run("short.py:build", *data[:2], "--tokens", 16, *how).exit_code == 0
