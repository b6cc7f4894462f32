"""What counting tells of ListOps: all where counts decide, nothing where their order does."""

import numpy as np
import pytest
from experiments.listops_baselines import by_counts, by_first
from experiments.registry import EXPERIMENTS
from experiments.tasks.listops import CLOSE, MAX, MIN
from experiments.tasks.task import Examples
from experiments.tost.long_range import KNOWN


def split(values: str, seed: int) -> Examples:
    """Expressions of an operation, two digits of 0 and 1, and a bracket; values by the rule of that name."""
    draw = np.random.default_rng(seed)
    operation, digits = draw.choice([MIN, MAX], 200), draw.integers(0, 2, (200, 2))
    close = np.full(200, CLOSE)
    ids = np.stack([operation, *(1 + digits).T, close, np.zeros(200, dtype=int)], 1)
    told = {
        "operation": (operation == MAX).astype(int),
        "counts": np.where(operation == MAX, digits.max(1), digits.min(1)),
        "order": digits[:, 0],
    }
    return Examples({"input_ids": ids, "labels": told[values]}, np.full(200, 4))


@pytest.mark.parametrize(
    ("values", "first", "counts"), [("operation", 1, 1), ("counts", 0.75, 1), ("order", 0.5, 0.75)]
)
def test_counting_tells_what_does_not_depend_on_order(values: str, first: float, counts: float) -> None:
    two = split(values, 0), split(values, 1)
    error = 4 * 0.5 / 200**0.5
    assert by_first(*two) == pytest.approx(first, abs=error if first < 1 else 0)
    share, loss = by_counts(*two)
    assert share == pytest.approx(counts, abs=error if counts < 1 else 0)
    assert loss < 0.7 if counts == 1 else loss > 0.2


def test_what_was_kept_is_of_the_data_of_the_runs() -> None:
    table = EXPERIMENTS["long-range-listops"].table()
    read = {run["values"]["data"]["sha256"] for row in table.values() for run in row.runs}
    assert read == {KNOWN["sha256"]}
