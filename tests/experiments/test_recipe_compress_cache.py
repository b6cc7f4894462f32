"""The page of the cache is what its results say, and they keep what is promised."""

import json

from experiments import compress_cache as recipe

CONTENT = json.loads(recipe.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_made_of_the_results() -> None:
    settings = CONTENT["settings"]
    one = recipe.Recipe(**{key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})
    assert one == recipe.Recipe()
    assert recipe.page(one, CONTENT["splits"]) == recipe.PAGE.read_text(encoding="utf-8")


def test_half_and_a_quarter_of_the_bytes_keep_the_loss() -> None:
    assert len(CONTENT["splits"]) == 3
    for split in CONTENT["splits"]:
        for keep, allowed in (("0.5", 0.0005), ("0.25", 0.017)):
            own = split["keeps"][keep]
            assert own["cache_bytes_after"] <= float(keep) * own["cache_bytes_before"]
            assert own["loss_after"] - own["loss_before"] <= allowed
