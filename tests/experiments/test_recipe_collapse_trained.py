import pytest
from experiments import collapse_trained as recipe


@pytest.fixture(scope="module")
def kept():
    return recipe.STUDY.kept()


def last(kept, model: str, weights: str, scale: float) -> float:
    rows = [one for one in kept["runs"] if (one["weights"], one["scale"]) == (weights, scale)]
    return next(one["share"][-1] for one in rows if one["model"].startswith(model))


def test_the_kept_results_hold_what_the_page_says(kept) -> None:
    assert last(kept, "all-MiniLM", "trained", 0) < 1e-2
    assert last(kept, "all-MiniLM", "trained", -1) < 0.3 * last(kept, "all-MiniLM", "trained", 1)
    assert last(kept, "all-MiniLM", "random", -1) == pytest.approx(
        last(kept, "all-MiniLM", "random", 1), abs=0.01
    )
    assert last(kept, "demo transformer", "trained", 0) > 2 * last(kept, "demo transformer", "random", 0)
    assert last(kept, "demo ToST", "random", 0) > 0.9


def test_it_runs(monkeypatch, kept) -> None:
    monkeypatch.setattr(recipe, "SCALES", (0.0,))
    monkeypatch.setattr(recipe, "SEQUENCES", 1)
    monkeypatch.setattr(recipe, "places", lambda: {"demo": recipe_places["demo transformer, 4 layers"]})
    found = recipe.run()["runs"]
    assert [one["weights"] for one in found] == ["trained", "random"]
    assert found[0]["share"][-1] > found[1]["share"][-1]


recipe_places = recipe.places()
