import pytest
import torch
from experiments import rate_descent as recipe
from torch import nn


@pytest.fixture
def ids():
    return torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))


def test_the_derived_step_is_the_steepest_descent_of_a_bidirectional_layer(ids):
    layers = recipe.study(recipe.classifier(0), ids)
    assert len(layers) == 4
    assert all(one.derived > 0.99999 for one in layers)


def test_a_layer_that_gives_back_through_the_transpose_descends(ids):
    model = recipe.classifier(0)
    for block in model.model.layers:
        with torch.no_grad():
            block.mixer.out_proj.weight.copy_(block.mixer.in_proj.weight.T)
            block.mixer.out_proj.bias.zero_()
            block.mixer.in_proj.bias.zero_()
    layers = recipe.study(model, ids)
    assert all(one.after_layer < one.rate and one.cosine > 10 * one.chance for one in layers)
    for block in model.model.layers:
        nn.init.normal_(block.mixer.out_proj.weight, std=0.02)
    assert all(abs(one.cosine) < 10 * one.chance for one in recipe.study(model, ids))


def test_shuffling_keeps_the_words():
    words = recipe.shuffled("to be or not to be", torch.Generator().manual_seed(0)).split(" ")
    assert sorted(words) == sorted(["to", "be", "or", "not", "to", "be"])


def test_a_small_run_is_shown(monkeypatch):
    monkeypatch.setattr(recipe, "WINDOWS", 2)
    monkeypatch.setattr(recipe, "TOKENS", 32)
    report = {**recipe.run(steps=2, seeds=1), "versions": {"torch": "2"}}
    assert report["accuracy"]
    assert recipe.tables(report)["tables"].count("| 3 |") == 4
    bidirectional = [one for name, layers in report["layers"].items() if name[0] == "b" for one in layers]
    assert min(one["derived"] for one in bidirectional) > 0.999


def test_the_kept_results_hold_what_the_page_says():
    kept = recipe.STUDY.kept()
    trained = {name: layers for name, layers in kept["layers"].items() if "untrained" not in name}
    layers = [one for found in trained.values() for one in found]
    assert (sum(one["after_block"] < one["rate"] for one in layers), len(layers)) == (12, 16)
    assert min(one["cosine"] for one in layers) == pytest.approx(-0.44, abs=0.005)
    first = [found[0] for name, found in trained.items() if "seed" in name]
    assert all(1.25 < one["after_layer"] / one["rate"] < 1.4 for one in first)
