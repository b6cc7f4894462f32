"""Experiments on training: their commands make their configurations, and the page says what the runs say."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recipes import early, results, run
from recipes.experiment import NORMAL, RESULTS, STUDENT, Experiment, Row, alike, below, beyond, run_id, within
from recipes.trained import EXPERIMENTS
from recipes.trained.saturation import WIDTHS, curves, label, same_place
from tests.train.tiny import pairs
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.train import recipe
from rankwise.train.early import KEPT
from rankwise.train.overrides import parse_pairs

LANGUAGE = EXPERIMENTS["language"]
ALL = [(one, label) for one in EXPERIMENTS.values() for label in one.rows]


@pytest.mark.parametrize(("experiment", "label"), ALL, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("size", ["small", "paper"])
def test_the_command_of_a_row_makes_its_configuration(experiment: Experiment, label: str, size: str) -> None:
    given = {"task.path": "a b.txt"}
    _, name, *told = run.words(experiment, label, size, 1, given)
    assert recipe(name, **parse_pairs(told)) == experiment.configuration(label, size, 1, **given)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_rows_that_are_spoken_of_are_there(experiment: Experiment) -> None:
    spoken = {*experiment.paper, *(label for one in experiment.expectations for label in one.needs)}
    assert spoken <= set(experiment.rows)


def kept(folder: Path, label: str, seed: int, loss: float) -> None:
    hardware = {"processor": "a processor", "threads": 1}
    made = {"command": f"rankwise train language model={label}", "seed": seed, "hardware": hardware}
    content: dict[str, Any] = {
        "scores": {"loss": loss, "accuracy": 0.5},
        "parameters": 1234,
        "tokens_per_second": 500.0,
        "seconds": 120.0,
        "cpu_seconds": 60.0,
        "peak_memory": 2**30,
        "chance": None,
        "data": {"source": "a text", "train": 1000, "test": 50},
        "configuration": {"evaluation": {"examples": 20}},
        "provenance": {**made, "torch": "2", "transformers": "5"},
    }
    (folder / f"{run_id(LANGUAGE, label, 'small', seed)}.json").write_text(json.dumps(content))


def test_the_page_puts_first_what_does_not_hold(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.98, 2.0, 2.02)):
        kept(tmp_path, "transformer", seed, loss)
    kept(tmp_path, "tost", 0, 1.5)
    kept(tmp_path, "tost-uniform", 0, 1.75)
    page = results.page([LANGUAGE], tmp_path)
    waiting = page.index(f"wait for runs, by experiment: language ({len(LANGUAGE.expectations) - 2})")
    assert page.index("| no |") < page.index("| yes |") < waiting
    kept(tmp_path, "tost", 1, 2.3)
    kept(tmp_path, "tost-uniform", 0, 40.0)
    page_of_two = results.page([LANGUAGE], tmp_path)
    said = "loss of transformer is below that of tost | unclear | 2.000 against 1.900 | 3 and 2 |"
    assert page_of_two.index("| unclear |") < page_of_two.index("| yes |")
    assert said in page_of_two
    assert "loss of transformer is below that of tost | no | 2.000 against 1.500 | 3 and 1 |" in page
    assert "loss of tost is below that of tost-uniform | yes | 1.500 against 1.750 | 1 |" in page
    assert "| transformer | 2.000 ± 0.020 | 0.500 ± 0.000 | 2.84" in page
    assert "| 0, 1, 2 | 1,234 | 1,000 | 1.0 | 1,024 MiB |" in page
    assert "| tost | 1.500 | 0.500 |" in page, "no spread of one seed"
    assert "\nrankwise train language model=tost\n" in page
    assert "Data: a text, 1,000 examples to draw from, 20 to judge by." in page


def test_losses_a_token_are_given_a_byte_as_well() -> None:
    def told(**more: float) -> str:
        return results.loss(Row("", [{"scores": {"loss": 3.0}, **more}]))

    assert told(bytes_per_token=2.0) == "3.000 a token, 1.500 a byte"
    assert told() == told(bytes_per_token=1.0) == "3.000"


def test_margins_are_held_on_their_own_side(tmp_path: Path) -> None:
    kept(tmp_path, "tost", 0, 1.5)
    kept(tmp_path, "transformer", 0, 1.25)
    table = LANGUAGE.table("small", tmp_path)
    assert below("transformer", "tost").judge(table)[0]
    assert not below("transformer", "tost", by=0.25).judge(table)[0]
    assert within("tost", "transformer", 0.26).judge(table) == (True, "+0.250")
    assert within("tost", "transformer", 0.25).judge(table)[0] is False
    assert alike("tost", "transformer", 0.2, "loss").judge(table)[0] is False
    assert alike("transformer", "tost", 0.3, "loss").judge(table)[0] is True


def test_differences_within_their_interval_decide_nothing() -> None:
    def rows(*losses: float) -> list[Row]:
        return [Row("", [{"scores": {"loss": loss + more}} for more in (-1.0, 0.0, 1.0)]) for loss in losses]

    def told(rows: list[Row], *distances: float, more: Sequence[Row] = ()) -> list[bool | None]:
        table = {str(at): row for at, row in enumerate([*rows, *more])}
        return [beyond(distance, rows, "loss", table) for distance in distances]

    three = rows(0, 0)
    error = STUDENT[3] * (2 / 3) ** 0.5  # of two means of three seeds with standard deviation 1
    assert told(three, -1.01 * error, -0.99 * error, 0.99 * error, 1.01 * error) == [False, None, None, True]
    single = [Row("", row.runs[:1]) for row in three]
    assert told(single, 0.1) == [True], "no row of the table says how far seeds are apart"
    error = STUDENT[3] * 2**0.5
    assert told(single, 0.99 * error, 1.01 * error, more=rows(5)) == [None, True], "the spread of the others"


def test_few_examples_tell_little_of_an_accuracy() -> None:
    judging = {"data": {"test": 500}, "configuration": {"evaluation": {"examples": 400}}}
    two = [Row("", [{"scores": {"accuracy": share}, **judging}]) for share in (0.5, 0.8)]
    table = dict(zip("ab", two, strict=True))
    error = NORMAL * ((0.25 + 0.16) / 400) ** 0.5
    told = [beyond(times * error, two, "accuracy", table) for times in (-1.01, 0.99, 1.01)]
    assert told == [False, None, True]
    assert beyond(1.0, two, "accuracy", table, floor=0.8) is None, "nothing was learned"


def test_a_run_is_done_once_and_a_failed_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    calls = []

    def in_this_process(command: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        done = CliRunner().invoke(app, command[3:])
        return subprocess.CompletedProcess(command, done.exit_code)

    monkeypatch.setattr(subprocess, "run", in_this_process)
    monkeypatch.setattr("rankwise.train.provenance.commit", lambda: "abc")
    where = ["--rows", "transformer", "--seeds", "0", "--work", str(tmp_path / "w")]
    where += ["--results", str(tmp_path / "r")]
    arguments = ["language", *pairs(tmp_path), *where]
    assert run.main(["language", "task.path=missing.txt", *where]) == 1
    assert run.main(arguments) == 0
    assert json.loads((tmp_path / "r" / "language-transformer-seed0.json").read_text())["kind"] == "language"
    assert not (tmp_path / "w" / "language-transformer-seed0").exists()
    assert run.main(arguments) == 0
    assert len(calls) == 2, "the last time it was done already"
    before = (tmp_path / "r" / "language-transformer-seed0.json").read_text()
    assert run.main(["language", *pairs(tmp_path, steps=1), *where]) == 1
    assert "another configuration (steps)" in capsys.readouterr().err
    assert run.main(["language", *where]) == 1, "the row as it is"
    assert len(calls) == 2
    assert (tmp_path / "r" / "language-transformer-seed0.json").read_text() == before
    assert run.main([*arguments[:-1], str(tmp_path / "kept"), "--keep"]) == 0
    assert (tmp_path / "w" / "language-transformer-seed0" / "model").is_dir()


def test_early_losses_are_those_of_the_kept_runs() -> None:
    assert json.loads(KEPT.read_text(encoding="utf-8")) == early.rows(RESULTS)
    assert early.tolerance([2.0, 2.0]) == early.FEW
    assert early.tolerance([2.0, 2.1, 2.2]) == pytest.approx(0.5)
    assert early.tolerance([2.0, 2.0, 2.0]) == early.LEAST


@pytest.mark.parametrize(
    ("ranks", "scores", "examples", "holds"),
    [
        ((1, 2, 4, 4, 4, 4), (0.1, 0.2, 0.4, 0.4, 0.4, 0.4), 10_000, True),
        ((1, 2, 4, 4, 4, 4), (0.1, 0.1, 0.1, 0.1, 0.1, 0.4), 10_000, False),
        ((1, 1, 1, 1, 1, 1), (0.4, 0.4, 0.4, 0.4, 0.4, 0.4), 10_000, False),
        ((1, 2, 4, 4, 4, 4), (0.1, 0.2, 0.4, 0.4, 0.4, 0.4), 3, None),
    ],
    ids=["at one width", "apart", "flat", "of few examples"],
)
def test_flat_curves_do_not_saturate_together(
    ranks: tuple, scores: tuple, examples: int, holds: bool | None
) -> None:
    table = {}
    for width, rank, score in zip(WIDTHS, ranks, scores, strict=True):
        # class attention has rank 1 at any width
        found = {
            "rank/heads_effective_rank/layers.00": rank,
            "rank/heads_effective_rank/layers.01.cross": 1.0,
        }
        judged = {"configuration": {"evaluation": {"examples": None}}, "data": {"test": examples}}
        run = {"scores": {"accuracy": score}, "rank": {"0": found}} | judged
        table[label(width, False)] = Row(label(width, False), [run])
    assert same_place(False).judge(table)[0] is holds
    assert curves(table, False) == (list(ranks), list(scores))
