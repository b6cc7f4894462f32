"""Studies of λ-skips in small runs: the search for violations, the monitored collapse, the repair."""

import math
from typing import Any

import pytest
import torch
from experiments.skips import bound_search, collapse_rule, repair
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.theory import skip_bound

SMALL = bound_search.Recipe(steps=3, copies=2)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("centre", [True, False])
def test_the_search_has_the_bounds_of_the_package(centre: bool, eps: float) -> None:
    y, b = bound_search.starts(SMALL, 5, 4)
    bounds = [bound(y, b, centre, eps) for bound in bound_search.BOUNDS.values()]
    own = torch.stack(bounds).amax(0).clamp(min=0)
    assert torch.allclose(own, skip_bound(y, b, 1.0, norm="layer" if centre else "rms", eps=eps), atol=1e-9)


def test_the_search_finds_a_bound_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(y: Any, b: Any, scale: float, **rest: Any) -> Any:
        return skip_bound(y, 0.2 * b, scale, **rest)

    monkeypatch.setattr(bound_search, "skip_bound", greedy)
    assert bound_search.search_bound(SMALL, "mean", True, 0.0)["worst"] > 0


def test_a_small_search_has_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_search, "minilm", lambda: None)
    report = bound_search.measure(bound_search.Recipe(steps=8, copies=1))
    assert max(one["worst"] for one in report["searches"]) < 1e-9
    assert report["evaluations"] == 8 * len(bound_search.SHAPES) * len(bound_search.STARTS) * 20
    assert [layer["norm"] for layer in report["least_scales"]["demo"]] == ["none"] * 4
    assert all(math.isfinite(layer["both"]) for layer in report["least_scales"]["demo"])
    assert "| theorem | LayerNorm |" in bound_search.tables(report)["searches"]


def test_the_finding_has_the_numbers_of_the_kept_trainings() -> None:
    report = collapse_rule.STUDY.kept()
    kept = {"depth": report["runs"], "skips-image": report["images"]}
    bands = [collapse_rule.in_band(runs, 0, collapse_rule.COLLAPSE_SPREAD) for runs in kept.values()]
    assert [sum(numbers) for numbers in zip(*bands, strict=True)] == [
        collapse_rule.COLLAPSED_RUNS,
        collapse_rule.COLLAPSED_FAILED,
    ]
    for name in ("depth", "skips-image"):
        assert collapse_rule.in_band(kept[name], *collapse_rule.BANDS[2:])[1] == 0


def test_the_rule_of_the_monitor_stops_no_kept_training_that_learned() -> None:
    report = collapse_rule.STUDY.kept()
    for runs in (report["runs"], report["images"]):
        stopped = [run for run in runs if collapse_rule.stop_step(run) is not None]
        assert stopped
        assert not any(collapse_rule.learned(run) for run in stopped)
    deep = {run["model"]: run for run in report["deep"]}
    for run in deep.values():
        readings = {"experiment": "deep", **run}
        assert run["stopped"] == collapse_rule.stop_step(readings), "the monitor has the same rule"
    assert deep["pre-norm"]["stopped"] is None
    assert deep["λ = 17"]["stopped"] is None
    assert deep["post-norm"]["stopped"] is not None
    assert deep["post-norm"]["loss"] > max(deep[name]["loss"] for name in ("λ = 17", "pre-norm"))


@pytest.mark.parametrize("name", collapse_rule.MODELS)
def test_a_deep_model_is_trained_and_monitored(name: str) -> None:
    found = collapse_rule.train_deep(name, torch.arange(3, 259).repeat(4), steps=2, layers=2)
    assert found["stopped"] is None
    assert [step for step, _ in found["lowest"]] == [0]
    assert math.isfinite(found["loss"])


def test_a_collapsed_model_is_repaired_by_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:  # in this process: a fresh one would load its libraries again
        result = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(repair, "rankwise", run)
    monkeypatch.setattr(repair, "TOKENS", 16)
    monkeypatch.setattr(repair, "SEQUENCES", 2)
    found = repair.repair("12 random layers", repair.deep_model(12), repair.demo_model())
    whole, broken, repaired = found["stages"]
    assert [bool(stage["collapses"]) for stage in found["stages"]] == [False, True, False]
    assert broken["loss"] != whole["loss"] == repaired["loss"]
    assert broken["states"] != whole["states"] == repaired["states"]  # λ = 1 again: the original model
    assert found["command"] == repair.REPAIR  # the finding names no command for λ that are in the model
    assert "COLLAPSE" in "\n".join(found["changes"]).split("Resolved:")[1]
    shown = repair.section(found)
    assert "COLLAPSE" in shown.split("Resolved:")[1]
    assert "Changes by layer" not in shown


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(repair.subprocess.CalledProcessError):
        repair.rankwise("skip", "nowhere", "--steps", "many")


def test_kept_models_that_collapse_are_repaired() -> None:
    kept = repair.STUDY.kept()["models"]
    found = {one["name"]: [bool(stage["collapses"]) for stage in one["stages"]] for one in kept}
    collapses = [False, True, False]
    assert found == {
        "20 random layers": collapses,
        "all-MiniLM-L6-v2": collapses,
        "bundled demo": [False] * 3,
    }
    assert not any(one["stages"][1]["remedy"] for one in kept)  # λ of the model are raised in place
