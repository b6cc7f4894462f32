"""Verdicts: does a table of runs support an expectation? Yes, no, or unclear."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.results import Run

BYTE_LOSS = "loss per byte"
NORMAL = 1.96
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Standard errors on each side of the mean that hold 95 %, by the number of seeds; more seeds count as 5."""


@dataclass(frozen=True)
class Row:
    """One row of a table: runs that differ in their seed alone."""

    label: str
    runs: Sequence[Run]

    def scores(self, name: str) -> list[float]:
        """Return a number of every run: `loss`, `accuracy`, `BYTE_LOSS`, or another of its values."""
        if name == BYTE_LOSS:
            return [run["values"]["scores"]["loss"] / bytes_per_token(run) for run in self.runs]
        return [run["values"]["scores"].get(name, run["values"].get(name)) for run in self.runs]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.scores(name))

    def std(self, name: str) -> float:
        """Return the standard deviation over seeds; 0 for one seed."""
        values = self.scores(name)
        return statistics.stdev(values) if len(values) > 1 else 0.0


def bytes_per_token(run: Run) -> float:
    """Return the bytes per token of the test text; 1 for runs from before it was kept."""
    return run["values"].get("bytes_per_token") or 1.0


def evaluated_examples(run: Run) -> int:
    """Return the number of test examples that a run was evaluated on."""
    most: int | None = run["settings"]["evaluate_on"]
    test: int = run["values"]["data"]["test"]
    return test if most is None else min(most, test)


Table = Mapping[str, Row]
"""Rows by label; rows without a run are absent."""
Verdict = tuple[bool | None, str]
"""True, False or None (unclear), and the numbers that decide it."""


@dataclass(frozen=True)
class Expectation:
    """A statement about a table, and the rule that decides it."""

    statement: str
    needs: Sequence[str]
    """Labels of the rows that it is about."""
    decide: Callable[[Table], Verdict]


def margin(rows: Sequence[Row], metric: str, table: Table) -> float:
    """Return half the 95 % interval of a difference of means, from seeds and from evaluated examples.

    Seeds count by Student's t of the row with the fewest. A row of one seed gets the largest standard
    deviation in its table; if no row has several seeds, the margin is infinite. An accuracy p on n examples
    has a standard error of √(p (1 - p) / n), as if rows were evaluated on different examples.
    """
    seeded = [row for row in table.values() if len(row.runs) > 1]
    if not seeded:
        return math.inf
    widest = max(seeded, key=lambda row: row.std(metric))
    known = [row if len(row.runs) > 1 else widest for row in rows]
    seeds = sum(by.std(metric) ** 2 / len(row.runs) for row, by in zip(rows, known, strict=True))
    examples = 0.0
    if metric == "accuracy":
        shares = [row.mean(metric) for row in rows]
        examples = sum(
            p * (1 - p) / evaluated_examples(row.runs[0]) for p, row in zip(shares, rows, strict=True)
        )
    errors = STUDENT[min([*(len(row.runs) for row in known), max(STUDENT)])]
    return math.sqrt(errors**2 * seeds + NORMAL**2 * examples)


def has_learned(rows: Sequence[Row], metric: str, floor: float = -math.inf) -> bool:
    """Return if the best of the rows is above a floor.

    An accuracy must also exceed that of the most common answer, by more than its examples leave open.
    """
    best = max(rows, key=lambda row: row.mean(metric))
    if metric == "accuracy":
        examples = evaluated_examples(best.runs[0])
        for run in (run for row in rows for run in row.runs):
            if (chance := run["values"]["chance"]) is not None:
                floor = max(floor, chance + NORMAL * math.sqrt(chance * (1 - chance) / examples))
    return best.mean(metric) > floor


def decide_difference(
    distance: float, rows: Sequence[Row], metric: str, table: Table, floor: float = -math.inf
) -> bool | None:
    """Return if a difference less its bar is above 0; None within `margin`, or if no row `has_learned`."""
    if abs(distance) < margin(rows, metric, table) or not has_learned(rows, metric, floor):
        return None
    return distance > 0


def below(
    better: str, worse: str, metric: str = "loss", by: float = 0.0, floor: float = -math.inf
) -> Expectation:
    """Expect the mean of one row to be below the mean of another by more than `by`."""

    def decide(table: Table) -> Verdict:
        rows = table[better], table[worse]
        low, high = (row.mean(metric) for row in rows)
        return decide_difference(high - low - by, rows, metric, table, floor), f"{low:.3f} against {high:.3f}"

    more = f" by more than {by:g}" if by else ""
    return Expectation(f"{metric}: {better} is below {worse}{more}", (better, worse), decide)


def close_to(
    one: str, other: str, by: float, metric: str = "accuracy", floor: float = -math.inf
) -> Expectation:
    """Expect the means of two rows to differ by less than `by`."""

    def decide(table: Table) -> Verdict:
        rows = table[one], table[other]
        first, second = (row.mean(metric) for row in rows)
        return decide_difference(
            by - abs(first - second), rows, metric, table, floor
        ), f"{first:.3f} against {second:.3f}"

    return Expectation(f"{metric}: {one} and {other} differ by less than {by:g}", (one, other), decide)


def within(near: str, of: str, by: float, metric: str = "loss", floor: float = -math.inf) -> Expectation:
    """Expect the mean of one row to be worse than the mean of another by less than `by`."""
    worse, side = (-1, "below") if metric == "accuracy" else (1, "above")

    def decide(table: Table) -> Verdict:
        rows = table[near], table[of]
        gap = rows[0].mean(metric) - rows[1].mean(metric)
        return decide_difference(by - worse * gap, rows, metric, table, floor), f"{gap:+.3f}"

    return Expectation(f"{metric}: {near} is less than {by:g} {side} {of}", (near, of), decide)


def exceeds(label: str, bar: float, whose: str, metric: str = "accuracy") -> Expectation:
    """Expect the mean of a row to be above a known number."""

    def decide(table: Table) -> Verdict:
        row = table[label]
        distance = row.mean(metric) - bar
        known = abs(distance) >= margin([row], metric, table)
        return distance > 0 if known else None, f"{row.mean(metric):.3f}"

    return Expectation(f"{metric}: {label} is above {bar:g} ({whose})", [label], decide)
