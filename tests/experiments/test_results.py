"""Lines of results: sorted, never lost, refused if they belong to another row; and the page of the runs."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from experiments import __main__ as command
from experiments import render
from experiments.experiment import PAPER_SIZE
from experiments.registry import EXPERIMENTS
from experiments.results import append_run, read_runs
from experiments.study import Study
from experiments.training.cost import gpu_gib, gpu_hours
from experiments.verdicts import BYTE_LOSS, Row
from tests.experiments.runs import LANGUAGE, kept, made

from rankwise.errors import RecordError


def test_published_numbers_and_expectations_name_rows() -> None:
    for experiment in EXPERIMENTS.values():
        named = {*experiment.published, *(label for one in experiment.expectations for label in one.needs)}
        assert named <= set(experiment.rows), experiment.name


def test_claims_of_the_papers_have_their_rows() -> None:
    """A needle in a text, and rows at the size of every paper, without a run."""
    assert {"softmax, needle", "tost, needle"} <= set(EXPERIMENTS["recall-parts"].rows)
    for experiment in EXPERIMENTS.values():
        claimed = not experiment.source.startswith("none: ")
        assert bool(experiment.large) == claimed, experiment.name
        assert not set(experiment.large) & set(experiment.table())
        for label, row in experiment.large.items():
            small = experiment.rows[label.removesuffix(PAPER_SIZE)]
            assert row.model == small.model
            assert gpu_hours(row) > gpu_hours(small)
            assert gpu_gib(row) > gpu_gib(small)


SIZES = {
    ("language", "tost"): {"width": 768, "layers": 12, "heads": 12, "tokens": 1024, "steps": 10_000},
    ("depth", "48 post λ=2"): {"width": 256, "layers": 48, "tokens": 512, "steps": 10_000},
    ("skips-image", "mamba λ=learned"): {"width": 128, "layers": 8, "tokens": 1024, "steps": 50_000},
    ("skips-recall", "softmax λ=1"): {"width": 128, "layers": 4, "tokens": 128, "steps": 50_000},
    ("saturation-images", "D = HK, K=4"): {"width": 192, "layers": 6, "heads": 48, "steps": 40_000},
    ("saturation-text", "D ≠ HK, K=4"): {"width": 192, "heads": 4, "tokens": 4096, "steps": 40_000},
    ("long-range-text", "tost"): {"width": 128, "layers": 6, "tokens": 4096, "steps": 30_000},
    ("vision", "tost"): {"width": 192, "layers": 12, "parameters": 5_800_000, "steps": 60_000},
}


@pytest.mark.parametrize(("name", "label"), SIZES)
def test_rows_have_the_sizes_of_the_papers(name: str, label: str) -> None:
    row = EXPERIMENTS[name].large[f"{label}, paper size"]
    wanted = SIZES[name, label]
    assert {key: getattr(row, key) for key in wanted} == wanted
    assert row.model_options.get("initializer_range", row.width**-0.5) == row.width**-0.5
    assert "side" not in row.task_options
    assert row.evaluate_on is None


def test_pages_put_first_what_does_not_hold(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.98, 2.0, 2.02)):
        kept(tmp_path, "transformer", seed, loss)
    kept(tmp_path, "tost", 0, 1.5)
    kept(tmp_path, "tost-uniform", 0, 1.75)
    overview, page = render.pages([LANGUAGE], tmp_path).values()
    waiting = page.index(f"Expectations that wait for runs: {len(LANGUAGE.expectations) - 2}.")
    assert page.index("| no |") < page.index("| yes |") < waiting
    assert "\nRows without a run: softmax; softmax-rotary; tost-decayed; tost-hybrid;" in page
    assert "| [Language on bytes, by mixer](results/language.md) | 1 | 0 | 1 |" in overview
    link = "[Language on bytes, by mixer](results/language.md)"
    fails = overview.index(f"| {link} | loss: transformer is below tost | 2.000 against 1.500 | 3 and 1 |")
    assert fails < overview.index(f"| {link} | loss: tost is below tost-uniform | 1.500 against 1.750 | 1 |")
    kept(tmp_path, "tost", 1, 2.3)
    kept(tmp_path, "tost-uniform", 0, 40.0)
    overview_of_two, page_of_two = render.pages([LANGUAGE], tmp_path).values()
    said = "loss: transformer is below tost | unclear | 2.000 against 1.900 | 3 and 2 |"
    assert page_of_two.index("| unclear |") < page_of_two.index("| yes |")
    assert said in page_of_two
    assert "loss: transformer is below tost" not in overview_of_two, "unclear: on its page alone"
    assert "| transformer | 2.000 ± 0.020 | 0.500 ± 0.000 | 2.84" in page
    assert "| 0, 1, 2 | 1,234 | 1.0 |" in page
    assert "| tost | 1.500 | 0.500 |" in page, "no spread of one seed"
    command_told = "`python -m experiments run language --data DATA`: 600 steps of 8. On a processor"
    assert command_told in page
    assert "Data: a text, 1,000 training examples, 20 for evaluation." in page


DECIMAL = re.compile(r"(?<![\d.,])\d+\.\d+")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_numbers_of_conclusions_are_in_the_tables(name: str) -> None:
    """Each is a number of the verdicts, runs or tables below it, or one of them rounded."""
    _, page = render.pages([EXPERIMENTS[name]]).values()
    conclusions, tables = page.split("## Verdicts")
    known = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*(?!\d)", tables)}
    wrong = [
        number
        for number in DECIMAL.findall(conclusions)
        if number not in {f"{one:.{len(number.partition('.')[2])}f}" for one in known}
    ]
    assert len(conclusions.split("\n- **")) > 1
    assert wrong == []


def test_only_runs_of_the_rows_own_configuration_are_counted(tmp_path: Path) -> None:
    for seed in (0, 100):
        kept(tmp_path, "tost", seed, 1.5)
    assert LANGUAGE.table(tmp_path)["tost"].scores("loss") == [1.5, 1.5]
    kept(tmp_path, "tost", 1, 9.0, steps=20)
    with pytest.raises(RecordError, match=r"language.jsonl: expected the row “tost” .* got another steps"):
        LANGUAGE.table(tmp_path)
    run = kept(tmp_path, "tost", 1, 1.5)
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


def test_a_run_replaces_its_row_and_seed_and_lines_are_sorted(tmp_path: Path) -> None:
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
def test_a_damaged_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    damaged = LANGUAGE.path(tmp_path)
    kept(tmp_path, "tost", 0, 1.0)
    with damaged.open("a") as file:
        file.write(content + "\n")
    with pytest.raises(SystemExit):
        command.main(["run", "language", "--rows", "tost", "--results", str(tmp_path)])
    assert f"{damaged}:2: expected a run" in capsys.readouterr().err


def test_settings_that_are_newer_than_a_run_had_their_default(tmp_path: Path) -> None:
    run = kept(tmp_path, "tost", 0, 1.0)
    del run["settings"]["clip"], run["settings"]["monitor_every"]
    append_run(LANGUAGE.path(tmp_path), run)
    assert LANGUAGE.table(tmp_path)["tost"].scores("loss") == [1.0]


def test_rows_at_the_size_of_the_paper_are_refused_with_their_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(command, "run_missing", lambda experiment, data, rows, seeds, **_: ran.extend(rows))
    wanted = ["run", "language", "--results", str(tmp_path), "--rows", "tost", "tost, paper size"]
    with pytest.raises(SystemExit):
        command.main(wanted)
    # 6 FLOP × 85.2 million weights × 10,000 steps × 64 × 1,024 tokens at 10 TFLOP/s
    assert "tost, paper size: expected rows that run on a CPU" in (said := capsys.readouterr().err)
    assert "tost, paper size: about 9.3 hours and 42.0 GiB on one GPU per seed. Pass --large" in said
    assert ran == []
    command.main([*wanted, "--large"])
    assert ran == ["tost", "tost, paper size"]
    command.main(["run", "language"])
    assert "tost, paper size" not in ran[2:]
    assert command.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "tost, paper size; " in listed
    assert "about 9.3 to 11.4 hours and 42.0 to 75.7 GiB on one GPU per seed\n" in listed, (
        "softmax has T² more"
    )


def test_all_pages_and_figures_agree_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["render", "--check"]) == 0, capsys.readouterr().err


def test_a_page_that_disagrees_with_the_results_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.render.HOLDS", {False: "n", None: "u", True: "y"})
    assert command.main(["render", "--check"]) == 1
    stale = capsys.readouterr().err
    assert stale.count("does not agree with the results") == 1 + len(EXPERIMENTS)
    assert all(name in stale for name in ("evidence/results.md", "results/language.md"))


def test_a_study_keeps_its_report_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.study.RESULTS", tmp_path)
    study = Study("tiny", lambda data: {"found": data.name}, tables=lambda report: {"found": report["found"]})
    monkeypatch.setattr(command, "STUDIES", {"tiny": study})
    with pytest.raises(SystemExit):
        command.main(["render", "--check"])
    assert "got none. Run it first: `python -m experiments run tiny`" in capsys.readouterr().err
    assert command.main(["run", "tiny", "--data", "somewhere"]) == 0
    assert "found\n\nsomewhere" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["run", "tiny", "--results", str(tmp_path / "other"), "--seeds", "1"])
    assert "expected no option but --data, got --seeds, --results" in capsys.readouterr().err
    kept = study.kept()
    assert (kept["found"], kept["command"]) == ("somewhere", "python -m experiments run tiny")
    assert kept["versions"]["torch"]


def test_every_kept_run_is_in_the_page() -> None:
    for one in EXPERIMENTS.values():
        shown = sum(len(row.runs) for row in one.table().values())
        assert shown == len(one.path().read_text().splitlines()) > 0


def test_losses_per_token_are_shown_per_byte_as_well() -> None:
    def told(**more: float) -> str:
        return render.loss(Row("", [made(scores={"loss": 3.0}, **more)]))

    assert told(bytes_per_token=2.0) == "3.000 per token, 1.500 per byte"
    assert told() == told(bytes_per_token=1.0) == "3.000"
    runs = [made(scores={"loss": 3.0}, bytes_per_token=2.0), made(scores={"loss": 3.0})]
    assert Row("", runs).scores(BYTE_LOSS) == [1.5, 3.0]
