"""Kept ranks at fresh weights hold what the page claims."""

from experiments.baselines import STUDY

RESULTS = STUDY.kept()


def test_the_untrained_model_is_far_below_two_nulls_and_far_above_the_third() -> None:
    for row in RESULTS["rows"]:
        assert 4 < row["winners"] / row["fresh"] < row["random"] / row["fresh"] < 7
        assert row["uniform"] < row["fresh"] / 10
        assert row["fresh_std"] < 1


def test_nothing_stands_out_against_the_nulls_and_most_heads_against_fresh_weights() -> None:
    assert sum(row["beyond_nulls"] for row in RESULTS["rows"]) == 0
    assert sum(row["above"] + row["below"] for row in RESULTS["rows"]) > 0.9 * RESULTS["heads"]
