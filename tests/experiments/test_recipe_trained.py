"""Experiments on training: their commands make their configurations, and the page says what the runs say."""

import json
import math
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments import early, render, run
from experiments.experiment import (
    BYTE_LOSS,
    NORMAL,
    STUDENT,
    Experiment,
    Row,
    alike,
    below,
    beyond,
    exceeds,
    within,
)
from experiments.results import RESULTS, Run, append_run, audits_to_columns, read_runs
from experiments.trained import EXPERIMENTS
from experiments.trained.language_parts import frontier
from experiments.trained.long_range import RATES, at_rate, best_rates
from experiments.trained.reading import by_layer, collapse
from experiments.trained.saturation import WIDTHS, curves, label, same_place
from tests.train.tiny import pairs
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.errors import RecordError
from rankwise.train import recipe
from rankwise.train.early import KEPT
from rankwise.train.overrides import parse_pairs

LANGUAGE = EXPERIMENTS["language"]
ALL = [(one, label) for one in EXPERIMENTS.values() for label in one.rows]


@pytest.mark.parametrize(("experiment", "label"), ALL, ids=lambda value: getattr(value, "name", value))
def test_the_command_of_a_row_makes_its_configuration(experiment: Experiment, label: str) -> None:
    given = {"task.path": "a b.txt"}
    _, name, *told = run.words(experiment, label, 1, given)
    assert recipe(name, **parse_pairs(told)) == experiment.configuration(label, 1, **given)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_rows_that_are_spoken_of_are_there(experiment: Experiment) -> None:
    spoken = {*experiment.paper, *(label for one in experiment.expectations for label in one.needs)}
    assert spoken <= set(experiment.rows)


def made(
    settings: dict[str, Any] | None = None, hardware: dict[str, Any] | None = None, **values: Any
) -> Run:
    """Return a run of one row, of what a test reads of it."""
    provenance = {"hardware": hardware or {"processor": "a processor", "threads": 1}}
    return {
        "row": "",
        "seed": values.pop("seed", 0),
        "settings": settings or {},
        "values": values,
        "provenance": provenance | {"command": "rankwise train", "torch": "2", "transformers": "5"},
    }


def kept(
    folder: Path, label: str, seed: int, loss: float, experiment: Experiment = LANGUAGE, **changed: Any
) -> Run:
    """Keep a run as `experiments.run` does: the row's configuration, apart from what is ``changed``."""
    configuration = experiment.configuration(label, seed).model_dump(mode="json")
    run = made(
        configuration | changed,
        seed=seed,
        scores={"loss": loss, "accuracy": 0.5},
        parameters=1234,
        tokens_per_second=500.0,
        seconds=120.0,
        cpu_seconds=60.0,
        peak_memory=2**30,
        chance=None,
        data={"source": "a text", "train": 1000, "test": 20, "sha256": "abc"},
    )
    run["row"] = label
    run["provenance"] |= {"command": f"rankwise train language model={label}", "seed": seed}
    append_run(experiment.path(folder), run)
    return run


def test_the_page_puts_first_what_does_not_hold(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.98, 2.0, 2.02)):
        kept(tmp_path, "transformer", seed, loss)
    kept(tmp_path, "tost", 0, 1.5)
    kept(tmp_path, "tost-uniform", 0, 1.75)
    page = render.page([LANGUAGE], tmp_path)
    waiting = page.index(f"wait for runs, by experiment: language ({len(LANGUAGE.expectations) - 2})")
    assert page.index("| no |") < page.index("| yes |") < waiting
    assert "\nWithout a run: softmax; softmax-rotary; tost-decayed; tost-hybrid;" in page
    kept(tmp_path, "tost", 1, 2.3)
    kept(tmp_path, "tost-uniform", 0, 40.0)
    page_of_two = render.page([LANGUAGE], tmp_path)
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
    assert "\n600 steps of 8. On a processor, 1 threads at most" in page


