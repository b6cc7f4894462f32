"""An option name means the same in all commands."""

from collections import defaultdict

from typer.main import get_command

from rankwise.cli import app

WORDED_PER_COMMAND = {
    "--out": "where to write: a folder, or for `compare` files",
    "--sequences": "how many sequences; `compress` also holds out as many",
    "--text": "the text to read; `skip` measures on it unless λ is fitted",
    "--tokens": "tokens per sequence; `plan` has no text to cut",
}
"""Options with one meaning whose help has other words in some commands, and the meaning."""


def test_an_option_has_one_meaning() -> None:
    helps: dict[str, set[str]] = defaultdict(set)
    kinds: dict[str, set[str]] = defaultdict(set)
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            for name in parameter.opts:
                if name.startswith("--"):
                    helps[name].add(parameter.help)
                    kinds[name].add(parameter.type.name)
    assert {name for name, texts in helps.items() if len(texts) > 1} <= WORDED_PER_COMMAND.keys()
    assert {name for name, types in kinds.items() if len(types) > 1} == set()
    assert len(helps) > 40
