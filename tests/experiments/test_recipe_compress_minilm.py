"""Kept results of MiniLM narrowed: within the bounds of a prototype."""

from statistics import mean, stdev

import pytest
from experiments.compress_minilm import STUDY
from experiments.render import mean_std

BOUNDS = {
    "closed form, one width": {"16": 0.050, "8": 0.185, "4": 0.58},
    "closed form, widths per head": {"16": 0.036, "8": 0.112, "4": 0.293},
    "calibrated": {"16": 0.031, "8": 0.093, "4": 0.23},
}
"""Attention KL that a prototype reached on other draws of reviews."""


@pytest.fixture(scope="module")
def splits() -> list[dict]:
    return STUDY.kept()["splits"]


def test_ours_is_within_the_bounds_and_their_spread_and_no_null_is_better(splits: list[dict]) -> None:
    for way, bounds in BOUNDS.items():
        for width, bound in bounds.items():
            numbers = [
                one["curves"][way][width] if way in one["curves"] else one["widths"][width]["calibrated"]
                for one in splits
            ]
            around = stdev(numbers) if len(numbers) > 1 else 0.0
            assert mean(numbers) - around <= bound, (way, width)
    for one in splits:
        for width in ("16", "8", "4"):
            ours = one["curves"]["closed form, one width"][width]
            assert all(
                ours < numbers[width] for method, numbers in one["curves"].items() if "closed" not in method
            )


def test_mean_std_is_the_mean_and_the_standard_deviation() -> None:
    assert mean_std([1.0, 2.0, 3.0], 3) == "2.000 ± 1.000"
    assert mean_std([0.5], 3) == "0.500"