def test_only_runs_of_the_rows_own_configuration_are_counted(tmp_path: Path) -> None:
    for seed in (0, 100):
        kept(tmp_path, "tost", seed, 1.5)
    assert LANGUAGE.table(tmp_path)["tost"].scores("loss") == [1.5, 1.5]
    kept(tmp_path, "tost", 1, 9.0, steps=20)
    with pytest.raises(RecordError, match=r"language.jsonl: expected the row “tost” .* got another steps"):
        LANGUAGE.table(tmp_path)
    run = kept(tmp_path, "tost", 1, 9.0)
    run["settings"]["seed"] = 2
    append_run(LANGUAGE.path(tmp_path), run)
    with pytest.raises(RecordError, match="got another seed"):
        LANGUAGE.table(tmp_path)
    kept(tmp_path, "tost", 1, 9.0, monitor_tokens=16)
    with pytest.raises(RecordError, match="got another monitor_tokens"):
        LANGUAGE.table(tmp_path)
    kept(tmp_path, "tost", 1, 1.5)
    append_run(LANGUAGE.path(tmp_path), {**run, "row": "of old"})
    with pytest.raises(RecordError, match=r"expected the row “of old” .* got no such row"):
        LANGUAGE.table(tmp_path)


def test_runs_on_other_data_are_not_counted(tmp_path: Path) -> None:
    kept(tmp_path, "transformer", 0, 1.5)
    run = kept(tmp_path, "tost", 0, 1.5)
    run["values"]["data"]["sha256"] = "def"
    append_run(LANGUAGE.path(tmp_path), run)
    with pytest.raises(
        RecordError, match=r"“transformer” at seed 0: expected .*“tost” at seed 0, sha256 def"
    ):
        LANGUAGE.table(tmp_path)


def test_a_run_replaces_that_of_its_row_and_seed_and_lines_are_sorted(tmp_path: Path) -> None:
    for seed, name, loss in ((10, "b", 1.0), (9, "b", 2.0), (0, "a", 3.0), (10, "b", 4.0)):
        append_run(tmp_path / "x.jsonl", {**kept(tmp_path, "tost", seed, loss), "row": name})
    found = [
        (run["row"], run["seed"], run["values"]["scores"]["loss"]) for run in read_runs(tmp_path / "x.jsonl")
    ]
    assert found == [("a", 0, 3.0), ("b", 9, 2.0), ("b", 10, 4.0)]
    assert read_runs(tmp_path / "y.jsonl") == []


def test_processes_that_finish_at_once_lose_no_run(tmp_path: Path) -> None:
    run = kept(tmp_path, "tost", 0, 1.0)
    path = tmp_path / "x.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: append_run(path, {**run, "seed": seed}), range(40)))
    assert [one["seed"] for one in read_runs(path)] == list(range(40))


def test_kept_files_are_as_they_would_be_written(tmp_path: Path) -> None:
    for experiment in EXPERIMENTS.values():
        lines = experiment.path().read_text(encoding="utf-8").splitlines()
        runs = read_runs(experiment.path())
        assert [(run["row"], run["seed"]) for run in runs] == sorted(
            (run["row"], run["seed"]) for run in runs
        )
        append_run(tmp_path / "one.jsonl", runs[0])
        assert (tmp_path / "one.jsonl").read_text(encoding="utf-8") == lines[0] + "\n"
        (tmp_path / "one.jsonl").unlink()


EMPTY = '{"row": "", "seed": 0, "values": {}, "provenance": {}, "settings": %s}'


@pytest.mark.parametrize(
    "content", ["", '{"row": {', "[]", '{"row": "tost"}', EMPTY % "[]", EMPTY % "{}", EMPTY % "null"]
)
def test_a_damaged_line_is_named_and_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    damaged, page = LANGUAGE.path(tmp_path), tmp_path / "page.md"
    kept(tmp_path, "tost", 0, 1.0)
    with damaged.open("a") as file:
        file.write(content + "\n")
    for main, arguments in (
        (render.main, ["--page", str(page)]),
        (run.main, ["language", "--rows", "tost"]),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, "--results", str(tmp_path)])
        assert f"{damaged}:2" in capsys.readouterr().err
    assert not page.exists()


def test_no_page_is_made_of_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit):
            render.main(["--results", str(folder), "--page", str(tmp_path / "page.md")])
        assert "no results there" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_the_page_in_the_docs_is_of_the_kept_runs() -> None:
    assert render.PAGE.read_text(encoding="utf-8") == render.page(list(EXPERIMENTS.values()))


def test_every_kept_run_is_in_the_page() -> None:
    assert {one.path().name for one in EXPERIMENTS.values()} == {
        path.name for path in RESULTS.glob("*.jsonl")
    }
    shown = [len(row.runs) for one in EXPERIMENTS.values() for row in one.table().values()]
    assert sum(shown) == sum(len(path.read_text().splitlines()) for path in RESULTS.glob("*.jsonl")) >= 513


