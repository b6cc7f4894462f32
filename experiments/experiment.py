"""What tests a claim about training: a recipe, the rows of a table, the paper's numbers, expectations."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.results import RESULTS, Run, changed_fields, check_same_data, read_runs
from rankwise.errors import RecordError
from rankwise.train import Recipe, recipe

SEEDS = (0, 1, 2)
BYTE_LOSS = "loss a byte"
NORMAL = 1.96
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Standard errors to each side that hold the mean with 95 %, by the number of seeds; more count as 5."""


@dataclass(frozen=True)
class Row:
    """One row of a table: runs that differ in their seed alone."""

    label: str
    runs: Sequence[Run]

    def scores(self, name: str) -> list[float]:
        """A score of every run: ``loss``, ``accuracy``, or a number beside them such as ``parameters``.

        `BYTE_LOSS` is the loss for each byte of the text, of models of tokens as well.
        """
        if name == BYTE_LOSS:
            return [run["values"]["scores"]["loss"] / bytes_per_token(run) for run in self.runs]
        return [run["values"]["scores"].get(name, run["values"].get(name)) for run in self.runs]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.scores(name))

    def spread(self, name: str) -> float:
        """Standard deviation over seeds; 0 for one seed, which the table says."""
        values = self.scores(name)
        return statistics.stdev(values) if len(values) > 1 else 0.0


def bytes_per_token(run: Run) -> float:
    """Return the bytes per token of the held-out text; 1 for runs from before it was kept."""
    return run["values"].get("bytes_per_token") or 1.0


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
    """All of a claim; `experiments.trained` holds them."""

    name: str
    title: str
    source: str
    """Who claims it, and where."""
    recipe: str
    rows: Mapping[str, Mapping[str, Any]]
    """By label, what the recipe is given; ``seed`` comes beside it."""
    metric: str = "loss"
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's number by label, in words where the setting is another."""
    expectations: Sequence[Expectation] = ()
    seeds: Sequence[int] = SEEDS
    notes: str = ""
    """What is different from the paper, and what must be known to read the numbers."""
    more: Callable[[Table], str] | None = None
    """Markdown after the table, from the runs: learned λ by depth, curves."""

    def configuration(self, label: str, seed: int, **given: Any) -> Recipe:
        """The configuration of one run."""
        return recipe(self.recipe, **{"seed": seed, **self.rows[label], **given})

    def path(self, folder: Path = RESULTS) -> Path:
        """Return the file of the runs."""
        return folder / f"{self.name}.jsonl"

    def table(self, folder: Path = RESULTS) -> Table:
        """Return every row that has a run, its runs by seed.

        Raises:
            RecordError: if a line is not a run, is of another configuration than its row, or of other data
                than the runs next to it.
        """
        path = self.path(folder)
        runs = read_runs(path)
        check_same_data(path, runs)
        for run in runs:
            label, seed = run["row"], run["seed"]
            known = label in self.rows
            if not known or (changed := changed_fields(run, self.configuration(label, seed))):
                raise RecordError(
                    str(path),
                    expected=f"the row “{label}” of {self.name} at seed {seed}",
                    got=f"another {', '.join(changed)}" if known else "no such row",
                    fix="Remove the line, or change its row to the one that it is of.",
                )
        found = {label: [run for run in runs if run["row"] == label] for label in self.rows}
        return {
            label: Row(label, sorted(some, key=lambda run: run["seed"]))
            for label, some in found.items()
            if some
        }


def margin(rows: Sequence[Row], metric: str, table: Table) -> float:
    """Half of the 95 % interval of the difference of two means: of seeds, and of the examples judged.

    Seeds count by Student's t of the fewest of them. A row of one seed has the spread of that row of its
    table, among those that have several, that has the largest; where there are none, nothing is known and it
    is infinite. An accuracy p on n examples has a standard error of √(p (1 − p) / n), as if rows were judged
    on their own.
    """
    seeded = [row for row in table.values() if len(row.runs) > 1]
    if not seeded:
        return math.inf
    widest = max(seeded, key=lambda row: row.spread(metric))
    known = [row if len(row.runs) > 1 else widest for row in rows]
    seeds = sum(by.spread(metric) ** 2 / len(row.runs) for row, by in zip(rows, known, strict=True))
    examples = 0.0
    if metric == "accuracy":
        shares = [row.mean(metric) for row in rows]
        examples = sum(p * (1 - p) / judged(row.runs[0]) for p, row in zip(shares, rows, strict=True))
    sure = STUDENT[min([*(len(row.runs) for row in known), max(STUDENT)])]
    return math.sqrt(sure**2 * seeds + NORMAL**2 * examples)


