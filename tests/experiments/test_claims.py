"""Kept reports of studies support the claims of their pages."""

import json
from dataclasses import asdict
from statistics import mean, stdev
from typing import Any

import pytest
from experiments.rank import compress_cache, compress_demo, compress_minilm, initial_ranks
from experiments.skips import bound_search

KQ_BOUNDS = {
    "closed form, one width": {"16": 0.050, "8": 0.185, "4": 0.58},
    "closed form, widths per head": {"16": 0.036, "8": 0.112, "4": 0.293},
    "calibrated": {"16": 0.031, "8": 0.093, "4": 0.23},
}
"""Attention KL that a prototype reached on other draws of reviews."""


def test_fresh_ranks_are_far_below_two_nulls_and_far_above_the_third() -> None:
    report = initial_ranks.STUDY.kept()
    for row in report["rows"]:
        assert 4 < row["winners"] / row["fresh"] < row["random"] / row["fresh"] < 7
        assert row["uniform"] < row["fresh"] / 10
        assert row["fresh_std"] < 1
    assert sum(row["beyond_nulls"] for row in report["rows"]) == 0
    assert sum(row["above"] + row["below"] for row in report["rows"]) > 0.9 * report["heads"]


def test_half_and_a_quarter_of_the_cache_keep_the_loss() -> None:
    report = compress_cache.STUDY.kept()
    assert report["settings"] == json.loads(json.dumps(asdict(compress_cache.Recipe())))
    assert len(report["splits"]) == 3
    for split in report["splits"]:
        for keep, allowed in (("0.5", 0.0005), ("0.25", 0.017)):
            own = split["keeps"][keep]
            assert own["cache_bytes_after"] <= float(keep) * own["cache_bytes_before"]
            assert own["loss_after"] - own["loss_before"] <= allowed


@pytest.mark.parametrize("split", range(3))
def test_rotary_pairs_and_heads_cost_at_most_the_claimed_loss(split: int) -> None:
    found = compress_demo.STUDY.kept()["splits"][split]
    for pairs, allowed in (("12", 0.014), ("8", 0.074), ("4", 0.374)):
        own = found["pairs"][pairs]
        assert sum(map(sum, own["kept"])) <= 16 * int(pairs)
        assert own["calibrated"]["loss"] - found["loss"] <= allowed
        assert own["calibrated"]["kl"] < own["chosen"]["kl"]
    ours = found["curves"]["greedy by attention KL, widths per head"]
    rivals = [curve for name, curve in found["curves"].items() if not name.startswith("greedy")]
    assert len(rivals) == 4
    assert all(ours[count] < curve[count] for curve in rivals for count in ours)
    for own in found["heads"].values():
        assert own["parameters_before"] - own["parameters_after"] == len(own["gone"]) * 4 * 128 * 32


def test_narrow_queries_and_keys_are_within_bounds_and_better_than_every_null() -> None:
    splits = compress_minilm.STUDY.kept()["splits"]

    def numbers(way: str, width: str) -> list[float]:
        return [
            one["widths"][width]["calibrated"] if way == "calibrated" else one["curves"][way][width]
            for one in splits
        ]

    for way, bounds in KQ_BOUNDS.items():
        for width, bound in bounds.items():
            assert mean(numbers(way, width)) - stdev(numbers(way, width)) <= bound, (way, width)
    for one in splits:
        ours = one["curves"]["closed form, one width"]
        nulls = [curve for method, curve in one["curves"].items() if "closed" not in method]
        assert all(ours[width] < curve[width] for curve in nulls for width in ("16", "8", "4"))


def test_no_bound_was_violated() -> None:
    report: dict[str, Any] = bound_search.STUDY.kept()
    found = [one for one in report["searches"] if one["bound"] != "theorem"]
    assert sum(one["evaluations"] for one in found) >= 50_000
    assert {one["norm"] for one in found} == {"LayerNorm", "RMSNorm"}
    assert (min(one["eps"] for one in found), max(one["eps"] for one in found)) == (0, 1)
    for one in report["searches"]:
        assert one["worst"] < 1e-9
        assert one["speaking"] >= one["evaluations"] / 10
    scales = [layer for layers in report["least_scales"].values() for layer in layers]
    assert all(0 < layer["both"] <= layer["rows"] for layer in scales)
