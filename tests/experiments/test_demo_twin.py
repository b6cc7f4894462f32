"""The ToST twin of the demo: bundled, loadable offline, as good as its record says, and audited."""

import json
from pathlib import Path

import pytest
import torch
from experiments.train_demo import RECIPES, scoring_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

import rankwise as rw
from rankwise.cli.load_model import demo_text, demo_tost_model

FOLDER = Path(__file__).parents[2] / "experiments" / "results"
RESULTS = {name: json.loads((FOLDER / f"train_{name}.json").read_text()) for name in RECIPES}


@pytest.fixture(scope="module")
def twin():
    assert rw.models.ToSTConfig.model_type == "tost"  # known to transformers from here on
    folder = demo_tost_model()
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_the_twins_had_the_same_budget() -> None:
    demo = RESULTS["demo"]
    for name, result in RESULTS.items():
        assert result["parameters"] == pytest.approx(demo["parameters"], rel=1e-3), name
        for setting in ("tokens", "steps", "batch", "learning_rate", "seed"):
            assert result["settings"][setting] == demo["settings"][setting], (name, setting)
        assert result["text"] == demo["text"], name


def test_the_bundled_twin_has_the_recorded_loss(twin) -> None:
    model, tokenizer = twin
    ids = torch.tensor(tokenizer(demo_text().read_text("utf-8"), add_special_tokens=False).input_ids)
    windows = scoring_windows(ids, 256)
    batch = torch.stack([windows[at]["input_ids"] for at in range(len(windows))])
    with torch.no_grad():
        loss = model(input_ids=batch, labels=batch).loss.item()
    # float32 sums in another order, over 160 windows
    assert loss == pytest.approx(RESULTS["demo_tost"]["scores"]["bundled_text_loss"], abs=2e-4)


def test_an_audit_shows_its_memberships(twin) -> None:
    model, tokenizer = twin
    ids = tokenizer(demo_text().read_text("utf-8")[:64], return_tensors="pt").input_ids
    audit = rw.audit(model, [{"input_ids": ids}])
    assert {head.kind for head in audit.heads} == {"diagonal"}
    for layer in range(4):
        heads = [head for head in audit.heads if head.layer == layer]
        assert sum(head.membership for head in heads) == pytest.approx(1, abs=1e-5)
        assert all(len(head.membership_map) == ids.shape[1] for head in heads)
        assert all(head.coding_rate > 0 for head in heads)
