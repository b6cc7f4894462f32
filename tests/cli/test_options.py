"""Options mean the same in all commands, and some can be passed without a value."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer

from rankwise.cli import app
from rankwise.cli.options import add_bare_values

OTHERWISE = {
    "--out": "each command says what it writes",
    "--sequences": "compress holds out as many sequences as it reads for calibration",
    "--text": "skip reads the text only if it fits no λ",
    "--tokens": "plan reads no sequence: it plans for sequences of this length",
}
"""Options with another description in one command, and the reason."""


def test_an_option_has_one_description_in_all_commands() -> None:
    described = defaultdict(set)
    for command in typer.main.get_command(app).commands.values():
        for option in command.params:
            described[option.opts[0]].add(option.help)
    different = {name for name, texts in described.items() if len(texts) > 1 and name.startswith("--")}
    assert different <= set(OTHERWISE)


@pytest.mark.parametrize("value", ["auto", "local", "ray://head:10001", "head:6379", "10.0.0.1:6379"])
def test_an_address_follows_ray_and_a_model_does_not(value: str) -> None:
    assert add_bare_values(["--ray", value, "m"]) == ["--ray", value, "m"]
    for model in ("model.py:build", "gpt2", "org/m", "run/checkpoint-1", "C:1/m", "--out"):
        assert add_bare_values(["--ray", model]) == ["--ray", "", model]
    assert add_bare_values(["m", "--ray"]) == ["m", "--ray", ""]
    assert add_bare_values(["--importance"]) == ["--importance", "auto"]
    assert add_bare_values(["--importance", "--text", "a"]) == ["--importance", "auto", "--text", "a"]
    for whole in (["--importance", "exact", "gpt2"], ["--importance=exact"]):
        assert add_bare_values(whole) == whole


def test_help_and_results_are_printed_in_every_encoding(tmp_path: Path) -> None:
    code = """if True:
        import contextlib, sys
        from rankwise.__main__ import main
        from rankwise.cli import app, typer
        commands = [[name, "--help"] for name in ("", *typer.main.get_command(app).commands)]
        plan = ["plan", "--tokens", "16", "--heads", "2", "--hidden-size", "16"]
        for encoding in ("ascii", "cp1252"):
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(encoding=encoding, errors="strict")
            for words in [*commands, [*plan, "--out", encoding], ["plan", "λ"]]:
                sys.argv = ["rankwise", *filter(None, words)]
                with contextlib.suppress(SystemExit):
                    main()
            print("end of", encoding)
    """
    words, around = [sys.executable, "-c", code], os.environ | {"COLUMNS": "100"}
    done = subprocess.run(words, capture_output=True, check=False, env=around, cwd=tmp_path)
    first, second, rest = done.stdout.decode("cp1252").split("end of ")
    assert (done.returncode, rest.strip()) == (0, "cp1252")
    assert first.isascii()
    assert "Traceback" not in done.stderr.decode("cp1252")
    for output in (first, second):
        assert "lambda-skips" in output, "a character with a plain name is printed by its name"
        assert "K* = " in output
