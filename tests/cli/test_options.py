"""Options mean the same in all commands, and some can be passed without a value."""

from collections import defaultdict

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
