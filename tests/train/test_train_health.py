"""Losses that say a run is broken, clocks that wait for a GPU, several GPUs in one process, bad models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.tiny import pairs, tiny
from transformers import TrainingArguments
from typer.testing import CliRunner

import rankwise as rw
from rankwise.cli import app
from rankwise.errors import InputError, TrainingError
from rankwise.train import callbacks, train
from rankwise.train import run as running
from rankwise.train.callbacks import Clock
from rankwise.train.health import HealthCheck, worst_healthy_loss
from rankwise.train.settings import EarlyLoss, Recipe

pytest.importorskip("accelerate")


def test_random_logits_are_not_above_the_bound_and_larger_ones_are() -> None:
    """The bound is what N(0, 1) logits lose, and four standard errors: the formula against draws."""
    choices, examples = 256, 160
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(choices, (200, examples), generator=draw)
    logits = torch.randn(200, examples, choices, generator=draw)

    def means(scale: float) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(
            (scale * logits).flatten(0, 1), labels.flatten(), reduction="none"
        )
        return losses.view(200, examples).mean(1)

    bound = worst_healthy_loss(choices, examples)
    assert not (means(1.0) > bound).any()
    assert (means(2.0) > bound).all()  # ln C + 2


def judged(recipe: Recipe, losses: dict[int, float], first: bool = True) -> HealthCheck:
    check = HealthCheck(recipe, "", 256)
    control, state = (
        type("C", (), {"should_training_stop": False})(),
        type("S", (), {"is_world_process_zero": first})(),
    )
    for step, loss in losses.items():
        state.global_step = step
        check.on_log(None, state, control, {"loss": loss})
    return check


def test_a_loss_above_a_uniform_guess_counts_once_warmup_is_over(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, batch=8, log_every=20, warmup=10, **{"evaluation.every": 100})
    far = {20: 400.0, 40: 6.3}
    history = [{"step": step, "loss": loss} for step, loss in far.items()]
    assert judged(recipe, far).warnings(history) == [], "20 steps before step 20 hold warmup"
    told = judged(recipe, far).warnings([*history, {"step": 60, "loss": 484.0}, {"step": 80, "loss": 7.0}])
    assert len(told) == 1
    assert (
        "loss at step 60: expected at most 6.36 after warmup (a uniform guess among 256 has 5.55)" in told[0]
    )
    assert "2 of 4 logs" in told[0]
    stops = recipe.model_copy(update={"when_early_fails": "stop"})
    error = judged(stops, {60: 484.0}).error
    assert error is not None
    assert "expected at most 6.36" in str(error)
    assert judged(stops, {60: 6.3}).error is None
    at_once = recipe.model_copy(update={"optimiser": recipe.optimiser.model_copy(update={"warmup": 20})})
    late = recipe.model_copy(update={"optimiser": recipe.optimiser.model_copy(update={"warmup": 21})})
    assert not judged(late, {}).warnings([{"step": 40, "loss": 484.0}])
    assert judged(at_once, {}).warnings([{"step": 40, "loss": 484.0}]), "steps 20 to 40 are after warmup"


def test_the_bound_is_of_the_steps_since_the_log_before(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, batch=8, log_every=20, warmup=10, **{"evaluation.every": 50})
    for step, steps in ((40, 20), (50, 10), (60, 10), (80, 20), (100, 20)):
        bound = worst_healthy_loss(256, 8 * steps)
        for loss, warnings in ((bound + 0.01, 1), (bound - 0.01, 0)):
            history = [{"step": step, "loss": loss}]
            assert len(judged(recipe, {}).warnings(history)) == warnings, (step, loss)


def test_an_early_loss_is_held_against_a_mean_over_as_many_steps_alone(tmp_path: Path) -> None:
    early = {"early": (EarlyLoss(step=40, loss=5.0, tolerance=0.1),), "early_data": None}
    for every, warnings in ((100, 1), (40, 1), (30, 0)):
        made = tiny(tmp_path, log_every=20, **{"evaluation.every": every}).model_copy(update=early)
        history = [{"step": 40, "loss": 5.2}]
        assert len(judged(made, {}).warnings(history)) == warnings, every


def test_every_setting_of_a_recipe_reaches_the_trainer(tmp_path: Path) -> None:
    changes = {
        "learning_rate": 0.007,
        "warmup": 3,
        "clip": 0.3,
        "schedule": "linear",
        "seed": 5,
        "steps": 17,
        "log_every": 4,
        "evaluation.every": 9,
    }
    wanted = {
        "learning_rate": 0.007,
        "warmup_steps": 3,
        "max_grad_norm": 0.3,
        "lr_scheduler_type": "linear",
        "seed": 5,
        "max_steps": 17,
        "logging_steps": 4,
        "eval_steps": 9,
        "save_steps": 9,
    }
    plain = running._arguments(tiny(tmp_path), tmp_path / "out", 1, False)
    assert not [name for name, value in wanted.items() if getattr(plain, name) == value]
    made = running._arguments(tiny(tmp_path, **changes), tmp_path / "out", 1, False)
    assert {name: getattr(made, name) for name in wanted} == wanted
    for metric, greater in (("loss", False), ("accuracy", True)):
        made = running._arguments(tiny(tmp_path, **{"evaluation.metric": metric}), tmp_path / "o", 1, False)
        assert (made.metric_for_best_model, made.greater_is_better) == (metric, greater)


def test_the_first_process_alone_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(tmp_path, batch=8, log_every=20, warmup=10)
    for first in (False, True):
        judged(recipe, {60: 484.0}, first)
        assert capsys.readouterr().err.count("warning: loss at step 60") == first


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    results = train(tiny(tmp_path, learning_rate=30, clip=1e9, warmup=0, steps=4), tmp_path / "out")
    assert "expected at most" in results["warnings"][0]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["warnings"] == results["warnings"]


def test_the_clock_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(device.type))
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: float(len(calls)))
    for kind, wanted in (("cpu", 0.0), ("cuda", 1.0)):
        clock, args = Clock(), type("A", (), {"device": torch.device(kind)})()
        clock.on_step_begin(args, None, None)
        clock.on_step_end(args, None, None)
        assert clock.seconds == wanted, "read after each wait"
    assert calls == ["cuda", "cuda"]


def test_a_batch_is_not_multiplied_by_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = TrainingArguments.__post_init__

    def with_four(made: TrainingArguments) -> None:
        original(made)
        made._n_gpu = 4

    monkeypatch.setattr(TrainingArguments, "__post_init__", with_four)
    recipe = tiny(tmp_path, batch=4)
    made = running._arguments(recipe, tmp_path / "out", 1, False)
    running._use_one_gpu(made)
    assert (made.train_batch_size, made.eval_batch_size, made.n_gpu) == (4, 4, 1)
    assert "torchrun --nproc-per-node 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes", [{"heads": 3}, {"model.options.hidden_act": "abc"}], ids=["heads", "option"]
)
def test_a_model_that_cannot_be_built_is_named_by_its_settings(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"`model`: expected settings that \w+ can be built with, got .*heads=|abc"
    ):
        train(tiny(tmp_path, **changes), tmp_path / "out")


def test_a_large_seed_trains_and_a_finding_can_stop(tmp_path: Path) -> None:
    found = {"monitor": True, "monitor_every": 2, "monitor_stop_on": "NOTHING"}
    with pytest.raises(InputError, match="NOTHING"):
        train(tiny(tmp_path, **found), tmp_path / "out")
    given = [*pairs(tmp_path, seed=20261123, steps=2), "--out", str(tmp_path / "large")]
    done = CliRunner().invoke(app, ["train", "language", *given])
    assert done.exit_code == 0, done.exception
    assert "held-out loss" in done.output


def test_a_monitor_takes_no_unknown_setting() -> None:
    with pytest.raises(
        InputError, match=r"option of `rankwise.audit`: expected .*'dleta'. Did you mean delta"
    ):
        rw.RankMonitor(torch.randn(1, 5, 8), dleta=3)


def test_a_finding_stops_a_run_and_is_named(tmp_path: Path) -> None:
    collapsing = {"model": "softmax", "model.options.skip_init": 0.1, "model.options.norm_position": "post"}
    watched = {"monitor_every": 2, "monitor_stop_on": ["COLLAPSE"], "layers": 12}
    scale = {"width": 16, "model.options.initializer_range": 0.5}
    with pytest.raises(
        TrainingError, match=r"step 0: expected no finding of monitor_stop_on.*got COLLAPSE at"
    ):
        train(tiny(tmp_path, **collapsing, **watched, **scale), tmp_path / "out")
    assert not (tmp_path / "out" / "results.json").exists()
