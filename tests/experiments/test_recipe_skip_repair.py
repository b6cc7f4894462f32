"""Broken skips are found and repaired by what the audit names, by the commands themselves."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from experiments import skip_repair as recipe
from experiments.skip_repair import Stage, Story, main, rankwise
from typer.testing import CliRunner

from rankwise.auditing import Finding
from rankwise.cli import app
from rankwise.tracing import HeadId

PAGE = recipe.PAGE.read_text(encoding="utf-8")


def here(*words: str) -> str:
    """A command in this process: a fresh one loads its libraries anew."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


AUDITED: dict[str, Stage] = {}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs; the model as it is and as it is broken are those of the test before, so audited once."""
    audit = recipe.audit

    def once(name: str, *given: Any) -> Stage:
        if name == "repaired":
            return audit(name, *given)
        if name not in AUDITED:
            AUDITED[name] = audit(name, *given)
        folder = given[1]
        folder.mkdir(exist_ok=True)
        AUDITED[name].audit.save(folder)
        return AUDITED[name]

    monkeypatch.setattr(recipe, "audit", once)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(recipe, "rankwise", here)
    monkeypatch.setattr(recipe, "TOKENS", 16)
    monkeypatch.setattr(recipe, "SEQUENCES", 2)


def table(page: str) -> list[list[str]]:
    """Cells of the rows under the heading."""
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


SMALL = ("--models", "random", "--layers", "6")


@pytest.mark.usefixtures("small")
def test_a_random_model_collapses_and_its_remedy_repairs_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert main([*SMALL, "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    whole, broken, repaired = table(text)
    assert whole[0] == "6 random layers, as it is"
    assert (whole[3], repaired[3]) == ("none", "none")
    assert "from layer" in broken[3]
    assert broken[1] != whole[1]
    assert broken[2] != whole[2]
    assert repaired[1:3] == whole[1:3]  # λ = 1 again: the model that it was
    command = text.split("Repaired by `")[1].split("`")[0]
    sites = command.split("--sites ")[1:]
    assert [site.split()[0] for site in sites] == [f"model.layers.{at}.self_attn" for at in range(3, 6)]
    assert "(the remedy of the COLLAPSE)" in text
    assert "broken → repaired" in text
    assert "COLLAPSE" in text.split("Resolved:")[1]


@pytest.mark.usefixtures("small")
def test_a_remedy_that_does_not_repair_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weak = recipe.REPAIR.replace("--init 1", "--init 0.01")
    monkeypatch.setattr(recipe, "remedy", lambda broken: weak)
    page = tmp_path / "page.md"
    assert main([*SMALL, "--page", str(page)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "not found and repaired: 6 random layers"
    assert "from layer" in table(page.read_text(encoding="utf-8"))[2][3]


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        rankwise("skip", "nowhere", "--steps", "many")


def stage(collapses: bool) -> Stage:
    found = Finding(
        code="COLLAPSE",
        severity="error",
        where=HeadId(stack="h", layer=1),
        evidence={},
        meaning="",
        remedy="rankwise skip MODEL --init 3 --out DIR",
    )
    other = found.model_copy(update={"code": "SINK", "remedy": "prune it"})
    audit = SimpleNamespace(findings=[other, *([found] if collapses else [])], layers=[])
    return Stage("stage", audit, None)  # type: ignore[arg-type]


def test_the_remedy_is_that_of_the_collapse() -> None:
    assert recipe.remedy(stage(True)) == "rankwise skip MODEL --init 3 --out DIR"
    assert recipe.remedy(stage(False)) is None


def test_a_story_is_right_in_one_way_only() -> None:
    no, yes = stage(False), stage(True)
    right = Story("deep", (no, yes, no), "rankwise skip", True, "")
    assert right.repaired
    assert not replace(right, named=False).repaired
    for stages in ((no, no, no), (no, yes, yes), (yes, yes, no), (no, no, yes)):
        assert not replace(right, stages=stages).repaired


def test_the_kept_page_shows_what_its_recipe_claims() -> None:
    told = {}
    for part in PAGE.split("## ")[1:]:
        told[part.splitlines()[0]] = ["from layer" in row[3] for row in table(part)]
    assert told == {
        "12 random layers": [False, True, False],
        "all-MiniLM-L6-v2": [False, True, False],
        "bundled demo": [False, False, False],
    }
