"""The recipe: its published numbers, its saved results, and the page made of them."""

import json
from pathlib import Path

import pytest
import torch
from experiments import rank_saturation_page as page
from experiments.rank_saturation import (
    PAGE,
    RESULTS,
    Recipe,
    Variant,
    models,
    synthetic,
    text_ranks,
    word_ids,
)


def test_the_rebuttal_has_its_forty_cells() -> None:
    cells = [cell for rows in page.REBUTTAL.values() for row in rows.values() for cell in row.values()]
    assert len(cells) == 40
    assert page.REBUTTAL[2][128][16] == (0.2667, 0.0101)
    assert page.REBUTTAL[4][512][2] == (0.053, 0.0021)


def test_saved_results_come_out_again() -> None:
    saved = json.loads(RESULTS.read_text())
    [again] = [one for one in synthetic(Recipe(lengths=(50,))) if one["inputs"] == "orthonormal"][:1]
    [kept] = [
        one
        for one in saved["synthetic"]
        if (one["tokens"], one["mask"], one["inputs"]) == (50, "full", "orthonormal")
    ]
    # Another machine may round a score otherwise, and so move a winner: 1/50 in one of ten trials.
    assert [p[1] for p in kept["points"]] == pytest.approx([p[1] for p in again["points"]], abs=0.005)
    # Two means of ten trials with a standard deviation of at most 0.04 (T = 50): 3·√2·0.04/√10 = 0.054.
    assert max(page.synthetic_errors(saved)) < 0.054
    assert max(map(abs, saved["law"]["full"]["residuals"])) < 1.5


def test_the_page_is_made_of_the_results(tmp_path: Path) -> None:
    page.write_page(tmp_path / "page.md", json.loads(RESULTS.read_text()))
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()
    for name in (page.LAW, page.BARRIER):
        assert f"images/{name}" in PAGE.read_text()
        assert (tmp_path / "images" / name).read_text() == (PAGE.parent / "images" / name).read_text()


def test_the_parts_on_data_run_small(tmp_path: Path) -> None:
    text = tmp_path / "reviews.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"word{i} and more, and more"}) for i in range(4)))
    assert word_ids(text, 8, padded=True, sequences=2)[0].tolist()[-2:] == [0, 0]
    assert len(word_ids(text, 8, padded=False, sequences=2)) == 0
    recipe = Recipe(trials=2, model_head_dims=(4,), model_width=8, model_layers=2, text_tokens=5)
    [found] = models(recipe, None, text)
    assert (len(found["mean"]), found["tokens"]) == (2, 5)
    cells = text_ranks(Variant(6, True, "none", "pre"), 8, recipe, torch.randint(0, 5, (2, 6)))
    assert set(cells["softmax"]) == {"2", "4"}
    assert 1 / 6 <= cells["hardmax"]["4"]["3"][0] <= 1
