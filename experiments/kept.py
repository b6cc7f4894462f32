"""Kept results of runs: read, and held against the configuration that they should be of."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rankwise._internals.files import parse_json
from rankwise.errors import RecordError, first_line
from rankwise.train import Recipe
from rankwise.train.overrides import fields
from rankwise.train.provenance import shown

WANTED = {"configuration", "scores", "data", "provenance"}
ELSEWHERE = {"task.path", "device", "claim", "early", "early_data", "when_early_fails"}
"""Fields that change nothing in the results of a run, the monitor's numbers among them."""


def read(path: Path) -> dict[str, Any]:
    """The results of a run.

    Raises:
        RecordError: if the file cannot be read, or is no results.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = str(error)
    else:
        got = "other JSON"
        if isinstance(content, dict) and all(isinstance(content.get(name), dict) for name in WANTED):
            try:
                Recipe.model_validate(content["configuration"])
            except ValidationError as error:
                got = f"a configuration that is none: {first_line(error)}"
            else:
                return content
    raise RecordError(
        str(path),
        expected="results of a run",
        got=got,
        fix="Move it away and run `python -m experiments.run` again.",
    )


def differing(kept: dict[str, Any], made: Recipe) -> list[str]:
    """Fields that decide a run and differ between its results and a configuration.

    A field that is newer than the results had the value that is its default now.
    """
    there, here = (fields(one) for one in (Recipe.model_validate(kept["configuration"]), made))
    options = {name: shown(name, value) for name, value in made.task.options.items()}
    here["task.options"] = options  # as the results tell them, without folders
    return sorted(name for name in here if name not in ELSEWHERE and there[name] != here[name])


class SameData:
    """Remembers the data of a table's runs, and refuses a run that read other data of the same name."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Path, Any]] = {}

    def check(self, path: Path, data: dict[str, Any]) -> None:
        """Hold the data of a run against those of the runs before it.

        Raises:
            RecordError: if their checksums differ.
        """
        name = str([data.get("name"), data.get("options")])
        first, checksum = self.seen.setdefault(name, (path, data.get("sha256")))
        if data.get("sha256") != checksum:
            raise RecordError(
                str(path),
                expected=f"a run on the data of {first.name}, sha256 {checksum}",
                got=f"sha256 {data.get('sha256')}",
                fix="Run one of the two again, on the data of the other.",
            )