def test_losses_a_token_are_given_a_byte_as_well() -> None:
    def told(**more: float) -> str:
        return render.loss(Row("", [made(scores={"loss": 3.0}, **more)]))

    assert told(bytes_per_token=2.0) == "3.000 a token, 1.500 a byte"
    assert told() == told(bytes_per_token=1.0) == "3.000"
    runs = [made(scores={"loss": 3.0}, bytes_per_token=2.0), made(scores={"loss": 3.0})]
    assert Row("", runs).scores(BYTE_LOSS) == [1.5, 3.0]


def test_margins_are_held_on_their_own_side(tmp_path: Path) -> None:
    for seed in (0, 1):  # no spread, so that every margin is 0
        kept(tmp_path, "tost", seed, 1.5)
        kept(tmp_path, "transformer", seed, 1.25)
    table = LANGUAGE.table(tmp_path)
    assert below("transformer", "tost").judge(table)[0]
    assert not below("transformer", "tost", by=0.25).judge(table)[0]
    assert within("tost", "transformer", 0.26).judge(table) == (True, "+0.250")
    assert within("tost", "transformer", 0.25).judge(table)[0] is False
    for pair in (("tost", "transformer"), ("transformer", "tost")):
        assert alike(*pair, 0.2, "loss").judge(table)[0] is False
        assert alike(*pair, 0.3, "loss").judge(table)[0] is True
    for bar in (1.25, 1.75, 9.0):
        assert exceeds("tost", bar, "a bar", "loss").judge(table) == (bar < 1.5, "1.500")


def test_a_lower_accuracy_is_worse() -> None:
    every = {"evaluation": {"examples": None}}
    table = {
        label: Row(label, [made(every, scores={"accuracy": share}, chance=None, data={"test": 10**9})] * 2)
        for label, share in {"low": 0.5, "high": 0.75}.items()
    }
    assert within("low", "high", 0.26, "accuracy").judge(table) == (True, "-0.250")
    assert within("low", "high", 0.24, "accuracy").judge(table)[0] is False
    assert within("high", "low", 0.01, "accuracy").judge(table) == (True, "+0.250")
    assert within("low", "high", 0.24, "accuracy", floor=0.8).judge(table)[0] is None
    assert (
        within("low", "high", 0.24, "accuracy").says == "accuracy of low is less than 0.24 below that of high"
    )


def losses(*values: float) -> Row:
    return Row("", [made(scores={"loss": value}) for value in values])


def told(rows: list[Row], *distances: float, more: Sequence[Row] = ()) -> list[bool | None]:
    """Verdicts on distances of two rows, in a table with ``more``."""
    table = {str(at): row for at, row in enumerate([*rows, *more])}
    return [beyond(distance, rows, "loss", table) for distance in distances]


def test_the_table_of_student_is_that_of_his_distribution() -> None:
    # two degrees of freedom have a closed form: P(|t| < x) = x / √(2 + x²)
    assert STUDENT[3] == pytest.approx(0.95 * (2 / (1 - 0.95**2)) ** 0.5, abs=0.005)
    # one degree is Cauchy's: tan(0.95 π / 2)
    assert STUDENT[2] == pytest.approx(math.tan(0.95 * math.pi / 2), abs=0.005)
    draws = np.random.default_rng(0).standard_normal((400_000, 5))
    for seeds in (4, 5):
        some = draws[:, :seeds]
        ratios = np.abs(some.mean(1)) * seeds**0.5 / some.std(1, ddof=1)
        outside, error = (ratios > STUDENT[seeds]).mean(), (0.05 * 0.95 / len(draws)) ** 0.5
        assert outside == pytest.approx(0.05, abs=5 * error)


def test_differences_within_their_interval_decide_nothing() -> None:
    three = [losses(-1, 0, 1), losses(-1, 0, 1)]
    error = STUDENT[3] * (2 / 3) ** 0.5  # of two means of three seeds with standard deviation 1
    assert told(three, -1.01 * error, -0.99 * error, 0.99 * error, 1.01 * error) == [False, None, None, True]
    two = losses(-(0.5**0.5), 0.5**0.5)
    error = STUDENT[2] * (1 / 3 + 1 / 2) ** 0.5
    assert told([three[0], two], 0.99 * error, 1.01 * error) == [None, True], "by the fewest seeds"


