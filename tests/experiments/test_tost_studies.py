"""Studies of ToST: accuracy from token counts, and descent of the rate R_c^var."""

import numpy as np
import pytest
import torch
from experiments.registry import EXPERIMENTS
from experiments.tasks.listops import CLOSE, MAX, MIN
from experiments.tasks.task import Examples
from experiments.tost import rate_descent
from experiments.tost.long_range import KNOWN
from experiments.tost.shortcuts import counting_accuracy, first_accuracy
from torch import Tensor, nn


def split(values: str, seed: int) -> Examples:
    """Return expressions of an operation, two digits of 0 and 1, and a bracket; values by the named rule."""
    draw = np.random.default_rng(seed)
    operation, digits = draw.choice([MIN, MAX], 200), draw.integers(0, 2, (200, 2))
    ids = np.stack([operation, *(1 + digits).T, np.full(200, CLOSE), np.zeros(200, dtype=int)], 1)
    labels = {
        "operation": (operation == MAX).astype(int),
        "counts": np.where(operation == MAX, digits.max(1), digits.min(1)),
        "order": digits[:, 0],
    }
    return Examples({"input_ids": ids, "labels": labels[values]}, np.full(200, 4))


@pytest.mark.parametrize(
    ("values", "first", "counts"), [("operation", 1, 1), ("counts", 0.75, 1), ("order", 0.5, 0.75)]
)
def test_counts_decide_what_does_not_depend_on_order(values: str, first: float, counts: float) -> None:
    two = split(values, 0), split(values, 1)
    error = 4 * 0.5 / 200**0.5
    assert first_accuracy(*two) == pytest.approx(first, abs=error if first < 1 else 0)
    accuracy, loss = counting_accuracy(*two)
    assert accuracy == pytest.approx(counts, abs=error if counts < 1 else 0)
    assert loss < 0.7 if counts == 1 else loss > 0.2


def test_counts_were_measured_on_the_data_of_the_runs() -> None:
    table = EXPERIMENTS["long-range-listops"].table()
    read = {run["values"]["data"]["sha256"] for row in table.values() for run in row.runs}
    assert read == {KNOWN["sha256"]}


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))


def test_a_layer_that_returns_through_the_transpose_descends(ids: Tensor) -> None:
    model = rate_descent.classifier(0)
    for block in model.model.layers:
        with torch.no_grad():
            block.mixer.out_proj.weight.copy_(block.mixer.in_proj.weight.T)
            block.mixer.out_proj.bias.zero_()
            block.mixer.in_proj.bias.zero_()
    layers = rate_descent.measure_layers(model, ids)
    assert len(layers) == 4
    assert all(one["derived"] > 0.99999 for one in layers), "the derived step is the gradient"
    assert all(one["after_layer"] < one["rate"] and one["cosine"] > 10 * one["chance"] for one in layers)
    for block in model.model.layers:
        nn.init.normal_(block.mixer.out_proj.weight, std=0.02)
    assert all(abs(one["cosine"]) < 10 * one["chance"] for one in rate_descent.measure_layers(model, ids))


def test_a_small_run_has_a_table_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_descent, "WINDOWS", 2)
    monkeypatch.setattr(rate_descent, "TOKENS", 32)
    report = {**rate_descent.measure(steps=2, seeds=1), "versions": {"torch": "2"}}
    assert report["accuracy"]
    assert rate_descent.tables(report)["tables"].count("| 3 |") == 4
    bidirectional = [one for name, layers in report["layers"].items() if name[0] == "b" for one in layers]
    assert min(one["derived"] for one in bidirectional) > 0.999


def test_kept_layers_support_the_page() -> None:
    kept = rate_descent.STUDY.kept()
    trained = {name: layers for name, layers in kept["layers"].items() if "untrained" not in name}
    layers = [one for found in trained.values() for one in found]
    assert (sum(one["after_block"] < one["rate"] for one in layers), len(layers)) == (12, 16)
    assert min(one["cosine"] for one in layers) == pytest.approx(-0.44, abs=0.005)
    first = [found[0] for name, found in trained.items() if "seed" in name]
    assert all(1.25 < one["after_layer"] / one["rate"] < 1.4 for one in first)
