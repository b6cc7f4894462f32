"""Disks that are full, checkpoints that are damaged, folders that others use."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from tests.train.tiny import tiny
from transformers import Trainer, TrainingArguments

from rankwise.errors import TrainingError
from rankwise.train import train
from rankwise.train.checkpoints import (
    MARK,
    STATE,
    checkpoints,
    find_best_beside,
    mark,
    remove_old,
    whole_checkpoints,
)
from rankwise.train.damage import check_readable
from rankwise.train.lock import LOCK
from rankwise.train.models import build_model
from rankwise.train.saving import MarkingTrainer, saving
from rankwise.train.tasks import make_task

pytest.importorskip("accelerate")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 KB, which holds one checkpoint of the tiny run (110 KB) and no second."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full_is_told_and_the_run_goes_on_elsewhere(small_disk: Path, tmp_path: Path) -> None:
    recipe = tiny(tmp_path)
    with pytest.raises(TrainingError, match=r"with room for a checkpoint.*were free") as told:
        train(recipe, small_disk / "out")
    assert str(small_disk) in str(told.value)
    assert "go on from checkpoint-3 with --resume" in str(told.value)
    assert [one.name for one in checkpoints(small_disk / "out")] == ["checkpoint-3"]
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert train(recipe, small_disk / "out", resume=True)["evaluations"][-1][0] == 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of six steps whose last checkpoint could not be written."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = tiny(folder, **{"evaluation.every": 2})
    original = Trainer._save_rng_state

    def fails(trainer: Trainer, output_dir: str) -> None:
        if trainer.state.global_step == 6:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 69504 vs 69392")
        original(trainer, output_dir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_rng_state", fails)
        with pytest.raises(TrainingError, match=r"inline_container.*from checkpoint-4 with --resume"):
            train(recipe, folder / "out")
    return folder / "out", recipe


def test_wherever_a_file_of_torch_is_cut_the_disk_is_named(tmp_path: Path) -> None:
    """torch says it in other words where the end of a file is cut; a limit on files stands for a disk."""
    content, path = {"weight": torch.zeros(3000)}, tmp_path / "weights.pt"
    torch.save(content, path)
    size, before = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    causes = []
    for most in (0, size // 2, size - 1):
        told = pytest.raises(TrainingError, match=r"could not write to its end.*Make room")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            with told as error, saving(tmp_path):
                torch.save(content, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        causes.append(str(error.value.__cause__))
    assert ["iostream" in cause for cause in causes] == [False, False, True]


def test_other_errors_of_torch_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), saving(tmp_path):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("name", ["transformer", "tost"])
def test_tied_weights_come_back_with_the_best_checkpoint_and_only_lost_ones_are_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds them once; loading writes into the tensor they share."""
    recipe = tiny(tmp_path, **{"model.name": name})
    task, best = make_task(recipe), tmp_path / "checkpoint-1"
    model = build_model(recipe.model, task, task.length)
    settings = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = MarkingTrainer({}, model=model, args=settings)
    trainer.save_model(str(best))
    trainer.state.best_model_checkpoint = str(best)
    wanted = {key: weight.clone() for key, weight in model.state_dict().items()}
    held = load_file(best / "model.safetensors")
    assert wanted.keys() - held.keys() == {"lm_head.weight"}
    told: list[str] = []
    monkeypatch.setattr("transformers.trainer.logger.warning", told.append)

    def load_again() -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight += 1
        trainer._load_best_model()

    load_again()
    assert told == []
    assert all(weight.equal(wanted[key]) for key, weight in model.state_dict().items())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for lost in ("model.norm.weight", "model.embed_tokens.weight"):
        save_file({key: weight for key, weight in held.items() if key != lost}, best / "model.safetensors")
        load_again()
        assert lost in told[-1]
        assert ("lm_head.weight" in told[-1]) == (lost == "model.embed_tokens.weight")


