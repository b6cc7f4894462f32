"""Models on one or several devices, from folders and factories; wrong places are refused."""

import json
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.auditing.same_audits import compared
from tests.support.torch_names import COMPILED_PREFIX
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM

from rankwise.auditing import Audit
from rankwise.cli.audit_job import AuditJob, load, run_job
from rankwise.cli.load_model import check_device, load_model, split_revision
from rankwise.errors import InputError

DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
DISK |= {"model.layers.0": "disk", "model.layers.1": "cpu"}


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread")
    (path / "tiny").symlink_to(tiny)
    (path / "text.txt").write_text("All happy families are alike. " * 9, encoding="utf-8")
    return path


def task(folder: Path, **changes: object) -> AuditJob:
    usual = {"model": str(folder / "tiny"), "text": folder / "text.txt", "tokens": 16, "sequences": 2}
    return AuditJob(**(usual | changes))


def test_on_the_disk_and_in_memory_is_as_on_one_device(folder, tmp_path) -> None:
    whole = run_job(task(folder))
    assert compared(whole, run_job(task(folder, device_map="cpu"))) == []
    spread = task(folder, device_map=json.dumps(DISK), offload_folder=tmp_path / "offload")
    found = run_job(spread)
    assert found.provenance.device == "cpu, meta", "no weight was on the disk"
    # weights on the disk are not looked at
    assert compared(whole, found, {"device", "weights_digest"}) == []
    assert found.provenance.weights_digest == ""
    assert "--device-map '{" in found.provenance.command


def test_weights_beyond_half_of_the_free_memory_stay_on_the_disk_and_are_read_once(
    folder, tmp_path, monkeypatch, run
) -> None:
    from accelerate.utils.offload import OffloadedWeightsLoader

    read = list[str]()

    class Counted(OffloadedWeightsLoader):
        def __getitem__(self, key: str) -> torch.Tensor:
            read.append(key)
            return super().__getitem__(key)

    monkeypatch.setattr("accelerate.big_modeling.OffloadedWeightsLoader", Counted)
    monkeypatch.setattr("rankwise.cli.load_model.free_memory", lambda device: 40_000)  # a layer has 34,000
    common = ("audit", folder / "tiny", "--text", folder / "text.txt", "--tokens", 16, "--sequences", 8)
    spread = ("--device-map", "auto", "--offload-folder", tmp_path / "offload")
    for arguments in ((), spread):
        assert run(*common, *arguments, "--out", f"out{len(arguments)}").exit_code == 0
    whole, found = (Audit.load(tmp_path / f"out{count}" / "audit.json") for count in (0, 4))
    assert (whole.provenance.batches, found.provenance.batches) == (2, 1)
    assert found.provenance.device == "meta"
    assert len(read) > 0
    assert len(set(read)) == len(read)
    assert compared(whole, found, {"device", "weights_digest", "batches", "command", "arguments"}) == []
    assert run(*common, *spread, "--batch-size", 2, "--out", "out").exit_code == 0
    assert Audit.load(tmp_path / "out" / "audit.json").provenance.batches == 4
    assert run(*common, *spread, "--loss", "--out", "loss").exit_code == 0
    importance = run(*common, *spread, "--importance", "estimate", "--out", "refused").exception
    said = r"LlamaForCausalLM: expected weights in memory \(0\.0 GB\), got offloaded weights"
    assert re.search(said, str(importance))
    assert run(*common, "--importance", "estimate", "--out", "in-memory").exit_code == 0
    monkeypatch.setattr("rankwise.cli.load_model.free_memory", lambda device: 30_000)
    little = run(*common, *spread, "--out", "little").exception
    assert "memory: expected 0.0 GB for the largest weight" in str(little)
    assert "use --dtype bfloat16" in str(little)
    assert run(*common, *spread, "--dtype", "bfloat16", "--out", "half").exit_code == 0


def test_a_full_disk_and_an_offload_folder_without_use_are_named(folder, tmp_path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"--offload-folder .*: expected --device-map next to it"):
        load_model(str(folder / "tiny"), offload_folder=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--offload-folder"):
        load_model(str(folder / "tiny"), device_map="auto", offload_folder=tmp_path / "file")
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", full)
    with pytest.raises(InputError, match="Choose an --offload-folder on a disk with room"):
        load_model(str(folder / "tiny"), device_map="auto", offload_folder=tmp_path / "offload")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_map": "balance"}, "balance"),
        ({"device_map": "cuda:99"}, "tiny: expected a folder with config.json and weights"),
        ({"device_map": "{"}, "--device-map {: expected JSON, got Expecting"),
    ],
)
def test_contradictory_places_are_refused(folder, changes, says) -> None:
    with pytest.raises(InputError) as told:
        load(task(folder, **changes))
    assert says in str(told.value)


