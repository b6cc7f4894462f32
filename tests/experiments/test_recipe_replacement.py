"""The page of replaced layers is what its results say, and a run on little text is whole."""

import json
from typing import Any

import pytest
import torch
from experiments import replacement as recipe
from experiments import replacement_page as page

CONTENT = json.loads(recipe.RESULTS.read_text(encoding="utf-8"))


def made_up(sets: dict[str, float]) -> dict[str, Any]:
    guides = {"importance": [3.0, 1.0], "rank": [1.0, 2.0], "swap": [5.0, 4.0]}
    return {"guides": guides, "sets": {name: {"tuned": loss} for name, loss in sets.items()}}


def test_the_page_is_made_of_the_results() -> None:
    assert page.made(CONTENT) == recipe.PAGE.read_text(encoding="utf-8")


def test_every_set_was_run() -> None:
    for run in CONTENT["runs"]:
        assert len(run["sets"]) == 2 ** len(run["guides"]["importance"])
        tuned = {name: losses["tuned"] for name, losses in run["sets"].items()}
        moved = abs(tuned[""] - run["sets"][""]["distilled"])
        assert all(
            loss - tuned[""] > moved for name, loss in tuned.items() if name
        )  # not tuning is what is seen
        for before, after in ((one["before"], one["after"]) for one in run["distillation"]):
            assert after < before


def test_orders_follow_their_guides_and_are_judged_by_the_sets_between() -> None:
    run = made_up({"": 1.0, "0": 1.5, "1": 1.25, "0 1": 2.0})
    orders = page.orders(run)
    assert (orders[page.GUIDES["importance"]], orders[page.GUIDES["rank"]]) == ((1, 0), (0, 1))
    assert page.losses(run, (1, 0)) == [1.0, 1.25, 2.0]
    assert (page.ranked(run, (1, 0)), page.ranked(run, (0, 1))) == ((0, 2), (1, 2))
    assert (page.adds(run, 0), page.adds(run, 1)) == (0.625, 0.375)
    assert page.among_last(run) == (0, 0)
    assert page.among_last({**run, "guides": {**run["guides"], "importance": [1.0, 3.0]}}) == (1, 1)
    assert page.places([run]).endswith("last to first 0 of 1")


def test_layers_are_distilled_and_tuned() -> None:
    small = recipe.Recipe(
        tokens=32, distil_windows=4, distil_steps=8, distil_batch=4, tune_steps=1, tune_batch=1
    )
    torch.manual_seed(0)
    reader = recipe.Reader("To be, or not to be, that is the question.\n" * 20, small.tokens, 0)
    mixers, errors = recipe.distil(small, reader.draw(4), "linear")
    assert all(one["after"] < one["before"] for one in errors)
    held_out = recipe.batches(reader.draw(2), 2)
    whole = recipe.replaced(small, (), "linear", mixers, [], held_out)
    found = recipe.replaced(small, (2,), "linear", mixers, [reader.draw(1)], held_out)
    assert whole["tuned"] == whole["distilled"]
    assert len({*found.values(), whole["tuned"]}) == 3


def test_results_of_other_settings_are_not_mixed(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "results.json"
    other.write_text(json.dumps({**CONTENT, "settings": {}}))
    with pytest.raises(SystemExit):
        recipe.main(["--text", str(recipe.RESULTS), "--results", str(other)])
    assert "other settings" in capsys.readouterr().err
