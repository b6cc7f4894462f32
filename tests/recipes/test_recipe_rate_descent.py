import json

import pytest
import torch
from recipes import rate_descent as recipe
from torch import nn

from rankwise.measures import variational_rate


@pytest.fixture
def ids():
    return torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))


def test_the_rate_with_gradients_is_the_measure():
    g = torch.Generator().manual_seed(1)
    w = torch.randn(2, 7, 3, 5, generator=g, dtype=torch.float64)
    membership = torch.randn(2, 7, 3, generator=g, dtype=torch.float64).softmax(-1)
    wanted = variational_rate(w.transpose(1, 2), membership.transpose(1, 2)).sum(1)
    torch.testing.assert_close(recipe.differentiable_rate(w, membership), wanted)


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


def test_one_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "WINDOWS", 2)
    monkeypatch.setattr(recipe, "TOKENS", 32)
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    code = recipe.main(["--steps", "2", "--seeds", "1", "--page", str(page), "--out", str(out)])
    assert code == 0, capsys.readouterr().out
    assert page.read_text(encoding="utf-8").count("| 3 |") == 4
    assert json.loads(out.read_text())["accuracy"]