def test_a_revision_is_named_after_the_model_unless_there_is_a_path(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a@b").mkdir()
    models = ("org/m@v1", "org/m", str(tmp_path / "a@b"), "x@1/net.py:build")
    assert [split_revision(model) for model in models] == [
        ("org/m", "v1"), ("org/m", ""), (str(tmp_path / "a@b"), ""), ("x@1/net.py:build", "")
    ]  # fmt: skip
    with pytest.raises(InputError, match="revision v1: expected a model on the Hub, got the folder /"):
        load_model(f"{folder / 'tiny'}@v1")


@pytest.mark.parametrize("name", ["", "meta", "hpu", "vulkan", "privateuseone", "cuda:99", "cuda:x", "gpu"])
def test_a_device_that_torch_does_not_see_is_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=f"^--device {name}: expected a device that torch sees, got only cpu"
    ):
        check_device(name)


def test_devices_beyond_the_number_of_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [str(check_device(name)) for name in ("cuda", "cuda:1", "cpu:1")] == ["cuda", "cuda:1", "cpu:1"]
    for name in ("cuda:2", "mps"):
        with pytest.raises(InputError, match=r"got only cpu, cuda:0, cuda:1 \(torch"):
            check_device(name)


def test_a_model_of_transformers_is_loaded_without_cache_and_without_its_code(folder, monkeypatch) -> None:
    asked: dict[str, object] = {}
    whole = LlamaForCausalLM.from_pretrained

    def note(name: str, **options: object) -> object:
        asked.update(options)
        return whole(name, **options)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", note)
    loaded = load_model(str(folder / "tiny"), trust_remote_code=True)
    assert loaded.model.config.use_cache is False
    assert not loaded.model.training
    assert loaded.trust_remote_code
    assert "trust_remote_code" not in asked, "only Auto classes take it"
    assert asked["revision"] == "main"
    assert (loaded.notes, loaded.random_weights) == ([], ())


def test_a_model_that_cannot_be_loaded_shows_all_that_transformers_says(folder, monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise OSError("a gated repo.\nLog in with `hf auth login`.")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fail)
    with pytest.raises(InputError, match=r"got OSError: a gated repo. Log in with `hf auth login`. Save it"):
        load_model(str(folder / "tiny"))


def test_a_factory_imports_its_neighbors_and_its_classes_can_be_pickled(tmp_path, monkeypatch) -> None:
    near = "WIDTH = 3\n"
    net = """
from torch import nn
import tiny_factory_sizes

class Net(nn.Linear):
    pass

def build():
    return Net(tiny_factory_sizes.WIDTH, 2), ["batch"]
"""
    for name, code in (("tiny_factory_sizes", near), ("tiny_factory", net)):
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = [*sys.path]
    loaded = load_model(f"{tmp_path}/tiny_factory.py:build", dtype="float64")
    assert sys.path == before
    assert (loaded.batches, loaded.source, loaded.input_name) == (["batch"], "", "input_ids")
    copy = pickle.loads(pickle.dumps(loaded.model))
    assert (copy.in_features, copy.weight.dtype, copy.training) == (3, torch.float64, False)


# --- weights that do not fit -----------------------------------------------------------------------------


COMMANDS = {
    "audit": ["audit", "changed", "--text", "text.txt", "--tokens", 16],
    "compress": ["compress", "changed", "--text", "text.txt", "--tokens", 16, "--parts", "heads"],
    "skip": ["skip", "changed", "--text", "text.txt", "--tokens", 16, "--out", "new"],
}