def test_errors_that_are_not_of_the_disk_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file", "data.bin")

    monkeypatch.setattr(Trainer, "training_step", fails)
    with pytest.raises(FileNotFoundError, match=r"data\.bin"):
        train(tiny(tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
@pytest.mark.parametrize("how", ["half", "empty", "gone"])
def test_a_damaged_file_is_named(stopped: tuple[Path, Any], tmp_path: Path, name: str, how: str) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(stopped[0] / "checkpoint-4", checkpoint)
    for other in whole_checkpoints(stopped[0])[:-1]:
        shutil.copytree(other, tmp_path / other.name)
    check_readable(checkpoint)
    content = (checkpoint / name).read_bytes()
    if how == "gone":
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content[: len(content) // 2] if how == "half" else b"")
    with pytest.raises(TrainingError, match=f"{name}: expected a file that can be read.*Remove the folder"):
        check_readable(checkpoint)


def test_a_run_is_refused_for_damage_and_goes_on_from_the_checkpoint_before(
    stopped: tuple[Path, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped[0], out)
    assert [one.name for one in whole_checkpoints(out)] == ["checkpoint-2", "checkpoint-4"]
    (out / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"checkpoint-4/model\.safetensors: expected a file that can be"):
        train(stopped[1], out, resume=True)
    shutil.rmtree(out / "checkpoint-4")
    assert train(stopped[1], out, resume=True)["evaluations"][-1][0] == 6


@pytest.mark.parametrize("content", ["[]", "{", "1"])
def test_a_mark_that_holds_no_recipe_is_refused(
    stopped: tuple[Path, Any], tmp_path: Path, content: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(stopped[0], out)
    (out / "checkpoint-4" / MARK).write_text(content)
    with pytest.raises(TrainingError, match=rf"checkpoint-4: expected a {MARK} that can be read"):
        train(stopped[1], out, resume=True)


def test_the_best_checkpoint_is_needed_as_well(stopped: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(stopped[0], tmp_path / "out")
    newest = tmp_path / "out" / "checkpoint-4"
    state = (newest / "trainer_state.json").read_text()
    (newest / "trainer_state.json").write_text(state.replace("out/checkpoint-4", "out/checkpoint-1"))
    with pytest.raises(
        TrainingError, match=r"checkpoint-1/model\.safetensors.*got none.*checkpoint-4 needs it"
    ):
        check_readable(newest)


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_of_other_programs_are_left_alone(resume: bool, tmp_path: Path) -> None:
    foreign = tmp_path / "out" / "checkpoint-500"
    foreign.mkdir(parents=True)
    (foreign / "pytorch_model.bin").write_text("months of work")
    with pytest.raises(TrainingError, match=r"checkpoint-500 without recipe\.json"):
        train(tiny(tmp_path), tmp_path / "out", resume=resume)
    assert (foreign / "pytorch_model.bin").read_text() == "months of work"


@pytest.mark.parametrize("files", [0, 1, 100])
def test_a_checkpoint_that_was_being_removed_is_no_other_programs(
    stopped: tuple[Path, Any], tmp_path: Path, files: int
) -> None:
    """A folder is removed file by file, in any order, and the process may be killed between two."""
    out = tmp_path / "out"
    shutil.copytree(stopped[0], out)
    old = out / "checkpoint-2"
    (old / MARK).unlink()
    for file in sorted(old.iterdir())[:files]:
        file.unlink()
    assert train(stopped[1], out, resume=True)["evaluations"][-1][0] == 6
    assert not list(out.glob(".checkpoint-*"))


class Killed(BaseException):
    """Ends a process where it is."""


@pytest.mark.parametrize("files", [[], ["model.safetensors"], None])
@pytest.mark.parametrize("losses", [[1.0, 2.0, 0.5], [1.0, 2.0, 3.0]])
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_the_new(
    losses: list[float], files: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = tiny(tmp_path, **{"evaluation.every": 2, "steps": 8}), tmp_path / "out"
    best, left = Trainer._determine_best_metric, iter([*losses, 0.1])
    monkeypatch.setattr(
        Trainer,
        "_determine_best_metric",
        lambda self, metrics, trial: best(self, metrics | {"eval_loss": next(left)}, trial),
    )

    def killed(folder: Path) -> None:
        for name in [file.name for file in folder.iterdir()] if files is None else files:
            (folder / name).unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("rankwise.train.checkpoints.shutil.rmtree", killed)
        with pytest.raises(Killed):
            train(recipe, out)
    assert [one.name for one in checkpoints(out)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    removed = "checkpoint-2" if losses[-1] < 1 else "checkpoint-4"
    assert {one.name for one in checkpoints(out)} - {one.name for one in whole_checkpoints(out)} == {removed}
    assert [step for step, *_ in train(recipe, out, resume=True)["evaluations"]] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("there", "best", "stay"),
    [
        ([2], None, [2]),
        ([2, 4, 6], None, [4, 6]),
        ([2, 4, 6], "far/checkpoint-2", [2, 6]),
        ([2, 4, 6, 8], "far/checkpoint-8", [6, 8]),
        ([2, 4, 6, 8, 10], "gone/checkpoint-1", [8, 10]),
    ],
)
def test_the_newest_and_the_best_stay_and_what_is_not_ours(
    tmp_path: Path, there: list[int], best: str | None, stay: list[int]
) -> None:
    out = tmp_path / "out"
    for folder in [*(out / f"checkpoint-{step}" for step in [*there, 1000]), tmp_path / "far"]:
        folder.mkdir(parents=True)
        mark(folder, {})
    foreign, linked = out / "checkpoint-3", out / "checkpoint-0"
    foreign.mkdir()
    linked.symlink_to(tmp_path / "far")
    remove_old(out, there[-1], best)
    left = [one.name for one in checkpoints(out) if one not in (foreign, linked)]
    assert left == [f"checkpoint-{step}" for step in [*stay, 1000]]
    assert foreign.is_dir()
    assert (linked / MARK).is_file()


def test_a_checkpoint_that_cannot_be_removed_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = tiny(tmp_path, **{"evaluation.every": 1, "steps": 5}), tmp_path / "out"

    def busy(folder: Path) -> None:
        raise OSError(16, "Device or resource busy", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("rankwise.train.checkpoints.shutil.rmtree", busy)
        trained = Trainer.training_step

        def fails(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step == 4:
                raise Killed
            return trained(trainer, *args, **kwargs)

        patch.setattr(Trainer, "training_step", fails)
        with pytest.raises(Killed):
            train(recipe, out)
    assert "could not be removed: Device or resource busy" in caplog.text
    assert len(checkpoints(out)) == 4
    assert len(whole_checkpoints(out)) == 2
    assert [step for step, *_ in train(recipe, out, resume=True)["evaluations"]] == [1, 2, 3, 4, 5]
    assert not checkpoints(out)


def test_names_of_checkpoints_that_are_gone_are_free(stopped: tuple[Path, Any], tmp_path: Path) -> None:
    """They were removed; what another program then puts there is its own."""
    assert sorted(one.name for one in stopped[0].glob(".checkpoint-*")) == [
        f".{one.name}.rankwise" for one in checkpoints(stopped[0])
    ]
    out = tmp_path / "out"
    shutil.copytree(stopped[0], out)
    (out / "checkpoint-1").mkdir()
    (out / "checkpoint-1" / "model.safetensors").write_text("months of work")
    with pytest.raises(TrainingError, match="checkpoint-1 without"):
        train(stopped[1], out, resume=True)
    assert (out / "checkpoint-1" / "model.safetensors").exists()


@pytest.mark.parametrize("made", ["link", "file", "recipe"])
def test_what_only_looks_like_a_checkpoint_is_refused(
    stopped: tuple[Path, Any], tmp_path: Path, made: str
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(stopped[0], out)
    shutil.copytree(stopped[0] / "checkpoint-2", other)
    foreign = out / "checkpoint-1"
    if made == "link":
        foreign.symlink_to(other)
    elif made == "file":
        foreign.write_text("")
    else:
        foreign.mkdir()
        (foreign / MARK).write_text('{"name": "another"}')
    with pytest.raises(TrainingError, match=r"checkpoint-1"):
        train(stopped[1], out, resume=True)
    assert foreign.exists()


def test_a_run_that_was_moved_keeps_its_best_checkpoint(
    stopped: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, told = tmp_path / "moved", []
    shutil.copytree(stopped[0], out)
    path = out / "checkpoint-4" / STATE
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"best_model_checkpoint": "not/here/checkpoint-4"}))
    monkeypatch.setattr("transformers.trainer.logger.warning", lambda *said, **_: told.append(str(said)))
    assert train(stopped[1], out, resume=True)["evaluations"][-1][0] == 6
    assert not [said for said in told if "does not exist" in said]


@pytest.mark.parametrize("best", ["not/here/checkpoint-2", "not/here/checkpoint-4", None])
def test_the_best_checkpoint_is_looked_for_beside(tmp_path: Path, best: str | None) -> None:
    newest = tmp_path / "checkpoint-4"
    newest.mkdir()
    (newest / STATE).write_text(json.dumps({"best_model_checkpoint": best, "epoch": 1}))
    find_best_beside(newest)
    there = best if best is None or best.endswith("2") else str(newest)
    assert json.loads((newest / STATE).read_text()) == {"best_model_checkpoint": there, "epoch": 1}


def test_a_folder_in_use_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    hold = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire()"
    hold += "; print('held', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(out / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(TrainingError, match=r"no other process trains into, got one in which a run is going"):
        train(tiny(tmp_path), out)
    other.kill()
    other.wait()
    FileLock(out / LOCK).acquire(timeout=0)
