"""The tutorials run as printed, command by command, and print the output on the page."""

import contextlib
import io
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from math import isclose
from pathlib import Path

import pytest
from tests.unchecked import unchecked
from typer.testing import CliRunner

from rankwise.cli import app

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r'^```(?P<kind>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<code>.*?)^```\n'
    r"(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
DECIMAL = re.compile(r"\d+\.\d+")
SECONDS = re.compile(r"\b\d+\s+s$", re.MULTILINE)
TOLERANCE = 0.02
"""Relative tolerance of decimals. Initial weights changed by 1e-7, as by rounding, change the losses of
`repair-collapse.md` after 120 steps by up to 0.2 %; weights changed by 1e-5 change them by up to 1.7 %."""


def is_close(shown: str, printed: str) -> bool:
    """Return if two decimals are equal within the tolerance, or differ by one in the last digit."""
    last = 10.0 ** -len(shown.partition(".")[2])
    return isclose(float(shown), float(printed), rel_tol=TOLERANCE, abs_tol=1.01 * last)


def matches(shown: str, printed: str) -> bool:
    """Return True if a page shows the printed text, word by word.

    The sign `…` matches any text. Decimals have a tolerance; seconds at the end of a line are times.
    """
    shown, printed = (SECONDS.sub("N s", text).strip() for text in (shown, printed))
    words = []
    for word in shown.split():
        exact = [re.escape(part).replace("…", ".*?") for part in DECIMAL.split(word)]
        words.append("─+" if {*word} == {"─"} else rf"({DECIMAL.pattern})".join(exact))
    found = re.fullmatch(r"\s+".join(words), printed, re.DOTALL)
    return found is not None and all(map(is_close, DECIMAL.findall(shown), found.groups()))


def run_command(command: str) -> str:
    """Run one command; return the printed text. Skip the test if a package of `pip install` is missing."""
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        for package in (word for word in words[2:] if word[0] != "-"):
            try:
                distribution(package)
            except PackageNotFoundError:
                pytest.skip(f"no {package}: {command}")
        return ""
    assert words[0] == "rankwise"
    with unchecked():
        result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_the_output_on_its_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(str(tmp_path))
    text, namespace = page.read_text(encoding="utf-8"), dict[str, object]()
    blocks = [*BLOCK.finditer(text)]
    assert len(blocks) + sum(block["shown"] is not None for block in blocks) == text.count("```") / 2
    for block in blocks:
        printed = io.StringIO()
        if block["file"]:
            Path(block["file"]).write_text(block["code"], encoding="utf-8")
            monkeypatch.delitem(sys.modules, Path(block["file"]).stem, raising=False)
        elif block["kind"] == "console":
            for line in block["code"].replace("\\\n", "").splitlines():
                assert line.startswith("$ ")
                printed.write(run_command(line.removeprefix("$ ")))
        else:
            assert block["kind"] == "python"
            with unchecked(), contextlib.redirect_stdout(printed):
                exec(compile(block["code"], page.name, "exec"), namespace)
        if block["shown"] is not None:
            assert matches(block["shown"], printed.getvalue()), printed.getvalue()
            check_every_line_counts(block["shown"], printed.getvalue())


def check_every_line_counts(shown: str, printed: str) -> None:
    """Check that a changed line, and a decimal 10 % away, do not match the printed text."""
    lines = shown.splitlines()
    for at, line in enumerate(lines):
        if not line.strip("─… "):
            continue
        changed = [f"{line} changed", DECIMAL.sub(lambda found: f"{1.1 * float(found[0]) + 0.1:.4f}", line)]
        for other in set(changed) - {line}:
            assert not matches("\n".join([*lines[:at], other, *lines[at + 1 :]]), printed), other


def test_the_readme_shows_the_verdict_of_the_first_audit() -> None:
    readme, tutorial = (
        " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for page in ("README.md", "docs/tutorials/first-audit.md")
    )
    command, shown = re.findall(r"```console (\$ rankwise audit) ``` ```text (.*?) ```", readme)[0]
    assert command in tutorial
    assert shown in tutorial


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 3.30 in 4 s", "a  3.31\nin 19 s", True),
        ("a 3.30", "a 3.40", False),
        ("3 heads", "4 heads", False),
        ("first\n…\nlast 1.0%", "first\nsecond\nthird\nlast 1.1%", True),
        ("first\n…\nlast", "first\nsecond\nlast, and more", False),
        ("report: …/index.html", "report: /a/b c/index.html", True),
        ("report: …/index.html", "report: /a/page.html", False),
        ("first", "first\nsecond", False),
    ],
)
def test_numbers_have_a_tolerance_and_words_have_none(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same


def test_a_command_that_fails_fails_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("rankwise audit no-such-model.py:build", "rankwise audit --no-such-option", "ls"):
        with pytest.raises(AssertionError):
            run_command(command)
    with pytest.raises(pytest.skip.Exception, match="no-such-package"):
        run_command("pip install --no-deps no-such-package")