def save_changed(tiny: Path, change: Callable[[str], str | None]) -> None:
    """Save the tiny model in the folder "changed", with other names of weights; without those named None."""
    shutil.copytree(tiny, "changed")
    weights = load_file(tiny / "model.safetensors")
    named = {name: weight for old, weight in weights.items() if (name := change(old)) is not None}
    save_file(named, "changed/model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("command", "prefix"), [*((command, "module.") for command in COMMANDS), ("audit", COMPILED_PREFIX)]
)
def test_a_checkpoint_without_a_fitting_weight_is_refused(run, tiny, tmp_path, command, prefix) -> None:
    save_changed(tiny, lambda name: prefix + name)
    refused = run(*COMMANDS[command])
    assert isinstance(refused.exception, InputError), refused.output
    message = f"got none of them, but {prefix}model.*remove a prefix from the names of all weights"
    assert re.search(message, str(refused.exception))
    assert {path.name for path in tmp_path.iterdir()} == {"changed", "text.txt"}


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        *((command, "0.self_attn.q_proj") for command in COMMANDS),
        ("audit", "embed_tokens"),
        ("skip", "lm_head"),
    ],
)
def test_every_command_warns_of_weights_that_are_not_in_the_checkpoint(run, tiny, command, lacks) -> None:
    save_changed(tiny, lambda name: None if lacks in name else name)
    done = run(*COMMANDS[command])
    assert done.exit_code == 0, done.output
    warning = "warning: model changed: 1 weights of blocks or embeddings are not in the checkpoint and random"
    assert re.search(f"{warning}, such as .*{lacks}", done.stderr)
    assert "1 weights are not in the checkpoint and random, among them" in " ".join(done.stdout.split())
    assert ("RANDOM_WEIGHTS" in done.stdout) == (command == "audit")


@pytest.mark.parametrize("models", [["changed"], ["changed", "tiny"]], ids=["one", "several"])
def test_weights_that_blocks_lack_are_a_finding(run, tiny, models) -> None:
    save_changed(tiny, lambda name: None if "layers.1." in name else name)
    shutil.copytree(tiny, "tiny", dirs_exist_ok=True)
    done = run("audit", *models, *COMMANDS["audit"][2:], "--fail-on", "RANDOM_WEIGHTS", "--out", "new")
    assert done.exit_code == 3, done.output
    audits = [Audit.load(path) for path in sorted(Path("new").rglob("audit.json"))]
    assert len(audits) == len(models)
    found = [[one for one in audit.findings if one.code == "RANDOM_WEIGHTS"] for audit in audits]
    assert [len(some) for some in found] == [1, 0][: len(models)]
    [finding] = found[0]
    missing = audits[0].provenance.random_weights
    assert finding.severity == "warning"
    assert finding.evidence == {"weights": len(missing)}
    assert missing == sorted(name for name in load_file(tiny / "model.safetensors") if "layers.1." in name)


def test_learned_positions_that_a_checkpoint_lacks_are_a_warning_and_a_new_classifier_is_not(
    run, tmp_path, capsys
) -> None:
    sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    for kind, name in ((GPT2ForSequenceClassification, "score"), (GPT2LMHeadModel, "wpe")):
        kind(GPT2Config(**sizes)).save_pretrained(tmp_path / name)
        save_changed(tmp_path / name, lambda key, name=name: None if name in key else key)
        loaded = load_model("changed")
        shutil.rmtree("changed")
        assert loaded.random_blocks == ["transformer.wpe.weight"] * (name == "wpe")
        assert ("warning" in capsys.readouterr().err) == (name == "wpe")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", r"got an adapter of peft alone.*merge_and_unload\(\)"),
        ("model_index.json", "got a pipeline of diffusers. Pass one of its parts, such as (.*/text_encoder)"),
        ("modules.json", "got a model of sentence-transformers. Pass its transformer, such as (.*/0_T.*r)"),
    ],
)
def test_a_folder_of_something_else_is_named(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(InputError, match=said) as caught:
        load_model(str(tmp_path))
    if part := re.search(said, str(caught.value)).groups():  # type: ignore[union-attr]
        GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)).save_pretrained(part[0])
        assert load_model(part[0]).source == part[0]


@pytest.mark.extra
def test_an_adapter_alone_is_loaded_after_the_printed_line(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, alone = tmp_path / "base", tmp_path / "adapter"
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)).save_pretrained(base)
    model = GPT2LMHeadModel.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"])).save_pretrained(alone)
    with pytest.raises(InputError, match="an adapter of peft alone") as caught:
        load_model(str(alone))
    line = re.search(r"Merge it: `(.*)`", str(caught.value))
    exec(line[1], {"peft": peft, "NEW": tmp_path / "new"})  # type: ignore[index]
    assert load_model(str(tmp_path / "new")).source
