"""What a user may write after the name of a recipe, and what is refused."""

from pathlib import Path

import pytest
from tests.train.tiny import TEXT, TINY
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.cli.train import HELP, _run_name
from rankwise.errors import InputError
from rankwise.train import RECIPES, recipe
from rankwise.train.overrides import build, changes, parse_pairs
from rankwise.train.provenance import command
from rankwise.train.results import variant
from rankwise.train.settings import EarlyLoss, Recipe
from rankwise.train.tasks import make_task


def test_values_are_json_or_text() -> None:
    given = parse_pairs(["a=1", "b=x y", "c=true", "d=null", "e=[1, 2]", "f=k=v"])
    assert given == {"a": 1, "b": "x y", "c": True, "d": None, "e": [1, 2], "f": "k=v"}


@pytest.mark.parametrize("pairs", [["steps"], ["=3"], ["steps=1", "steps=2"], ["name=tost"]])
def test_what_is_no_pair_is_refused(pairs: list[str]) -> None:
    with pytest.raises(InputError):
        parse_pairs(pairs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stepz": 3}, "`stepz`: expected a key of the recipe language.*Did you mean steps"),
        ({"modle": "tost"}, "Did you mean model"),
        ({"model.name": "y"}, None),
        ({"name": "x"}, r"`name`: expected a key that may be changed.*model\.name"),
        ({"betas": [5, 5]}, r"`optimiser\.betas\.0`: expected less than 1, got 5"),
        ({"learning_rate": float("inf")}, r"`optimiser\.learning_rate`: expected a finite number, got inf"),
        ({"seed": 2**32}, "`seed`: expected less than or equal to 4294967295"),
        ({"steps": "many"}, "`steps`: expected a valid integer.*got 'many'"),
        ({"batch": True}, "`batch`: expected a valid integer, got True"),
        ({"seed": True}, "`seed`: expected a valid integer, got True"),
        ({"feed_forward": False}, "`model.feed_forward`: expected a valid integer, got False"),
        ({"clip": True}, "`optimiser.clip`: expected a valid number, got True"),
        ({"steps": 0}, "`steps`: expected greater than or equal to 1, got 0"),
        ({"learning_rate": -1}, "`optimiser.learning_rate`"),
        ({"model": "tots"}, "Did you mean tost"),
        ({"size": "big"}, "`size`"),
        ({"device": "gpu"}, "`device`"),
        ({"options": {}}, "expected one field, got 2. Write model.options or task.options"),
        ({"model.options.normm": "rms", "task.tokenz": 3}, "Did you mean"),
    ],
)
def test_bad_keys_and_values_are_named(given: dict[str, object], message: str | None) -> None:
    if message is None:
        assert build(RECIPES["language"], given).model.name == "y"
        return
    with pytest.raises(InputError, match=message):
        build(RECIPES["language"], given)


def test_whole_numbers_may_be_written_as_powers_and_switches_stay_switches() -> None:
    given = parse_pairs(["steps=1e3", "monitor=true", "clip=1"])
    made = recipe("language", **given)
    assert (made.steps, made.monitor, made.optimiser.clip) == (1000, True, 1.0)


def test_each_example_of_the_help_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that train find their data where the text is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare.txt").write_text(TEXT)
    lines = [line.split()[2:] for line in HELP.splitlines() if line.startswith("  rankwise train ")]
    trained = 0
    for words in lines:
        said = CliRunner().invoke(app, ["train", *words, "--show"])
        assert said.exit_code == 0, said.exception
        if "--show" not in words:
            make_task(Recipe.model_validate_json(said.output))
            trained += 1
    assert trained == 3


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(InputError, match="Did you mean language"):
        recipe("langauge")


def test_an_argument_that_divides_by_zero_is_named() -> None:
    with pytest.raises(InputError, match=r"expected sizes above 0, got .*head_dim=0"):
        recipe("saturation", head_dim=0, tied=True)


def test_variants_have_folders_of_their_own() -> None:
    plain, text = recipe("language"), recipe("language", **{"task.path": "a.txt", "device": "cpu"})
    assert _run_name(plain) == _run_name(text) == "language-transformer-seed0"
    others = [{"model.name": "tost"}, {"model.name": "softmax"}, {"steps": 7}, {"model": "tost"}, {"seed": 1}]
    names = [_run_name(recipe("language", **other)) for other in others]
    assert len({*names, _run_name(plain)}) == len(others) + 1
    assert variant(recipe("language", **{"model.name": "tost"})) == {
        "model": "transformer",
        "changed": {"model.name": "tost"},
    }


def test_a_short_name_and_a_dotted_name_are_the_same_field() -> None:
    assert recipe("language", width=64) == recipe("language", **{"model.width": 64})


def healthy(seed: int = 0) -> Recipe:
    return recipe("language", seed=seed).model_copy(
        update={"early": (EarlyLoss(step=20, loss=3.0, tolerance=0.1),)}
    )


def test_early_numbers_hold_for_the_recipe_as_it_is_alone() -> None:
    assert build(healthy, {"seed": 3, "task.path": "a.txt", "evaluation.every": 7}).early
    assert build(healthy, {"steps": 600}).early, "the value it has already"
    assert not build(healthy, {"batch": 9}).early


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": "tost", "seed": 2, "size": "paper"},
        {**TINY, "model": "tost-decayed", "model.options.norm": "rms", "task.options.windows": 10},
    ],
)
def test_a_recorded_command_makes_the_same_configuration(given: dict[str, object]) -> None:
    made = recipe("language", **given)
    words = command("language", changes(made, RECIPES["language"]))
    again = parse_pairs(words.split()[3:])
    assert recipe("language", **again) == made
