"""Training: an interrupted run ends as an uninterrupted one, and no broken weights become a checkpoint."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import torch
from experiments.experiment import Experiment, run_missing
from experiments.results import read_runs, settings_of
from experiments.training import train as training
from experiments.training.callbacks import StepTimer
from experiments.training.stream import Stream
from experiments.training.train import accuracy, count_correct, last_complete_checkpoint, train
from safetensors.torch import load_file
from tests.experiments.tiny import tiny
from transformers import AutoModelForCausalLM, EvalPrediction

pytest.importorskip("accelerate")
LONG: dict[str, Any] = {
    "model": "tost",
    "model_options": {"dropout": 0.1},  # depends on the random state of the checkpoint
    "steps": 40,
    "evaluate_every": 10,
    "metric": "accuracy",
    "monitor_every": 10,
    "log_every": 7,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_run(run: tuple[Path, dict[str, Any]], other: tuple[Path, dict[str, Any]], step: int) -> None:
    """Compare a run that was resumed at a step with an uninterrupted run."""
    (folder, values), (other_folder, others) = run, other
    assert values["evaluations"] == others["evaluations"]
    assert [entry for entry in values["curve"] if entry[0] > step] == [
        entry for entry in others["curve"] if entry[0] > step
    ]
    assert values["rank"] == others["rank"], "audits from before the interruption as well"
    here, there = weights(folder), weights(other_folder)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_run_that_was_killed_and_resumed_has_the_same_bits(tmp_path: Path) -> None:
    config, task = tiny(tmp_path, **LONG)
    folder = tmp_path / "killed"
    script = (
        "from pathlib import Path; from experiments.training.train import train; "
        f"from tests.experiments.tiny import tiny; c, t = tiny(Path({str(tmp_path)!r}), **{LONG!r}); "
        f"train(c, t, Path({str(folder)!r}), 0)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 600
    while not (folder / "checkpoint-20").exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < until, "no checkpoint in ten minutes"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)  # mostly while checkpoint 20 is being written
    assert process.wait() == -signal.SIGKILL
    start = last_complete_checkpoint(folder)
    assert start is not None
    step = int(start.name.split("-")[1])
    assert 10 <= step < 40
    resumed = train(config, task, folder, 0)
    straight = train(config, task, tmp_path / "straight", 0)
    assert list(straight["rank"]["heads_effective_rank"]["steps"]) == [str(at) for at in range(0, 50, 10)]
    assert_same_run((folder, resumed), (tmp_path / "straight", straight), step)


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "tokens", "task_options": {"vocab_size": 280, "windows": 40}, "model": "softmax"},
        {"task": "cifar10", "tokens": 4, "task_options": {"augment": True}},
    ],
    ids=["tokens", "ViT"],
)
def test_every_kind_of_model_resumes(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    (tmp_path / "cifar10").mkdir()
    arrays = {"x_train": pixels, "y_train": np.arange(20) % 10, "x_test": pixels[:9], "y_test": np.arange(9)}
    np.savez(tmp_path / "cifar10" / "cifar10.npz", **arrays)
    config, task = tiny(tmp_path, **changes)
    straight = train(config, task, tmp_path / "straight", 1)

    def interrupt(self: StepTimer, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StepTimer, "on_step_begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, task, tmp_path / "cut", 1)
    resumed = train(config, task, tmp_path / "cut", 1)
    assert resumed["seconds"] > 0
    assert_same_run((tmp_path / "cut", resumed), (tmp_path / "straight", straight), 3)


def test_the_newest_checkpoint_whose_state_parses_is_the_start(tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path) is None
    for step, state in ((5, "{}"), (10, "{}"), (15, '{"cut off'), (20, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_scores_belong_to_the_best_model(tmp_path: Path) -> None:
    options = {"skip": "learned"}
    config, task = tiny(tmp_path, model="tost", model_options=options, steps=5, log_every=4, monitor_every=3)
    values = train(config, task, tmp_path / "out", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()
    batch = training.collate([task.test[at] for at in range(6)])
    with torch.no_grad():
        loss = model(**batch).loss.item()
    assert values["scores"]["loss"] == pytest.approx(loss, rel=1e-5)  # means of batches, in another order
    assert min(entry[1] for entry in values["evaluations"]) == values["scores"]["loss"]
    assert [entry[0] for entry in values["evaluations"]] == [3, 5]
    assert [step for step, _ in values["curve"]] == [3, 4, 5], "every step is in the curve"
    assert values["parameters"] == model.num_parameters()
    assert len(values["lambdas"]) == 1
    assert values["data"]["sha256"] == task.record["sha256"]
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 2


@pytest.mark.parametrize(
    ("every", "message", "kept"),
    [
        (6, "loss (nan|inf) at step 4", []),
        (1, "eval_loss (nan|inf) at step 3", ["checkpoint-1", "checkpoint-2"]),
    ],
    ids=["training", "evaluation"],
)
def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    every: int, message: str, kept: list[str], tmp_path: Path
) -> None:
    diverging = {"learning_rate": 1e30, "clip": 1e30, "log_every": 1, "warmup": 3, "evaluate_every": every}
    with pytest.raises(FloatingPointError, match=message):
        train(*tiny(tmp_path, **diverging), tmp_path / "out", 0)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == kept
    assert not (tmp_path / "out" / "model").exists()


def test_a_folder_in_which_a_process_trains_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with filelock.FileLock(tmp_path / "out" / ".lock"), pytest.raises(filelock.Timeout):
        train(*tiny(tmp_path), tmp_path / "out", 0)


def test_missing_runs_are_trained_once_and_failures_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a row that trains has a process; those that are refused have a thread, which starts at once
    thread: Any = lambda *_: ThreadPoolExecutor(1)  # noqa: E731
    kinds = iter([thread, thread, ProcessPoolExecutor, thread])
    monkeypatch.setattr("experiments.experiment.ProcessPoolExecutor", lambda *given: next(kinds)(*given))
    config, _ = tiny(tmp_path)
    missing = replace(config, text="none.txt")
    experiment = Experiment("tiny", "", "", {"missing": missing, "row, one": config})
    where = {"folder": tmp_path / "runs", "results": tmp_path / "results"}
    assert not run_missing(experiment, tmp_path, ["missing"], [1, 2], **where)
    out, err = capfd.readouterr()
    assert err.count("none.txt: expected a text file, got no such file") == 1  # for both seeds
    assert f"--seeds 1 --data {tmp_path} --folder {tmp_path}/runs --results {tmp_path}/results" in out
    assert not run_missing(experiment, tmp_path, list(experiment.rows), [1], **where)
    capfd.readouterr()
    [run] = read_runs(experiment.path(tmp_path / "results"))
    assert (run["row"], run["seed"], run["settings"]) == ("row, one", 1, settings_of(config))
    assert str(tmp_path) not in str(run)
    assert run["provenance"]["command"] == "python -m experiments run tiny --rows 'row, one' --seeds 1"
    assert (next((tmp_path / "runs" / "tiny").glob("row__one-seed1-*")) / "model").is_dir()
    assert run_missing(experiment, tmp_path, ["row, one"], [1], **where)
    assert capfd.readouterr().out == "", "it was done already"
    text = tmp_path / config.text
    text.write_text(text.read_text() + "another end")
    assert not run_missing(experiment, tmp_path, ["row, one"], [2], **where)
    assert "expected the data of “row, one” at seed 1" in capfd.readouterr().err
    assert not [*(tmp_path / "runs" / "tiny").glob("row__one-seed2-*")]  # before the training
    other = Experiment("tiny", "", "", {"row, one": replace(config, steps=1)})
    assert not run_missing(other, tmp_path, ["row, one"], [1], **where)
    assert "has a run with another steps" in capfd.readouterr().err
    assert read_runs(experiment.path(tmp_path / "results")) == [run]


class Drawn(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": index + torch.rand(1).double()}


def drawn(stream: Stream) -> list[float]:
    return [stream[at]["x"].item() for at in range(15)]


def test_an_example_depends_only_on_its_number_and_the_seed() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    once = drawn(Stream(Drawn(), 15, seed=2))
    assert torch.equal(torch.get_rng_state(), state)
    again = Stream(Drawn(), 15, seed=2)
    assert [again[at]["x"].item() for at in reversed(range(15))] == once[::-1]
    assert drawn(Stream(Drawn(), 15, seed=3)) != once
    assert len({round(value % 1, 6) for value in once}) == 15, "drawn anew for each, in each epoch"
    for start in range(0, 15, 5):
        assert sorted(int(value) for value in once[start : start + 5]) == [0, 1, 2, 3, 4]


def test_accuracy_counts_the_labels_that_are_asked_for() -> None:
    labels = torch.tensor([[-100, 1, -100, 2], [0, 1, 2, 3]])
    logits = torch.zeros(2, 4, 5)
    logits[:, :-1].scatter_(2, labels[:, 1:].clamp(min=0)[..., None], 9.0)
    logits[1, 0, 4] = 99.0
    counts = count_correct((logits, None), labels)
    assert counts.tolist() == [[2, 2], [2, 3]]
    assert accuracy(EvalPrediction(counts.numpy(), labels.numpy())) == {"accuracy": 0.8}
    classes = count_correct(torch.eye(3), torch.tensor([0, 2, 2]))
    assert classes.tolist() == [[1, 1], [0, 1], [1, 1]]
