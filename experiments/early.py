"""Write the early losses that `rankwise train` holds its runs against, from kept runs.

    python -m experiments.early

reads experiments/results/*.jsonl. A row counts if it is a recipe with arguments alone: whatever else was
changed has other losses. Where an experiment has the row on several data, the first one counts.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.results import RESULTS
from experiments.trained import EXPERIMENTS
from rankwise._internals.files import write_file
from rankwise.train.early import KEPT
from rankwise.train.overrides import build, changes
from rankwise.train.recipes import RECIPES
from rankwise.train.settings import Recipe

STEPS = (20, 100)
LEAST, FEW = 0.2, 0.3
"""Smallest tolerance, and that of fewer than three runs; otherwise five standard deviations of the runs."""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Early losses of every recipe with arguments alone that has kept runs."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for experiment in EXPERIMENTS.values():
        for row in experiment.table(folder).values():
            for run in row.runs:
                made = Recipe.model_validate(run["settings"])
                function = RECIPES[made.name]
                own = {"size", "seed", "task.path", *made.variant}
                if (
                    set(changes(made, function)) <= own
                    and made.variant == build(function, made.variant).variant
                ):
                    found[json.dumps([made.name, dict(made.variant)])].append(run)
    kept = []
    for key, runs in found.items():
        name, variant = json.loads(key)
        data = runs[0]["values"]["data"]["sha256"]
        values = [run["values"] for run in runs if run["values"]["data"]["sha256"] == data]
        curves = [dict(map(tuple, one["curve"])) for one in values]
        losses = [
            [step, round(statistics.fmean(values), 2), round(tolerance(values), 2)]
            for step in STEPS
            if (values := [curve[step] for curve in curves if step in curve])
        ]
        kept.append({"recipe": name, "variant": variant, "data": data, "losses": losses})
    return kept


def tolerance(losses: Sequence[float]) -> float:
    """How far another run may be from the mean."""
    return FEW if len(losses) < 3 else max(LEAST, 5 * statistics.stdev(losses))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=KEPT)
    chosen = parser.parse_args(arguments)
    kept = rows(chosen.results)
    text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept) + "\n]\n"
    write_file(chosen.to, text, "early losses")
    print(f"wrote {len(kept)} rows to {chosen.to}")


if __name__ == "__main__":
    main()
