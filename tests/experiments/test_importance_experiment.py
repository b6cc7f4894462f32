"""Importance of heads: a small run, and the kept results."""

import pytest
import torch
import transformers
from experiments.rank.importance import STUDY, Settings, correlations, one_model


def test_the_kept_results_support_the_page() -> None:
    for model in STUDY.kept()["models"]:
        again = correlations(model)
        for name, values in model["correlations"].items():
            # costs are saved to five digits: ties among the smallest move a rank or two of sixteen
            assert [value or 0 for value in values] == pytest.approx(
                [0 if value != value else value for value in again[name]], abs=0.05
            )
        assert max(one["here"] for one in model["sets"]) <= 0.01 + 1e-5
        assert min(model["correlations"]["estimate"]) >= 0.8


def test_a_tiny_model_is_measured() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=24, n_positions=16, **sizes)
    model = transformers.GPT2LMHeadModel(config).eval()
    splits = [[{"input_ids": torch.randint(3, 24, (2, 12))}] for _ in range(2)]
    found = one_model("tiny", "noise", model, splits, Settings(splits=2, probes=2, tolerance=0.1))
    assert len(found["exact"]) == len(found["estimates"]["estimate"]) == 2
    assert [one["order"] for one in found["sets"]] == ["exact", "estimate"] * 2
    assert all(one["here"] <= 0.1 and len(one["elsewhere"]) == 1 for one in found["sets"])
    assert set(found["ranks"]) <= set(correlations(found))
