"""Results of experiments: JSON Lines, one file per experiment, one line per row and seed."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from filelock import FileLock

from experiments.training.config import TrainingConfig
from rankwise._internals.files import write_file
from rankwise.errors import RecordError

RESULTS = Path(__file__).with_name("results")


class Run(TypedDict):
    """One line of results/NAME.jsonl."""

    row: str
    seed: int
    settings: dict[str, Any]
    values: dict[str, Any]
    provenance: dict[str, Any]


def read_runs(path: Path, settings: Callable[..., Any] = TrainingConfig) -> list[Run]:
    """Return the runs of a file, in which `settings` accepts the settings; an absent file has none."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fix = "Restore it from version control."
        raise RecordError(str(path), expected="JSON Lines in UTF-8", got=str(error), fix=fix) from error
    runs = {}
    for number, line in enumerate(lines, 1):
        run = _parse(line, settings, f"{path}:{number}")
        if (run["row"], run["seed"]) in runs:
            got, fix = f"a second line of “{run['row']}” at seed {run['seed']}", "Remove one of the two."
            raise RecordError(f"{path}:{number}", expected="one line per row and seed", got=got, fix=fix)
        runs[run["row"], run["seed"]] = run
    return [*runs.values()]


def _parse(line: str, settings: Callable[..., Any], where: str) -> Run:
    try:
        run: Run = json.loads(line)
        settings(**run["settings"])
        types = isinstance(run["row"], str), isinstance(run["seed"], int), isinstance(run["values"], dict)
        if set(run) == Run.__required_keys__ and all(types):
            if settings is TrainingConfig:
                run["values"]["data"]["sha256"]  # raises KeyError
            return run
        got = "other JSON"
    except (ValueError, TypeError, KeyError) as error:
        got = f"{type(error).__name__}: {error}"
    raise RecordError(
        where, expected="a run", got=got, fix="Restore the line, or remove it and run it again."
    )


def append_run(path: Path, run: Run) -> None:
    """Add or replace a run: locked, sorted by row and seed, written atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        others = [
            one for one in read_runs(path, dict) if (one["row"], one["seed"]) != (run["row"], run["seed"])
        ]
        write_file(path, _lines([*others, run]), "results")


def _lines(runs: Iterable[Run]) -> str:
    ordered = sorted(runs, key=lambda run: (run["row"], run["seed"]))
    return "".join(json.dumps(run, ensure_ascii=False, separators=(",", ":")) + "\n" for run in ordered)


def audits_to_columns(audits: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return numbers by step and rank/MEASURE/PLACE as {measure: {places, steps: {step: [values]}}}."""
    columns: dict[str, Any] = {}
    for step, values in audits.items():
        for name, value in values.items():
            _, measure, place = name.split("/", 2)
            column = columns.setdefault(measure, {"places": [], "steps": {}})
            if place not in column["places"]:
                column["places"].append(place)
            column["steps"].setdefault(step, []).append(value)
    return columns


def settings_of(config: TrainingConfig) -> dict[str, Any]:
    """Return a configuration as a line holds it."""
    settings: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return settings


def changed_fields(run: Run, config: TrainingConfig) -> list[str]:
    """Return the settings that differ between a kept run and its row today.

    A setting that is newer than the run had the value that is its default now.
    """
    there, here = settings_of(TrainingConfig(**run["settings"])), settings_of(config)
    return [name for name in here if there[name] != here[name]]


def check_same_data(path: Path, runs: Iterable[Run]) -> None:
    """Raise if two runs of a file read data of one name whose checksums differ."""
    seen: dict[str, Run] = {}
    for run in runs:
        data = run["values"]["data"]
        first = seen.setdefault(str([data.get("name"), data.get("options")]), run)
        wanted = first["values"]["data"]["sha256"]
        if data["sha256"] != wanted:
            raise RecordError(
                f"{path}: “{run['row']}” at seed {run['seed']}",
                expected=f"the data of “{first['row']}” at seed {first['seed']}, sha256 {wanted}",
                got=f"sha256 {data['sha256']}",
                fix="Run one of the two again, on the data of the other.",
            )
