"""Commands and files that the documentation names exist, and every table of measurements names a command."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES
from experiments.__main__ import main
from experiments.registry import EXPERIMENTS, STUDIES
from experiments.study import Study

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]
COMMAND = re.compile(r"python -m ((?:experiments|benchmarks)[.\w]*)(?: +([\w-]+))?(?: +([\w-]+))?")
FILE = re.compile(r"(?<![\w/])(?:experiments|benchmarks)/[\w/-]+\.(?:py|jsonl|json|md)\b")
ANY = {"NAME"}
"""Stands for every name."""


def wrong_commands(text: str) -> Iterator[str]:
    for match in COMMAND.finditer(text):
        module, first, second = match.groups()
        if module == "experiments":
            known = first in ("list", "render") or (
                first == "run" and second in {*EXPERIMENTS, *STUDIES, *ANY}
            )
        elif module == "benchmarks":
            known = first in {None, *NAMES, *ANY}  # alone it prints its help
        else:
            known = find_spec(module) is not None
        if not known:
            yield match[0]


def test_commands_and_files_of_every_page_exist() -> None:
    assert len(PAGES) > 50
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert list(wrong_commands(text)) == [], page
        named = {file for file in FILE.findall(text) if "NAME" not in file}
        assert [file for file in named if not (ROOT / file).exists()] == [], page


@pytest.mark.parametrize("folder", ["src", "experiments", "benchmarks"])
def test_commands_in_source_exist(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        text = re.sub(r"\{[^{}]*\}", "NAME", path.read_text(encoding="utf-8"))
        assert list(wrong_commands(text)) == [], path


def test_wrong_commands_are_found() -> None:
    text = (
        "`python -m experiments run no-name` `python -m experiments.none` `python -m experiments run depth`"
    )
    found = ["python -m experiments run no-name", "python -m experiments.none"]
    assert list(wrong_commands(text)) == found
    assert list(wrong_commands("`python -m benchmarks none` `python -m benchmarks tssa --plot x`")) == [
        "python -m benchmarks none"
    ]


@pytest.mark.parametrize("study", [one for one in STUDIES.values() if one.page], ids=lambda one: one.name)
def test_the_page_of_a_study_names_its_command_and_is_in_the_menu_or_evidence(study: Study) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path, text in study.files(study.kept()).items():
        if path.suffix == ".md":
            assert f"python -m experiments run {study.name}\n" in f"{text}\n".replace("`", "\n")
            page = str(path.relative_to(ROOT / "docs"))
            assert path.name == "README.md" or page.startswith("evidence/") or f": {page}\n" in menu


def test_every_measured_row_of_the_readme_names_its_command() -> None:
    part = (ROOT / "README.md").read_text(encoding="utf-8").split("## Measured\n")[1].split("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 7
    assert all(re.search(r"`(python -m|pytest) ", row) for row in rows)


def test_make_clean_removes_every_folder_that_git_ignores_but_data_and_runs() -> None:
    ignored = re.findall(r"^/(.+)/$", (ROOT / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("clean:")[2]
    removed = {*recipe.replace("$(VENV)", ".venv").split()}
    assert {*ignored} - removed == {".cache", "data", "runs"}


MISSING = {
    "memberships": "runs/vision: expected a model of the row tost, got none",
    "compress_minilm": "expected",
    "initial_ranks": "expected",
    "rank_saturation": "data/cifar10/cifar10.npz",
    "train_demo": "data/tiny_shakespeare/input.txt",
}
"""What a study says without its data; two of them say first that they lack the package of all-MiniLM."""


@pytest.mark.parametrize("name", MISSING)
def test_a_study_without_its_data_names_the_missing_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["run", name, "--data", "data"])
    said = capsys.readouterr().err
    assert MISSING[name] in said
    assert list(wrong_commands(said)) == []
    if name == "memberships":
        assert "`python -m experiments run vision --rows tost --seeds 0 --results try`" in said
        assert "tost" in EXPERIMENTS["vision"].rows


def test_make_test_collects_every_example() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = next(line for line in makefile.splitlines() if "--doctest-modules" in line).split()
    folders = [ROOT / word for word in words if (ROOT / word).is_dir()]
    files = [path for name in ("src", "experiments", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    examples = [path for path in files if ">>> " in path.read_text(encoding="utf-8")]
    assert len(examples) > 50
    assert [path for path in examples if not any(map(path.is_relative_to, folders))] == []


def test_ctrl_c_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.__main__.run_missing", stopped)
    assert main(["run", "depth"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_rows_that_no_gpu_holds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "saturation-text", "--rows", "D = HK, K=1, paper size"])
    assert "more than one GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "language", "--rows", "tost, paper size"])
    assert "more than one GPU" not in capsys.readouterr().err
