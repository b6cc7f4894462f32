"""Whole runs, a second each: what they write, and what they refuse without losing anything."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.tiny import pairs, tiny
from tests.unchecked import unchecked
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.errors import InputError, TrainingError
from rankwise.train import run as running
from rankwise.train import train
from rankwise.train.callbacks import Clock
from rankwise.train.checkpoints import checkpoints, whole_checkpoints
from rankwise.train.checks import check_copies
from rankwise.train.models import build_model
from rankwise.train.results import gather
from rankwise.train.settings import EarlyLoss, EvaluationSettings
from rankwise.train.tasks import make_task

pytest.importorskip("accelerate")


def test_a_run_leaves_its_best_model_its_card_and_its_numbers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = tiny(tmp_path, model="tost", monitor=True, monitor_every=3, **{"model.options.skip": "learned"})
    results = train(recipe, out)
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    ids = AutoTokenizer.from_pretrained(out / "model")("ab", add_special_tokens=False).input_ids
    task = make_task(recipe)
    assert ids == [100, 101]
    batch = task.collate([task.test[at] for at in range(6)])
    with torch.no_grad():
        loss = model(**batch).loss.item()
    assert results["scores"]["loss"] == pytest.approx(loss, rel=1e-5)  # means of batches, in another order
    assert min(row[1] for row in results["evaluations"]) == results["scores"]["loss"]
    assert [row[0] for row in results["evaluations"]] == [3, 6]
    assert results["parameters"] == model.num_parameters()
    assert len(results["lambdas"]) == 1
    assert set(results["rank"]) == {"0", "3", "6"}
    assert results["data"]["sha256"] == task.provenance.sha256
    card = (out / "model" / "README.md").read_text()
    assert results["provenance"]["command"] in card
    assert f"{results['parameters']:,} weights" in card
    assert str(tmp_path) not in (out / "results.json").read_text() + card
    assert checkpoints(out) == []
    with pytest.raises(TrainingError, match="a folder without a finished run"):
        train(recipe, out)


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 2), ("loss", 1)])
def test_the_best_evaluation_is_the_score_and_time_that_of_all_processes(
    metric: str, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = SimpleNamespace(all_of=lambda value: [value, 4.0, 8.0])
    monkeypatch.setattr("rankwise.train.results.from_environment", lambda: three)
    recipe = tiny(tmp_path).model_copy(update={"evaluation": EvaluationSettings(every=1, metric=metric)})
    scores = {1: (1.0, 0.2), 2: (3.0, 0.6), 3: (2.0, 0.4)}
    log = [{"step": at, "eval_loss": loss, "eval_accuracy": right} for at, (loss, right) in scores.items()]
    task, clock = make_task(recipe), Clock()
    clock.seconds = clock.cpu_seconds = 1.0
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(log_history=log, global_step=3),
        callback_handler=SimpleNamespace(callbacks=[clock]),
        model=build_model(recipe.model, task, task.length),
    )
    with unchecked():
        found = gather(recipe, trainer, task, None, "abc")
    assert found["cpu_seconds"] == 13.0
    assert found["provenance"]["commit"] == "abc"
    assert found["peak_memory"] > 12
    assert (found["best_step"], found["scores"]["loss"], found["scores"]["accuracy"]) == (best, *scores[best])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator has bfloat16 of its own")
def test_bfloat16_trains_without_a_gpu(tmp_path: Path) -> None:
    results = train(tiny(tmp_path, dtype="bfloat16"), tmp_path / "out")
    assert results["configuration"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("every", "subject", "kept"),
    [(6, "loss at step 4", []), (1, "held-out loss at step 3", ["checkpoint-1", "checkpoint-2"])],
    ids=["training", "held-out"],
)
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(
    every: int, subject: str, kept: list[str], tmp_path: Path
) -> None:
    diverging = {"learning_rate": 1e30, "clip": 1e30, "log_every": 1, "warmup": 3, "evaluation.every": every}
    with pytest.raises(TrainingError, match=rf"^{subject}: expected a finite number, got (nan|inf)"):
        train(tiny(tmp_path, **diverging), tmp_path / "out")
    assert [one.name for one in whole_checkpoints(tmp_path / "out")] == kept
    assert not (tmp_path / "out" / "results.json").exists()


def test_audits_of_a_run_that_did_not_finish_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out" / "rank" / "step-0").mkdir(parents=True)
    audit = tmp_path / "out" / "rank" / "step-0" / "audit.json"
    audit.write_text("{}")
    with pytest.raises(TrainingError, match=r"got rank/step-0/audit\.json of a run that did not finish"):
        train(tiny(tmp_path, monitor=True), tmp_path / "out")
    assert audit.read_text() == "{}"


def test_audits_without_a_checkpoint_are_gone_on_from_by_their_own_run_alone(tmp_path: Path) -> None:
    stopping = {"monitor": True, "monitor_every": 1, "learning_rate": 1e30, "clip": 1e30, "log_every": 1}
    stopping |= {"evaluation.every": 6}
    with pytest.raises(TrainingError, match="expected a finite number"):
        train(tiny(tmp_path, **stopping), tmp_path / "out")
    audits = {path: path.read_bytes() for path in tmp_path.glob("out/rank/step-*/audit.json")}
    assert audits
    other = tiny(tmp_path, **(stopping | {"learning_rate": 1e-3}))
    with pytest.raises(TrainingError, match=r"^audits .*learning_rate: 1e\+30 there, 0\.001 here"):
        train(other, tmp_path / "out", resume=True)
    assert audits == {path: path.read_bytes() for path in audits}
    with pytest.raises(TrainingError, match="expected a finite number"):
        train(tiny(tmp_path, **stopping), tmp_path / "out", resume=True)


def test_the_curve_has_every_step(tmp_path: Path) -> None:
    found = train(tiny(tmp_path, steps=5, log_every=4, **{"evaluation.every": 3}), tmp_path / "out")
    assert [step for step, _ in found["curve"]] == [3, 4, 5]


@pytest.mark.parametrize("when", ["warn", "stop"])
def test_a_first_loss_far_from_a_healthy_one_is_told(when: str, tmp_path: Path) -> None:
    far = {
        "early_data": None,
        "early": (EarlyLoss(step=2, loss=1.0, tolerance=0.1),),
        "when_early_fails": when,
    }
    recipe = tiny(tmp_path).model_copy(update=far)
    if when == "stop":
        with pytest.raises(TrainingError, match=r"loss at step 2: expected 1 ± 0\.1.*got 5\."):
            train(recipe, tmp_path / "out")
        return
    assert "step 2: expected 1 ± 0.1" in train(recipe, tmp_path / "out")["warnings"][0]
    others = recipe.model_copy(update={"early_data": "of another text"})
    assert train(others, tmp_path / "others")["warnings"] == []


@pytest.mark.parametrize("used", ["fsdp", "deepspeed"])
def test_models_split_by_accelerate_are_refused(used: str) -> None:
    trainer = object.__new__(Trainer)
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = used == "fsdp", used == "deepspeed"
    with pytest.raises(TrainingError, match=r"\(DDP\), got (FSDP|DeepSpeed).*torchrun --nproc-per-node"):
        check_copies(trainer)


def test_a_training_without_accelerate_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.train.checks.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"accelerate, .* pip install 'rankwise\[train\]'"):
        train(tiny(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`device` cuda: expected a device that torch sees, got only cpu"):
        train(tiny(tmp_path, device="cuda"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class FillsUp(TrainerCallback):
    """No file may grow beyond 2 KB once there is a checkpoint, as if the disk were full."""

    def on_save(self, *_: Any, **__: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = tiny(tmp_path), tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    original = running._set_callbacks

    def with_filling(trainer: Any, callbacks: list[Any], progress: bool) -> None:
        original(trainer, [*callbacks, FillsUp()], progress)

    monkeypatch.setattr(running, "_set_callbacks", with_filling)
    try:
        with pytest.raises(TrainingError, match=r"room for a checkpoint.*from checkpoint-3 with --resume"):
            train(recipe, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [one.name for one in checkpoints(out)] == ["checkpoint-3"]
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="checkpoint-3 of a run that did not finish"):
        train(recipe, out)
    with pytest.raises(TrainingError, match=r"another run's \(batch: 2 there, 4 here\)"):
        train(tiny(tmp_path, batch=4), out, resume=True)
    assert train(recipe, out, resume=True)["evaluations"][-1][0] == 6


def test_the_command_lists_shows_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    listed = run.invoke(app, ["train"])
    assert "language" in listed.output
    assert "size, model, seed" in listed.output
    shown = run.invoke(app, ["train", "language", "model=tost", "seed=4", "--show"])
    assert json.loads(shown.output)["seed"] == 4
    missing = run.invoke(app, ["train", "language", "--out", "nowhere"])
    assert "`task.path`: expected a text file for the task bytes, got none" in str(missing.exception)
    given = run.invoke(app, ["train", "skips", "task=recall", "task.path=a.txt"])
    assert "expected none: this task is generated" in str(given.exception)
    wrong = run.invoke(app, ["train", "language", "task.path=nothing.txt"])
    assert "nothing.txt" in str(wrong.exception)
    assert not list(tmp_path.iterdir()), "a refused run leaves no folder"
    done = run.invoke(app, ["train", "language", *pairs(tmp_path, model="tost")])
    assert done.exit_code == 0, done.exception
    assert "held-out loss" in done.output
    (folder,) = (tmp_path / "runs").glob("language-tost-*-seed0")
    kept = json.loads((folder / "results.json").read_text())
    assert kept["variant"]["model"] == "tost"
    assert kept["variant"]["changed"]["model.width"] == 16
