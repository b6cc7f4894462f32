"""Saved records of compressions."""

import math
from pathlib import Path

import pytest
from tests.support.documents import compression_document

from rankwise.compression import (
    Compression,
    HeadWidth,
    LatentRank,
    LayerCost,
)

RECORD = Compression(
    model="m", parts=["heads"], sequences=1, tokens=2, measured_on="held-out data", heads=[],
    attention_kl=math.nan, layers=[LayerCost(site="a", layer=0, attention_kl=math.nan, output_error=0.5)],
)  # fmt: skip


def test_a_record_is_saved_into_a_folder_and_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "own.json"):
        loaded = Compression.load(RECORD.save(path))
        assert loaded.model_dump_json() == RECORD.model_dump_json()
        assert math.isnan(loaded.layers[0].attention_kl)
    assert Compression.load(tmp_path).model == "m"
    assert loaded.mean_width == 0


def test_widths_are_listed_by_the_original_numbers_of_heads() -> None:
    sizes = {"stack": "", "site": "a", "layer": 0, "before": 8, "kl": 0.0, "kl_calibrated": 0.0}
    heads = [HeadWidth(part="heads", head=at, width=width, **sizes) for at, width in enumerate((0, 8))]
    record = RECORD.model_copy(update={"heads": [*heads, HeadWidth(part="width", head=1, width=3, **sizes)]})
    [layers] = [
        x for part in compression_document(record).sections for x in part.tables if x.title == "Layers"
    ]
    assert layers.rows[0][:3] == ["0", "– 3", "3.0"]


def costs(**fields: object) -> dict[str, list[str]]:
    """Cells of the first table of costs and of savings, by the first cell of the row."""
    tables = compression_document(RECORD.model_copy(update=fields)).sections[0].tables
    return {str(row[0]): [str(cell) for cell in row[1:]] for table in tables for row in table.rows}


def test_unknown_numbers_of_a_compression_are_dashes() -> None:
    found = costs(loss_before=1.0, timed="pass", seconds_before=0.001)
    assert found["loss"] == ["1.0000", "–"]
    assert found["pass, ms"] == ["1.00", "–", "–"]


@pytest.mark.parametrize(("after", "said"), [(50, "50.0% fewer"), (100, "0.0% fewer"), (150, "50.0% more")])
def test_savings_are_fewer_or_more_never_negative(after: int, said: str) -> None:
    latent = LatentRank(part="kv", site="a", layer=0, channels=8, full_rank=8, rank=4, output_kl=0.1)
    sizes = {"parameters_before": 100, "parameters_after": after, "latents": [latent]}
    sizes |= {"cache_bytes_before": 200, "cache_bytes_after": 2 * after}
    sentence = compression_document(RECORD.model_copy(update=sizes)).verdict.sentence
    assert sentence.endswith(f", {said} parameters, {said} bytes of cache.")
