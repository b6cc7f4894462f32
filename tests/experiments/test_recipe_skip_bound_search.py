import math

import pytest
import torch
from experiments import skip_bound_search as module
from experiments.skip_bound_search import BOUNDS, STUDY, Recipe, measure, search_bound, starts, tables

from rankwise.theory import skip_bound

SMALL = Recipe(steps=3, copies=2)


def test_what_was_written_down_found_no_violation() -> None:
    report = STUDY.kept()
    found = [one for one in report["searches"] if one["bound"] != "theorem"]
    assert sum(one["evaluations"] for one in found) >= 50_000
    assert {one["norm"] for one in found} == {"LayerNorm", "RMSNorm"}
    assert (min(one["eps"] for one in found), max(one["eps"] for one in found)) == (0, 1)
    for one in report["searches"]:
        assert one["worst"] < 1e-9
        assert one["speaking"] >= one["evaluations"] / 10
    assert all(
        0 < layer["both"] <= layer["rows"] for layers in report["least_scales"].values() for layer in layers
    )


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("centre", [True, False])
def test_its_bounds_are_those_of_the_package(centre: bool, eps: float) -> None:
    y, b = starts(SMALL, 5, 4)
    own = torch.stack([bound(y, b, centre, eps) for bound in BOUNDS.values()]).amax(0).clamp(min=0)
    assert torch.allclose(own, skip_bound(y, b, 1.0, norm="layer" if centre else "rms", eps=eps), atol=1e-9)


def test_a_bound_that_promises_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(y, b, scale, **rest):
        return skip_bound(y, 0.2 * b, scale, **rest)

    monkeypatch.setattr(module, "skip_bound", greedy)
    assert search_bound(SMALL, "mean", True, 0.0).worst > 0


def test_a_small_run_is_shown(monkeypatch) -> None:
    monkeypatch.setattr(module, "minilm", lambda: None)
    report = measure(Recipe(steps=2, copies=1))
    assert report["evaluations"] == 2 * len(module.SHAPES) * len(module.STARTS) * 20
    assert [layer["norm"] for layer in report["least_scales"]["demo"]] == ["none"] * 4
    assert all(math.isfinite(layer["both"]) for layer in report["least_scales"]["demo"])
    assert "| theorem | LayerNorm |" in tables(report)["searches"]
