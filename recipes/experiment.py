"""What tests a claim about training: a recipe, the rows of a table, the paper's numbers, expectations."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankwise.train import Recipe, recipe

RESULTS = Path(__file__).with_name("results") / "train"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One row of a table: runs that differ in their seed alone."""

    label: str
    runs: Sequence[Mapping[str, Any]]

    def scores(self, name: str) -> list[float]:
        """A score of every run: ``loss``, ``accuracy``, or a number beside them such as ``parameters``."""
        return [run["scores"].get(name, run.get(name)) for run in self.runs]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.scores(name))

    def spread(self, name: str) -> float:
        """Standard deviation over seeds; 0 for one seed, which the table says."""
        values = self.scores(name)
        return statistics.stdev(values) if len(values) > 1 else 0.0


Table = Mapping[str, Row]
"""Rows by label; those without a run are not in it."""
Verdict = tuple[bool | None, str]
"""Whether it is as expected (None: it cannot be told), and the numbers that say so."""


@dataclass(frozen=True)
class Expectation:
    """A sentence that the results bear out or do not."""

    says: str
    needs: Sequence[str]
    """Labels of rows without which it cannot be told."""
    judge: Callable[[Table], Verdict]


@dataclass(frozen=True)
class Experiment:
    """All of a claim; `recipes.trained` holds them."""

    name: str
    title: str
    source: str
    """Who claims it, and where."""
    recipe: str
    rows: Mapping[str, Mapping[str, Any]]
    """By label, what the recipe is given; ``size`` and ``seed`` come beside it."""
    metric: str = "loss"
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's number by label, in words where the setting is another."""
    expectations: Sequence[Expectation] = ()
    seeds: Sequence[int] = SEEDS
    notes: str = ""
    """What is different from the paper, and what must be known to read the numbers."""
    more: Callable[[Table], str] | None = None
    """Markdown after the table, from the runs: learned λ by depth, curves."""

    def configuration(self, label: str, size: str, seed: int, **given: Any) -> Recipe:
        """The configuration of one run."""
        return recipe(self.recipe, **{"size": size, "seed": seed, **self.rows[label], **given})

    def table(self, size: str, folder: Path = RESULTS) -> Table:
        """Every row that has a run of this size."""
        found = {}
        for label in self.rows:
            paths = [folder / f"{run_id(self, label, size, seed)}.json" for seed in range(100)]
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
            if runs:
                found[label] = Row(label, runs)
        return found


def run_id(experiment: Experiment, label: str, size: str, seed: int) -> str:
    """Name of a run's file: experiment, row, size where it is not the small one, seed."""
    words = [experiment.name, label, *([size] if size != "small" else []), f"seed{seed}"]
    return "-".join(words).replace(" ", "_").replace("/", "_")


def error(rows: Sequence[Row], metric: str) -> float:
    """Standard error of the difference of two means: of seeds where there are several, of what was judged.

    An accuracy p on n examples has √(p (1 − p) / n), as if rows were judged on examples of their own.
    """
    squares = 0.0
    for row in rows:
        if len(row.runs) > 1:
            squares += row.spread(metric) ** 2 / len(row.runs)
        if metric == "accuracy":
            share = row.mean(metric)
            squares += share * (1 - share) / judged(row.runs[0])
    return math.sqrt(squares)


def judged(run: Mapping[str, Any]) -> int:
    """How many held-out examples a run's score is of."""
    most: int | None = run["configuration"]["evaluation"]["examples"]
    test: int = run["data"]["test"]
    return test if most is None else min(most, test)


def beyond(distance: float, rows: Sequence[Row], metric: str, floor: float = -math.inf) -> bool | None:
    """Whether a difference of two means, less its margin, is above 0.

    None within two standard errors, and where no row's mean is above ``floor``.
    """
    if abs(distance) < 2 * error(rows, metric) or max(row.mean(metric) for row in rows) <= floor:
        return None
    return distance > 0


def below(
    better: str, worse: str, metric: str = "loss", by: float = 0.0, floor: float = -math.inf
) -> Expectation:
    """The mean of one row lies below that of another by more than ``by``; None if none is above ``floor``."""

    def judge(table: Table) -> Verdict:
        rows = table[better], table[worse]
        low, high = (row.mean(metric) for row in rows)
        return beyond(high - low - by, rows, metric, floor), f"{low:.3f} against {high:.3f}"

    more = f" by more than {by:g}" if by else ""
    return Expectation(f"{metric} of {better} is below that of {worse}{more}", (better, worse), judge)


def alike(
    one: str, other: str, margin: float, metric: str = "accuracy", floor: float = -math.inf
) -> Expectation:
    """The means of two rows differ by less than ``margin``; None if none is above ``floor``."""

    def judge(table: Table) -> Verdict:
        rows = table[one], table[other]
        first, second = (row.mean(metric) for row in rows)
        return beyond(margin - abs(first - second), rows, metric, floor), f"{first:.3f} against {second:.3f}"

    return Expectation(f"{metric} of {one} is within {margin:g} of that of {other}", (one, other), judge)


def within(near: str, of: str, margin: float, metric: str = "loss") -> Expectation:
    """The mean of one row lies less than ``margin`` above that of another."""

    def judge(table: Table) -> Verdict:
        rows = table[near], table[of]
        gap = rows[0].mean(metric) - rows[1].mean(metric)
        return beyond(margin - gap, rows, metric), f"{gap:+.3f}"

    return Expectation(f"{metric} of {near} is less than {margin:g} above that of {of}", (near, of), judge)
