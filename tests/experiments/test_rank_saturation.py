"""Saturation of rank: published numbers, kept results, and small runs."""

import json
from pathlib import Path

import pytest
import torch
from experiments.rank import rank_barrier
from experiments.rank import rank_saturation as experiment
from experiments.rank.random_layers import gaussian, layer_ranks, stream
from experiments.rank.rank_saturation import REBUTTAL, STUDY, Settings, Variant


def test_the_rebuttal_has_its_forty_cells() -> None:
    assert len(REBUTTAL) == 40
    assert REBUTTAL[2, 128, 16] == (0.2667, 0.0101)
    assert REBUTTAL[4, 512, 2] == (0.053, 0.0021)


def test_kept_curves_are_repeated() -> None:
    kept = STUDY.kept()
    again = experiment.synthetic(Settings(lengths=(50,)))
    saved = [one for one in kept["synthetic"] if one["tokens"] == 50]
    for one, other in zip(saved, again, strict=True):
        # Another machine may round a score otherwise, and so move a winner: 1/50 in one of ten trials.
        assert [p[1] for p in one["points"]] == pytest.approx([p[1] for p in other["points"]], abs=0.005)
    # Two means of ten trials with a standard deviation of at most 0.04 (T = 50): 3·√2·0.04/√10 = 0.054.
    hardmax = {
        curve["tokens"]: [mean / curve["tokens"] for mean in curve["mean"]]
        for curve in rank_barrier.STUDY.kept()["curves"]
        if (curve["mask"], curve["temperature"]) == ("full", 0)
    }
    for one in kept["synthetic"]:
        if (one["mask"], one["inputs"]) == ("full", "orthonormal"):
            assert [mean for _, mean, _ in one["points"]] == pytest.approx(hardmax[one["tokens"]], abs=0.054)
    assert max(map(abs, kept["law"]["full"]["residuals"])) < 1.5


def test_text_and_models_run_small(tmp_path: Path) -> None:
    text = tmp_path / "reviews.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"word{i} and more, and more"}) for i in range(4)))
    padded = experiment.word_ids(text, 8, padded=True, sequences=2)
    assert padded[0].tolist()[-2:] == [0, 0]
    assert len(experiment.word_ids(text, 8, padded=False, sequences=2)) == 0
    settings = Settings(trials=2, model_head_dims=(4,), model_width=8, model_layers=2)
    words = experiment.word_ids(text, 5, padded=False, sequences=2)
    [found] = experiment.models(settings, {"BERT": {"input_ids": words}})
    assert (len(found["mean"]), found["tokens"]) == (2, 5)
    for positions in ("none", "learned"):
        cells = experiment.text_ranks(Variant(8, True, positions, "pre"), 8, settings, padded)
        assert set(cells["softmax"]) == {"2", "4"}
        assert 1 / 8 <= cells["hardmax"]["4"]["3"][0] <= 1


def test_the_first_layer_has_the_ranks_of_its_random_heads() -> None:
    states = torch.randn(24, 16, generator=stream(1))
    draw = stream(2)
    query, key = (states @ gaussian(draw, 16, 8 * 5) for _ in range(2))
    winners = [
        len((query[:, 5 * h : 5 * h + 5] @ key[:, 5 * h : 5 * h + 5].mT).argmax(-1).unique())
        for h in range(2)
    ]
    assert layer_ranks(states, 5, "post", stream(2), (0.0,))[0, 0] == sum(winners) / 2
