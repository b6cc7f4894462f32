"""Every recipe builds a model and takes a step on data of its own kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankwise.train import RECIPES, recipe, train
from rankwise.train.models import build_model, count_parameters
from rankwise.train.recipes.language import PARAMETERS
from rankwise.train.tasks import make_task

SMALL: dict[str, dict[str, Any]] = {
    "depth": {"layers": 3, "skip": 0.5, "task.options.windows": 20},
    "language": {"model": "softmax", "task.options.windows": 20},
    "long-range": {"task.options.train": 20, "task.options.test": 8},
    "saturation": {"head_dim": 2, "task.options.test_examples": 4},
    "skips": {"task": "recall", "skip": "learned", "task.options.train": 20, "task.options.test": 8},
    "vision": {"model": "tost"},
}
FEW = {"steps": 2, "batch": 2, "evaluation.every": 2, "evaluation.examples": 2, "width": 32, "layers": 2}
FEW |= {"monitor_every": 2, "device": "cpu", "log_every": 1, "parameters": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8), np.arange(20) % 10
    np.savez(folder / "cifar10.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    return folder


def place(made: Any, folder: Path) -> dict[str, str]:
    files = {"bytes": folder / "text.txt", "cifar10": folder, "cifar10-sequence": folder}
    return {"task.path": str(files[made.task.name])} if made.task.name in files else {}


@pytest.mark.parametrize("size", ["small", "paper"])
def test_language_models_have_the_weights_of_their_transformer(size: str, data: Path) -> None:
    made = recipe("language", size=size, **{"task.path": str(data / "text.txt"), "task.options.windows": 2})
    task = make_task(made)
    assert count_parameters(made.model, task, task.length) == PARAMETERS[size]
    assert bool(recipe("language").early)
    assert not recipe("language", size="paper").early


def test_every_recipe_is_here() -> None:
    assert set(SMALL) == set(RECIPES)


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_trains(name: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    given = {**FEW, **SMALL[name]}
    results = train(recipe(name, **given, **place(recipe(name, **given), data)), tmp_path / "out")
    assert 0 < results["scores"]["loss"] < 20
    if results["configuration"]["monitor"]:
        assert {key.split("/")[1] for key in results["rank"]["0"]} >= {"heads_effective_rank"}


@pytest.mark.parametrize("skip", [-2, 0, 2, "learned", "channel", "shared"])
def test_skips_are_as_asked(skip: Any) -> None:
    made = recipe(
        "skips", task="recall", skip=skip, width=16, **{"task.options.train": 2, "task.options.test": 2}
    )
    task = make_task(made)
    model = build_model(made.model, task, task.length)
    kept = [layer.skip for layer in model.model.layers]
    x = torch.ones(1, 1, 16)
    wanted = -1.0 if isinstance(skip, str) else float(skip)
    assert all(torch.equal(one(x, 0 * x), wanted * x) for one in kept)
    assert [0 if one.weight is None else one.weight.numel() for one in kept] == (
        [{"learned": 1, "shared": 1, "channel": 16}.get(skip, 0)] * len(kept)
    )
    assert len({id(one.weight) for one in kept}) == (2 if skip in ("learned", "channel") else 1)
