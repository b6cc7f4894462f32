"""Verdicts: decided beyond the 95 % interval of a difference, unclear within it."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from experiments.verdicts import NORMAL, STUDENT, Row, below, close_to, decide_difference, exceeds, within
from tests.experiments.runs import LANGUAGE, kept, made


def test_margins_are_held_on_their_own_side(tmp_path: Path) -> None:
    for seed in (0, 1):  # no spread, so that every margin is 0
        kept(tmp_path, "tost", seed, 1.5)
        kept(tmp_path, "transformer", seed, 1.25)
    table = LANGUAGE.table(tmp_path)
    assert below("transformer", "tost").decide(table)[0]
    assert not below("transformer", "tost", by=0.25).decide(table)[0]
    assert within("tost", "transformer", 0.26).decide(table) == (True, "+0.250")
    assert within("tost", "transformer", 0.25).decide(table)[0] is False
    for pair in (("tost", "transformer"), ("transformer", "tost")):
        assert close_to(*pair, 0.2, "loss").decide(table)[0] is False
        assert close_to(*pair, 0.3, "loss").decide(table)[0] is True
    for bar in (1.25, 1.75, 9.0):
        assert exceeds("tost", bar, "a bar", "loss").decide(table) == (bar < 1.5, "1.500")


def test_a_lower_accuracy_is_worse() -> None:
    every = {"evaluate_on": None}
    table = {
        label: Row(label, [made(every, scores={"accuracy": share}, chance=None, data={"test": 10**9})] * 2)
        for label, share in {"low": 0.5, "high": 0.75}.items()
    }
    assert within("low", "high", 0.26, "accuracy").decide(table) == (True, "-0.250")
    assert within("low", "high", 0.24, "accuracy").decide(table)[0] is False
    assert within("high", "low", 0.01, "accuracy").decide(table) == (True, "+0.250")
    assert within("low", "high", 0.24, "accuracy", floor=0.8).decide(table)[0] is None
    statement = within("low", "high", 0.24, "accuracy").statement
    assert statement == "accuracy: low is less than 0.24 below high"


def losses(*values: float) -> Row:
    return Row("", [made(scores={"loss": value}) for value in values])


def told(rows: list[Row], *distances: float, more: Sequence[Row] = ()) -> list[bool | None]:
    """Verdicts on distances of two rows, in a table with ``more``."""
    table = {str(at): row for at, row in enumerate([*rows, *more])}
    return [decide_difference(distance, rows, "loss", table) for distance in distances]


def test_the_table_has_the_quantiles_of_student() -> None:
    # two degrees of freedom have a closed form: P(|t| < x) = x / √(2 + x²)
    assert STUDENT[3] == pytest.approx(0.95 * (2 / (1 - 0.95**2)) ** 0.5, abs=0.005)
    # one degree is Cauchy's: tan(0.95 π / 2)
    assert STUDENT[2] == pytest.approx(math.tan(0.95 * math.pi / 2), abs=0.005)
    draws = np.random.default_rng(0).standard_normal((400_000, 5))
    for seeds in (4, 5):
        some = draws[:, :seeds]
        ratios = np.abs(some.mean(1)) * seeds**0.5 / some.std(1, ddof=1)
        outside, error = (ratios > STUDENT[seeds]).mean(), (0.05 * 0.95 / len(draws)) ** 0.5
        assert outside == pytest.approx(0.05, abs=5 * error)


def test_differences_within_their_interval_decide_nothing() -> None:
    three = [losses(-1, 0, 1), losses(-1, 0, 1)]
    error = STUDENT[3] * (2 / 3) ** 0.5  # two means of three seeds with standard deviation 1
    assert told(three, -1.01 * error, -0.99 * error, 0.99 * error, 1.01 * error) == [False, None, None, True]
    two = losses(-(0.5**0.5), 0.5**0.5)
    error = STUDENT[2] * (1 / 3 + 1 / 2) ** 0.5
    assert told([three[0], two], 0.99 * error, 1.01 * error) == [None, True], "by the fewest seeds"


def test_a_single_seed_has_the_largest_spread_of_the_others_or_none_is_known() -> None:
    single = [losses(0), losses(1)]
    assert told(single, 0.1, 1e9, -1e9) == [None, None, None]
    more = [losses(*(width * x for x in (-1, 0, 1))) for width in (1, 9, 2)]
    error = 9 * STUDENT[3] * 2**0.5
    assert told(single, 0.99 * error, 1.01 * error, more=more) == [None, True]
    two = losses(-0.1, 0.1)  # their few seeds say nothing of how sure the spread of the others is
    assert told(single, 0.99 * error, 1.01 * error, more=[*more, two]) == [None, True]
    error = 9 * STUDENT[3] * (1 / 3 + 1) ** 0.5
    assert told([more[1], single[0]], 0.99 * error, 1.01 * error, more=[two]) == [None, True]


def test_few_examples_tell_little_of_an_accuracy() -> None:
    def rows(test: int, most: int | None, chance: float | None = None) -> list[Row]:
        settings = {"evaluate_on": most}
        return [
            Row("", [made(settings, scores={"accuracy": share}, chance=chance, data={"test": test})] * 2)
            for share in (0.5, 0.8)
        ]

    error = NORMAL * ((0.25 + 0.16) / 400) ** 0.5  # whatever the number of seeds: their examples are the same
    for two in (rows(500, 400), rows(400, 500), rows(400, None)):
        table = dict(zip("ab", two, strict=True))
        verdicts = [decide_difference(times * error, two, "accuracy", table) for times in (-1.01, 0.99, 1.01)]
        assert verdicts == [False, None, True]
    assert decide_difference(1.0, two, "accuracy", table, floor=0.8) is None, "nothing was learned"
    assert decide_difference(1.0, two, "accuracy", table, floor=0.7) is True, "one of them has learned"
    above = 0.8 + NORMAL * (0.16 / 400) ** 0.5
    for chance, verdict in ((0.8, None), (0.7, True), (1.6 - above, None), (1.58 - above, True)):
        two = rows(400, None, chance)
        assert decide_difference(1.0, two, "accuracy", dict(zip("ab", two, strict=True))) is verdict
