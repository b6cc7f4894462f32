"""An experiment on training: one claim, its rows, its expectations; its missing runs are measured here."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from experiments.results import RESULTS, append_run, changed_fields, check_same_data, read_runs
from experiments.training.config import TrainingConfig, unit_variance_std
from experiments.verdicts import Expectation, Row, Table
from rankwise.errors import RankwiseError, RecordError

PAPER_SIZE = ", paper size"
"""End of the labels of rows at the size of the paper."""


@dataclass(frozen=True)
class Experiment:
    """One claim about training; `experiments.registry` lists them."""

    name: str
    title: str
    source: str
    """Who claims it, and where."""
    rows: Mapping[str, TrainingConfig]
    """By label."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Number of the paper by label, with its setting if that differs."""
    expectations: Sequence[Expectation] = ()
    seeds: Sequence[int] = (0, 1, 2)
    tables: Callable[[Table], Mapping[str, str]] = lambda table: {}
    """Mark on pages/results/NAME.md → Markdown, from the runs."""
    large: Mapping[str, TrainingConfig] = field(default_factory=dict)
    """Rows of `at_paper_size`; they have no run here, and require `--large`."""

    def path(self, folder: Path = RESULTS) -> Path:
        return folder / f"{self.name}.jsonl"

    def table(self, folder: Path = RESULTS) -> Table:
        """Return every row that has a run, sorted by seed; raise if a run has other settings or data."""
        path, rows = self.path(folder), {**self.rows, **self.large}
        runs = read_runs(path)
        check_same_data(path, runs)
        for run in runs:
            label = run["row"]
            if label not in rows or (changed := changed_fields(run, rows[label])):
                raise RecordError(
                    str(path),
                    expected=f"the row “{label}” of {self.name} at seed {run['seed']}",
                    got="no such row" if label not in rows else f"another {', '.join(changed)}",
                    fix="Remove the line, or change its row to the one that it is of.",
                )
        found = {label: [run for run in runs if run["row"] == label] for label in rows}
        return {
            label: Row(label, sorted(some, key=lambda run: run["seed"]))
            for label, some in found.items()
            if some
        }


def at_paper_size(rows: Mapping[str, TrainingConfig], **sizes: Any) -> dict[str, TrainingConfig]:
    """Return rows with the sizes of a paper; initial weights keep their rule if it depends on the width."""
    found = {}
    for label, row in rows.items():
        options = dict(row.model_options)
        if options.get("initializer_range") == unit_variance_std(row.width):
            options["initializer_range"] = unit_variance_std(sizes["width"])
        found[f"{label}{PAPER_SIZE}"] = replace(row, **{"model_options": options, **sizes})
    return found


def run_missing(
    experiment: Experiment,
    data: Path,
    rows: Sequence[str],
    seeds: Sequence[int],
    *,
    folder: Path = Path("runs"),
    results: Path = RESULTS,
) -> bool:
    """Train every row at every seed that has no run, each in its own process; return if all succeeded.

    A run that was interrupted resumes. A kept run of other settings is never replaced. `folder` holds
    checkpoints and the best models, `results` the kept runs.
    """
    from experiments.training.train import train_row

    path, succeeded, refused = experiment.path(results), True, set[str]()
    for seed in seeds:
        for label in (label for label in rows if label not in refused):
            config = {**experiment.rows, **experiment.large}[label]
            command = f"python -m experiments run {experiment.name} --rows '{label}' --seeds {seed}"
            command += " --large" * (label in experiment.large)
            kept = [run for run in read_runs(path) if (run["row"], run["seed"]) == (label, seed)]
            if kept and (changed := changed_fields(kept[0], config)):
                print(f"{command}: {path} has a run with another {', '.join(changed)}", file=sys.stderr)
                succeeded = False
            if kept:
                continue
            places = {"--data": data, "--folder": folder, "--results": results}
            usual = Path("data"), Path("runs"), RESULTS
            given = [(name, at) for (name, at), one in zip(places.items(), usual, strict=True) if at != one]
            print(command, *(f"{name} {shlex.quote(str(at))}" for name, at in given), flush=True)
            try:  # a fresh process, so that its peak memory is due to the run
                with ProcessPoolExecutor(1, get_context("spawn"), end_with_parent) as pool:
                    arguments = (config, label, seed, data, folder / experiment.name, command, path)
                    append_run(path, pool.submit(train_row, *arguments).result())
            except Exception as error:  # the other rows run all the same
                if isinstance(error, RankwiseError):  # data that are missing or differ, for every seed
                    refused.add(label)
                print(f"{command}: {type(error).__name__}: {error}", file=sys.stderr)
                succeeded = False
    return succeeded


def end_with_parent() -> None:
    """End this process if the process that started it is killed, so that the run can be resumed."""
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()  # type: ignore[union-attr]
