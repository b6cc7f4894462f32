"""Kept results of the cache keep what is promised."""

from experiments.compress_cache import STUDY, Recipe
from experiments.study import settings_from

CONTENT = STUDY.kept()


def test_half_and_a_quarter_of_the_bytes_keep_the_loss() -> None:
    assert settings_from(Recipe, CONTENT) == Recipe()
    assert len(CONTENT["splits"]) == 3
    for split in CONTENT["splits"]:
        for keep, allowed in (("0.5", 0.0005), ("0.25", 0.017)):
            own = split["keeps"][keep]
            assert own["cache_bytes_after"] <= float(keep) * own["cache_bytes_before"]
            assert own["loss_after"] - own["loss_before"] <= allowed