def test_a_single_seed_has_the_largest_spread_of_the_others_or_none_is_known() -> None:
    single = [losses(0), losses(1)]
    assert told(single, 0.1, 1e9, -1e9) == [None, None, None]
    more = [losses(*(width * x for x in (-1, 0, 1))) for width in (1, 9, 2)]
    error = 9 * STUDENT[3] * 2**0.5
    assert told(single, 0.99 * error, 1.01 * error, more=more) == [None, True]
    two = losses(-0.1, 0.1)  # their few seeds say nothing of how sure the spread of the others is
    assert told(single, 0.99 * error, 1.01 * error, more=[*more, two]) == [None, True]
    error = 9 * STUDENT[3] * (1 / 3 + 1) ** 0.5
    assert told([more[1], single[0]], 0.99 * error, 1.01 * error, more=[two]) == [None, True]


def test_few_examples_tell_little_of_an_accuracy() -> None:
    def rows(test: int, most: int | None, chance: float | None = None) -> list[Row]:
        settings = {"evaluation": {"examples": most}}
        return [
            Row("", [made(settings, scores={"accuracy": share}, chance=chance, data={"test": test})] * 2)
            for share in (0.5, 0.8)
        ]

    error = NORMAL * ((0.25 + 0.16) / 400) ** 0.5  # whatever the number of seeds: their examples are the same
    for two in (rows(500, 400), rows(400, 500), rows(400, None)):
        table = dict(zip("ab", two, strict=True))
        verdicts = [beyond(times * error, two, "accuracy", table) for times in (-1.01, 0.99, 1.01)]
        assert verdicts == [False, None, True]
    assert beyond(1.0, two, "accuracy", table, floor=0.8) is None, "nothing was learned"
    assert beyond(1.0, two, "accuracy", table, floor=0.7) is True, "one of them has learned"
    above = 0.8 + NORMAL * (0.16 / 400) ** 0.5
    for chance, verdict in ((0.8, None), (0.7, True), (1.6 - above, None), (1.58 - above, True)):
        two = rows(400, None, chance)
        assert beyond(1.0, two, "accuracy", dict(zip("ab", two, strict=True))) is verdict


def test_tokens_a_second_are_of_cpu_time_and_on_a_gpu_of_the_clock() -> None:
    def row(**hardware: str) -> Row:
        return Row("", [made(hardware=hardware, tokens_per_second=300.0, seconds=10.0, cpu_seconds=5.0)])

    assert render.speed(row(processor="a processor")) == 600
    assert render.speed(row(processor="a processor", gpu="a GPU")) == 300


def test_measures_of_a_row_are_of_the_last_step_and_shown_seed_by_seed() -> None:
    def run(seed: int, last: float, *more: int) -> Run:
        audits = {
            str(step): {
                f"rank/states_{name}/layers.{layer:02}": value
                for name in ("relative_spread", "effective_rank")
                for layer in (0, 1)
            }
            for step, value in ((0, 0.5), (20, last), *((step, last) for step in more), (100, last / 2))
        }
        return made(rank=audits_to_columns(audits), seed=seed)

    row = Row("deep", [run(0, 1.0), run(1, 3.0)])
    assert by_layer(row, "states_effective_rank") == [1.0, 1.0]
    assert by_layer(row, "states_effective_rank", 20) == [2.0, 2.0]
    shown = collapse({"deep": row}).splitlines()
    assert shown[2] == "|  | step 0 | step 20 | step 100 |"
    assert shown[4:] == [
        "| deep, seed 0 | 0.500, 0.5 | 1.000, 1.0 | 0.500, 0.5 |",
        "| deep, seed 1 | 0.500, 0.5 | 3.000, 3.0 | 1.500, 1.5 |",
    ]
    unwatched = Row("unwatched", [made(rank={})])
    several = {"unwatched": unwatched, "deep": row, "often": Row("often", [run(0, 1.0, 50)])}
    shown = collapse(several).splitlines()
    assert shown[2] == "|  | step 0 | step 20 | step 50 | step 100 |"
    assert shown[4] == "| unwatched | – | – | – | – |"
    assert shown[5] == "| deep, seed 0 | 0.500, 0.5 | 1.000, 1.0 | – | 0.500, 0.5 |"


