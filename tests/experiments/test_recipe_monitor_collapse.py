"""The recipe of the monitored collapse: small runs, and the page shows what was recorded."""

from pathlib import Path

from experiments.monitor_collapse import STUDY, Recipe, table, train

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"


def test_a_deep_post_norm_model_is_stopped_with_its_layer_and_a_larger_scale_goes_on():
    recipe = Recipe(depth=36, steps=1, seeds=(0,), tokens=32, batch=2)
    stopped = train(recipe, 0.5, 0, stop=True)
    assert stopped["stopped"]
    assert stopped["steps"] == 0
    assert 0 < stopped["collapse"][0] <= recipe.depth
    larger = train(recipe, 2.0, 0, stop=True)
    assert not larger["stopped"]
    assert larger["steps"] == 1
    assert larger["relative_spread"][0] > stopped["relative_spread"][0]


def test_the_scale_of_the_advised_command_goes_on():
    recipe = Recipe(depth=36, steps=1, seeds=(0,), tokens=32, batch=2)
    advised = train(recipe, 0.5, 0, stop=True, source="command")
    assert not advised["stopped"]
    assert advised["steps"] == 1
    assert advised["scale"] >= 1


def test_the_page_shows_what_was_recorded():
    runs = STUDY.kept()["runs"]
    assert table(runs) in PAGE.read_text()
    shares = [run["seconds_an_audit"] / (500 * run["seconds_a_step"]) for run in runs if run["steps"]]
    assert f"{min(shares):.2%} to {max(shares):.2%}" in PAGE.read_text()
    spent = [run["audits_share"] for run in runs if run["steps"]]
    assert f"{min(spent):.1%} to {max(spent):.1%}" in PAGE.read_text()
