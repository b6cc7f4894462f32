"""Kept results of rotary pairs and heads keep what is promised."""

from experiments.compress_demo import STUDY

CONTENT = STUDY.kept()


def test_pairs_cost_no_more_than_promised() -> None:
    assert len(CONTENT["splits"]) == 3
    for split in CONTENT["splits"]:
        for pairs, allowed in (("12", 0.014), ("8", 0.074), ("4", 0.374)):
            own = split["pairs"][pairs]
            assert sum(map(sum, own["kept"])) <= 16 * int(pairs)
            assert own["calibrated"]["loss"] - split["loss"] <= allowed
            assert own["calibrated"]["kl"] < own["chosen"]["kl"]
        ours = split["curves"]["greedy by attention KL, widths per head"]
        assert all(
            ours[count] < other[count]
            for name, other in split["curves"].items()
            if not name.startswith("greedy")
            for count in ours
        )


def test_heads_go_within_the_tolerance_there_is() -> None:
    for split in CONTENT["splits"]:
        for own in split["heads"].values():
            removed = own["parameters_before"] - own["parameters_after"]
            assert removed == len(own["gone"]) * 4 * 128 * 32