def has_learned(rows: Sequence[Row], metric: str, floor: float = -math.inf) -> bool:
    """Whether the best of some rows is above a floor.

    An accuracy is also above that of always the commonest answer, by more than its examples leave open.
    """
    best = max(rows, key=lambda row: row.mean(metric))
    if metric == "accuracy":
        for chance in (
            told for row in rows for run in row.runs if (told := run["values"]["chance"]) is not None
        ):
            floor = max(floor, chance + NORMAL * math.sqrt(chance * (1 - chance) / judged(best.runs[0])))
    return best.mean(metric) > floor


def judged(run: Run) -> int:
    """How many held-out examples a run's score is of."""
    most: int | None = run["settings"]["evaluation"]["examples"]
    test: int = run["values"]["data"]["test"]
    return test if most is None else min(most, test)


def beyond(
    distance: float, rows: Sequence[Row], metric: str, table: Table, floor: float = -math.inf
) -> bool | None:
    """Whether a difference of two means, less its bar, is above 0.

    None within `margin`, and where no row `has_learned`.
    """
    if abs(distance) < margin(rows, metric, table) or not has_learned(rows, metric, floor):
        return None
    return distance > 0


def below(
    better: str, worse: str, metric: str = "loss", by: float = 0.0, floor: float = -math.inf
) -> Expectation:
    """The mean of one row lies below that of another by more than ``by``; None if no row `has_learned`."""

    def judge(table: Table) -> Verdict:
        rows = table[better], table[worse]
        low, high = (row.mean(metric) for row in rows)
        return beyond(high - low - by, rows, metric, table, floor), f"{low:.3f} against {high:.3f}"

    more = f" by more than {by:g}" if by else ""
    return Expectation(f"{metric} of {better} is below that of {worse}{more}", (better, worse), judge)


def alike(one: str, other: str, by: float, metric: str = "accuracy", floor: float = -math.inf) -> Expectation:
    """The means of two rows differ by less than ``by``; None if no row `has_learned`."""

    def judge(table: Table) -> Verdict:
        rows = table[one], table[other]
        first, second = (row.mean(metric) for row in rows)
        return beyond(
            by - abs(first - second), rows, metric, table, floor
        ), f"{first:.3f} against {second:.3f}"

    return Expectation(f"{metric} of {one} is within {by:g} of that of {other}", (one, other), judge)


def within(near: str, of: str, by: float, metric: str = "loss", floor: float = -math.inf) -> Expectation:
    """The mean of one row is worse than that of another by less than ``by``; None if no row `has_learned`."""
    worse, side = (-1, "below") if metric == "accuracy" else (1, "above")

    def judge(table: Table) -> Verdict:
        rows = table[near], table[of]
        gap = rows[0].mean(metric) - rows[1].mean(metric)
        return beyond(by - worse * gap, rows, metric, table, floor), f"{gap:+.3f}"

    return Expectation(f"{metric} of {near} is less than {by:g} {side} that of {of}", (near, of), judge)


def exceeds(label: str, bar: float, whose: str, metric: str = "accuracy") -> Expectation:
    """The mean of a row is above a number that is known."""

    def judge(table: Table) -> Verdict:
        row = table[label]
        distance = row.mean(metric) - bar
        known = abs(distance) >= margin([row], metric, table)
        return distance > 0 if known else None, f"{row.mean(metric):.3f}"

    return Expectation(f"{metric} of {label} is above {bar:g}, {whose}", [label], judge)
