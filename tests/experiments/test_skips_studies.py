"""Studies of λ-skips in small runs: the search for violations, the monitored collapse, the repair."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.skips import bound_search, monitor_collapse, repair
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.theory import skip_bound

SMALL = bound_search.Recipe(steps=3, copies=2)
DEEP = monitor_collapse.Recipe(depth=36, steps=1, seeds=(0,), tokens=32, batch=2)
MONITOR_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"


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
    report = bound_search.measure(bound_search.Recipe(steps=2, copies=1))
    assert report["evaluations"] == 2 * len(bound_search.SHAPES) * len(bound_search.STARTS) * 20
    assert [layer["norm"] for layer in report["least_scales"]["demo"]] == ["none"] * 4
    assert all(math.isfinite(layer["both"]) for layer in report["least_scales"]["demo"])
    assert "| theorem | LayerNorm |" in bound_search.tables(report)["searches"]


def test_a_deep_post_norm_model_is_stopped_and_a_larger_or_advised_scale_continues() -> None:
    stopped = monitor_collapse.train(DEEP, 0.5, 0, stop=True)
    assert (stopped["stopped"], stopped["steps"]) == (True, 0)
    assert 0 < stopped["collapse"][0] <= DEEP.depth
    larger = monitor_collapse.train(DEEP, 2.0, 0, stop=True)
    assert (larger["stopped"], larger["steps"]) == (False, 1)
    assert larger["relative_spread"][0] > stopped["relative_spread"][0]
    advised = monitor_collapse.train(DEEP, 0.0, 0, stop=True, source="command")
    assert (advised["stopped"], advised["steps"]) == (False, 1)
    assert advised["scale"] >= 1


def test_the_page_of_the_monitor_shows_the_kept_runs() -> None:
    runs = monitor_collapse.STUDY.kept()["runs"]
    page = MONITOR_PAGE.read_text(encoding="utf-8")
    assert monitor_collapse.table(runs) in page
    trained = [run for run in runs if run["steps"]]
    shares = [run["seconds_an_audit"] / (500 * run["seconds_a_step"]) for run in trained]
    assert f"{min(shares):.2%} to {max(shares):.2%}" in page
    spent = [run["audits_share"] for run in trained]
    assert f"{min(spent):.1%} to {max(spent):.1%}" in page


def test_a_collapsed_model_is_repaired_by_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:  # in this process: a fresh one would load its libraries again
        result = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(repair, "rankwise", run)
    monkeypatch.setattr(repair, "TOKENS", 16)
    monkeypatch.setattr(repair, "SEQUENCES", 2)
    found = repair.repair("6 random layers", repair.deep_model(6), repair.demo_model())
    whole, broken, repaired = found["stages"]
    assert repair.is_repaired(found)
    assert broken["loss"] != whole["loss"] == repaired["loss"]
    assert broken["states"] != whole["states"] == repaired["states"]  # λ = 1 again: the original model
    assert found["command"] == broken["remedy"]
    sites = [word.split()[0] for word in found["command"].split("--sites ")[1:]]
    assert sites == [f"model.layers.{at}.self_attn" for at in range(3, 6)]
    assert "COLLAPSE" in "\n".join(found["changes"]).split("Resolved:")[1]
    assert "(the remedy of the COLLAPSE)" in repair.section(found)
    assert not repair.is_repaired({**found, "command": repair.REPAIR})
    for stages in ((whole, whole, whole), (whole, broken, broken), (broken, broken, whole)):
        assert not repair.is_repaired({**found, "stages": stages})


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(repair.subprocess.CalledProcessError):
        repair.rankwise("skip", "nowhere", "--steps", "many")


def test_kept_models_that_collapse_are_repaired() -> None:
    kept = repair.STUDY.kept()["models"]
    found = {one["name"]: [bool(stage["collapses"]) for stage in one["stages"]] for one in kept}
    collapses = [False, True, False]
    assert found == {
        "12 random layers": collapses,
        "all-MiniLM-L6-v2": collapses,
        "bundled demo": [False] * 3,
    }
    assert [repair.is_repaired(one) for one in kept] == [True, True, False]
