"""The line that shows a step, the finished share and the remaining time, on terminals only."""

import math
import re

import pytest

from rankwise.cli.output import show_progress

STEPS = [("reading", math.nan), *((f"pass {n}", n / 8) for n in range(8)), ("copy 1", 0.5), ("copy 2", 0.75)]


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool) -> list[str]:
    """Return the lines that steps of one second draw."""
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    monkeypatch.setenv("COLUMNS", "120")
    clock = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    with show_progress() as update:
        for step, done in STEPS:
            update(step, done)
            clock[0] += 1
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    return [line for line in re.split(r"[\r\n]+", written) if line.strip()]


def test_nothing_is_shown_without_a_terminal(capsys, monkeypatch) -> None:
    assert shown(capsys, monkeypatch, terminal=False) == []


def test_the_remaining_time_counts_from_the_last_restart_of_the_share(capsys, monkeypatch) -> None:
    lines = shown(capsys, monkeypatch, terminal=True)
    assert re.search(r"copy 2 .* left: 0:00:01$", lines[-1].rstrip())  # a quarter in the last second
