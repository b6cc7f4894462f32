"""Collapse in trained models: the kept results support the page, and the demo is measured."""

import pytest
from experiments.skips import collapse_trained as experiment


def last(model: str, weights: str, scale: float) -> float:
    return next(
        one["share"][-1]
        for one in experiment.STUDY.kept()["runs"]
        if (one["weights"], one["scale"]) == (weights, scale) and one["model"].startswith(model)
    )


def test_the_kept_results_support_the_page() -> None:
    minilm, demo = "all-MiniLM", "demo transformer"
    assert last(minilm, "trained", 0) < 1e-2
    assert last(minilm, "trained", -1) < 0.3 * last(minilm, "trained", 1)
    assert last(minilm, "random", -1) == pytest.approx(last(minilm, "random", 1), abs=0.01)
    assert last(demo, "trained", 0) > 2 * last(demo, "random", 0)
    assert last("demo ToST", "random", 0) > 0.9


def test_the_demo_is_measured_trained_and_random(monkeypatch) -> None:
    place = experiment.places()["demo transformer, 4 layers"]
    monkeypatch.setattr(experiment, "SCALES", (0.0,))
    monkeypatch.setattr(experiment, "SEQUENCES", 1)
    monkeypatch.setattr(experiment, "places", lambda: {"demo": place})
    found = experiment.measure()["runs"]
    assert [one["weights"] for one in found] == ["trained", "random"]
    assert found[0]["share"][-1] > found[1]["share"][-1]
