"""Run the rows of an experiment on training, each in a process of its own, and keep the results.

    python -m experiments.run language task.path=shakespeare.txt --rows tost transformer --seeds 0 1 2

A run that is done is not done again; a run that was killed goes on from its last checkpoint. KEY=VALUE is
given to every run; a result of another configuration is never taken for a run, nor written over. Results go
to experiments/results/NAME.jsonl, checkpoints to --work, where --keep leaves the models too.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from experiments.results import RESULTS, Run, append_run, audits_to_columns, changed_fields, read_runs
from experiments.trained import EXPERIMENTS
from rankwise._internals.files import parse_json
from rankwise.errors import RecordError
from rankwise.train.overrides import changes, parse_pairs
from rankwise.train.recipes import RECIPES


def words(experiment: Experiment, label: str, seed: int, given: dict[str, Any]) -> list[str]:
    """Arguments of `rankwise train` for one run."""
    made = experiment.configuration(label, seed, **given)
    pairs = changes(made, RECIPES[experiment.recipe])
    told = {key: value if isinstance(value, str) else json.dumps(value) for key, value in pairs.items()}
    return ["train", experiment.recipe, *(f"{key}={value}" for key, value in told.items())]


def run(
    experiment: Experiment,
    label: str,
    seed: int,
    work: Path,
    results: Path,
    given: dict[str, Any],
    keep: bool = False,
) -> bool:
    """Run one row at one seed, unless it is done; False where it failed or another configuration is there."""
    name = f"{experiment.name}-{label}-seed{seed}".replace(" ", "_").replace("/", "_")
    made, path, out = experiment.configuration(label, seed, **given), experiment.path(results), work / name
    kept = [one for one in read_runs(path) if (one["row"], one["seed"]) == (label, seed)]
    finished = out / "results.json"
    for there, one in [*((path, one) for one in kept), *((finished, one) for one in _read(finished, label))]:
        if changed := changed_fields(one, made):
            print(
                f"{name}: {there} is of another configuration ({', '.join(changed)}); "
                "move it away, or choose other --results and --work",
                file=sys.stderr,
            )
            return False
    if kept:
        print(f"{name}: done already")
        return True
    arguments = words(experiment, label, seed, given)
    print(f"{name}: rankwise {shlex.join(arguments)}", flush=True)
    if not finished.is_file():
        done = subprocess.run([sys.executable, "-m", "rankwise", *arguments, "--out", str(out), "--resume"])
        if done.returncode:
            print(f"{name}: failed with status {done.returncode}", file=sys.stderr)
            return False
    append_run(path, *_read(finished, label))
    if not keep:
        shutil.rmtree(out)
    return True


def _read(path: Path, label: str) -> list[Run]:
    """Return what a training wrote, as a line of results; nothing if it has not finished."""
    if not path.is_file():
        return []
    values = parse_json(path.read_text(encoding="utf-8"))
    values["rank"] = audits_to_columns(values["rank"])
    settings, provenance = values.pop("configuration"), values.pop("provenance")
    return [
        {
            "row": label,
            "seed": settings["seed"],
            "settings": settings,
            "values": values,
            "provenance": provenance,
        }
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status says whether all runs ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("pairs", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rows", nargs="+", metavar="LABEL", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the experiment")
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", action="store_true", help="leave the models in --work")
    chosen, rest = parser.parse_known_intermixed_args(arguments)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    experiment = EXPERIMENTS[chosen.experiment]
    labels = chosen.rows or list(experiment.rows)
    unknown = [label for label in labels if label not in experiment.rows]
    if unknown:
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(experiment.rows)}")
    given = parse_pairs(chosen.pairs)
    seeds = experiment.seeds if chosen.seeds is None else chosen.seeds
    try:
        ended = [
            run(experiment, label, seed, chosen.work, chosen.results, given, chosen.keep)
            for seed in seeds
            for label in labels
        ]
    except RecordError as error:
        parser.error(str(error))
    return 0 if all(ended) else 1


if __name__ == "__main__":
    raise SystemExit(main())
