"""Memberships of pictures: the ends of both measures, and every layer is measured and drawn."""

import math

import pytest
import torch
from experiments.tost import memberships as experiment
from experiments.tost.memberships import by_place, drawn, entropy, measured
from tests.support.torch_names import hooks_of
from transformers import AutoModelForImageClassification

from rankwise.models import ToSTConfig


def test_entropy_is_one_if_heads_share_and_zero_if_one_has_all() -> None:
    shared = torch.full((2, 5, 4), 0.25)
    alone = torch.eye(4).repeat(2, 2, 1)
    half = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(2, 5, 4)
    assert entropy(shared) == pytest.approx(1, abs=1e-6)
    assert entropy(alone) == 0
    assert entropy(half) == pytest.approx(math.log(2) / math.log(4), abs=1e-6)


def test_place_explains_equal_pictures_and_little_noise() -> None:
    torch.manual_seed(0)
    noise = torch.rand(100, 16, 4).softmax(-1)
    assert by_place(noise[:1].expand(3, -1, -1)) == pytest.approx(1, abs=1e-5)
    assert by_place(noise) < 0.03, "1/100 by chance"


def test_every_layer_of_tssa_is_measured_and_drawn() -> None:
    torch.manual_seed(0)
    config = ToSTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, causal=False, image_size=8, patch_size=2,
        num_channels=3, num_labels=3,
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config)
    pixels = torch.rand(4, 3, 8, 8) * 2 - 1
    layers = experiment.memberships(model, pixels)
    assert [tuple(layer.shape) for layer in layers] == [(4, 16, 2)] * 3
    assert torch.allclose(layers[1].sum(-1), torch.ones(4, 16))
    assert [set(row) for row in measured(model, pixels)] == [{"entropy", "by_place", "least", "most"}] * 3
    sheet = drawn(model, pixels[:2])
    edge, gap = 8 * experiment.ENLARGED, experiment.GAP
    assert sheet.size == (edge + 3 * (3 * gap + 2 * (edge + gap)), 2 * (edge + gap) - gap)
    first = experiment.memberships(model, pixels[:2])[0]
    corner = round(float((first[1, 0, 1] - first.min()) / (first.max() - first.min())) * 255)
    assert sheet.getpixel((edge + 3 * gap + edge + gap, edge + gap)) == (corner,) * 3
    assert not hooks_of(model)
