"""Saved records of compressions."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.documents import compression_document

from rankwise.compression import (
    CacheSize,
    Compression,
    HeadWidth,
    LatentRank,
    LayerCost,
    WindowCost,
)

RECORD = Compression(
    model="m", parts=["heads"], sequences=1, tokens=2, measured_on="held-out data", heads=[],
    attention_kl=math.nan, layers=[LayerCost(site="a", layer=0, attention_kl=math.nan)],
)  # fmt: skip


def test_a_record_is_saved_into_a_folder_and_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "own.json"):
        loaded = Compression.load(RECORD.save(path))
        assert loaded.model_dump_json() == RECORD.model_dump_json()
        assert math.isnan(loaded.layers[0].attention_kl)
    assert Compression.load(tmp_path).model == "m"


def test_widths_are_listed_by_the_original_numbers_of_heads() -> None:
    sizes = {"stack": "", "site": "a", "layer": 0, "before": 8, "kl": 0.0, "kl_calibrated": 0.0}
    heads = [HeadWidth(part="heads", head=at, width=width, **sizes) for at, width in enumerate((0, 8))]
    record = RECORD.model_copy(update={"heads": [*heads, HeadWidth(part="width", head=1, width=3, **sizes)]})
    [layers] = [
        x for part in compression_document(record).sections for x in part.tables if x.title == "Layers"
    ]
    assert layers.rows[0][:3] == ["0", "– 3", "3.0"]


def table(title: str, **fields: object) -> Any:
    tables = compression_document(RECORD.model_copy(update=fields)).sections[0].tables
    return next(table for table in tables if table.title == title)


def test_unknown_numbers_of_a_compression_are_dashes() -> None:
    costs = [WindowCost(tokens=9, windows=1, loss_before=1.0)]
    assert table("Costs", costs=costs).columns[:3] == ["tokens", "windows", "loss"]
    assert table("Costs", costs=costs).rows == [["9", "1", "1.0000"]]  # a column of dashes is left out
    assert (
        "loss 1.0000 → – (–)"
        in compression_document(RECORD.model_copy(update={"costs": costs})).verdict.sentence
    )
    assert table("Savings", timed="pass", seconds_before=0.001).rows[-1] == ["pass, ms", "1.00", "–", "–"]


def test_the_length_with_the_largest_cost_is_the_headline() -> None:
    costs = [
        WindowCost(tokens=tokens, windows=2, loss_before=1.0, loss_added=added, spread=0.01)
        for tokens, added in ((256, 0.1), (1024, 0.3), (2048, 0.2))
    ]
    record = RECORD.model_copy(update={"costs": costs})
    assert (record.worst.tokens, record.worst.loss_after) == (1024, 1.3)
    said = "loss 1.0000 → 1.3000 (+0.3000 ± 0.0100) on held-out data of 1,024 tokens"
    assert said in compression_document(record).verdict.sentence
    broken = WindowCost(tokens=512, windows=2, loss_before=1.0)  # a loss that is not finite is the worst
    assert RECORD.model_copy(update={"costs": [*costs, broken]}).worst is broken
    errors = [WindowCost(tokens=tokens, windows=2, output_error=1 / tokens) for tokens in (9, 99)]
    assert RECORD.model_copy(update={"costs": errors}).worst.tokens == 9


@pytest.mark.parametrize(("after", "said"), [(50, "50.0% fewer"), (100, "0.0% fewer"), (150, "50.0% more")])
def test_savings_are_fewer_or_more_never_negative(after: int, said: str) -> None:
    latent = LatentRank(part="kv", site="a", layer=0, channels=8, full_rank=8, rank=4, output_kl=0.1)
    sizes = {"parameters_before": 100, "parameters_after": after, "latents": [latent]}
    sizes |= {"cache": [CacheSize(tokens=4096, before=200, after=2 * after)]}
    sentence = compression_document(RECORD.model_copy(update=sizes)).verdict.sentence
    assert sentence.endswith(f", {said} parameters, {said} bytes of cache at 4,096 tokens.")