def test_the_best_rate_of_a_model_is_named_once_all_were_run(tmp_path: Path) -> None:
    def row(accuracy: float) -> Row:
        return Row("", [made(scores={"accuracy": accuracy})])

    table = {"linear": row(0.2), at_rate("linear", RATES[0]): row(0.4)}
    assert best_rates(table) == ""
    table[at_rate("linear", RATES[1])] = row(0.3)
    assert best_rates(table).splitlines()[-1] == "| linear | 0.0003 | 0.400 |"


def test_the_frontier_holds_what_no_smaller_state_beats(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["language-parts"]
    for name, loss in (("tost", 2.0), ("decayed", 2.5), ("linear", 1.5), ("transformer", 1.0)):
        kept(tmp_path, name, 0, loss, experiment)
    lines = [line.split(" | ") for line in frontier(experiment.table(tmp_path)).splitlines()[4:]]
    sizes = [int(cells[1].replace(",", "")) for cells in lines]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 4 * 2 * 4 * 64 * 128, "keys and values of four layers, float32"
    losses_so_far = [float(cells[2]) for cells in lines]
    on = [loss == min(losses_so_far[: at + 1]) for at, loss in enumerate(losses_so_far)]
    assert [cells[4].startswith("yes") for cells in lines] == on
    assert 0 < sum(on) < 4
    assert lines[-1][3] == "+0.000"


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
    monkeypatch.setattr("rankwise.train.run.commit", lambda: "abc")
    where = ["--rows", "transformer", "--seeds", "0", "--work", str(tmp_path / "w")]
    where += ["--results", str(tmp_path / "r")]
    arguments = ["language", *pairs(tmp_path), *where]
    assert run.main(["language", "task.path=missing.txt", *where]) == 1
    assert run.main(arguments) == 0
    lines = tmp_path / "r" / "language.jsonl"
    assert [one["row"] for one in read_runs(lines)] == ["transformer"]
    assert not (tmp_path / "w" / "language-transformer-seed0").exists()
    assert run.main(arguments) == 0
    assert len(calls) == 2, "the last time it was done already"
    before = lines.read_text()
    assert run.main(["language", *pairs(tmp_path, steps=1), *where]) == 1
    assert "another configuration (steps)" in capsys.readouterr().err
    assert run.main(["language", *where]) == 1, "the row as it is"
    assert len(calls) == 2
    assert lines.read_text() == before
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
        ((1, 2, 4, 4, 4, 4), (0.1, 0.1, 0.1, 0.4, 0.4, 0.4), 10_000, True),
        ((1, 2, 4, 4, 4, 4), (0.1, 0.1, 0.1, 0.1, 0.4, 0.4), 10_000, False),
        ((1, 2, 4, 4, 4, 4), (0.01, 0.02, 0.04, 0.04, 0.04, 0.04), 10_000, None),
        ((1, 2, 4, 4, 4, 4), (0.1, 0.1, 0.1, 0.1, 0.1, 0.4), 10_000, False),
        ((1, 1, 1, 1, 1, 1), (0.4, 0.4, 0.4, 0.4, 0.4, 0.4), 10_000, False),
        ((1, 2, 4, 4, 4, 4), (0.1, 0.2, 0.4, 0.4, 0.4, 0.4), 3, None),
        ((1, 1, 3.7, 3.7, 3.7, 4), (0.1, 0.2, 0.4, 0.4, 0.4, 0.4), 10_000, False),
    ],
    ids=[
        "at one width",
        "a factor of 2",
        "a factor of 4",
        "nothing learned",
        "apart",
        "flat",
        "of few examples",
        "rank grows to the end",
    ],
)
def test_flat_curves_do_not_saturate_together(
    ranks: tuple, scores: tuple, examples: int, holds: bool | None
) -> None:
    table = {}
    for width, rank, score in zip(WIDTHS, ranks, scores, strict=True):
        # class attention has rank 1 at any width
        found = {"places": ["layers.00", "layers.01.cross"], "steps": {"0": [rank, 1.0]}}
        run = made(
            {"evaluation": {"examples": None}},
            scores={"accuracy": score},
            rank={"heads_effective_rank": found},
            chance=0.05,
            data={"test": examples},
        )
        table[label(width, False)] = Row(label(width, False), [run] * 2)
    assert same_place(False).judge(table)[0] is holds
    assert curves(table, False) == (list(ranks), list(scores))
