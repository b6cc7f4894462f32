"""Numbers of the paper's theorem: known only if its hypotheses hold, and then true."""

import math
from collections.abc import Callable

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.support.modules import Attention, Block
from torch import nn

from rankwise.skips import SkipCertificate, add_lambda_skip, certify_skip

NAMES = ("paper_guaranteed", "min_lambda_paper")


def attention(model: nn.Module, layer: int = 1) -> nn.Module:
    return model.encoder.layer[layer].attention


def weak_bert(by: float) -> nn.Module:
    """Return a BERT whose mixers add little, so that the theorem requires a small λ."""
    model = hugging_face("BertModel", **BERT)()
    for layer in range(3):
        attention(model, layer).output.dense.weight.data.mul_(by)
    return model


def numbers(certificate: SkipCertificate, layer: int = 1) -> list[float | None]:
    return [getattr(certificate.layers[layer], name) for name in NAMES]


@pytest.mark.parametrize(("by", "a"), [(1e-6, 0.9), (1e-6, 0.1), (1.0, 0.5)])
def test_a_guaranteed_layer_keeps_the_promised_spread(by: float, a: float) -> None:
    model = weak_bert(by)
    skips = add_lambda_skip(model)
    wanted = certify_skip(model, text_inputs(), a).layers[1]
    assert wanted.paper_guaranteed == (wanted.min_lambda_paper <= 1)
    for factor in (1.0001, -1.5, 0.999):
        skips[wanted.site].data.fill_(factor * wanted.min_lambda_paper)
        found = certify_skip(model, text_inputs(), a).layers[1]
        assert found.paper_guaranteed == (abs(factor) > 1)
        if found.paper_guaranteed:
            assert found.kept >= math.sqrt(a)


def test_eps_of_the_norm_requires_a_lambda_of_its_own() -> None:
    """A λ of the order of √ε would shorten all rows, although the mixer adds almost nothing."""
    model = weak_bert(1e-12)
    for layer in range(3):
        attention(model, layer).output.LayerNorm.eps = 1e-4
    skips = add_lambda_skip(model)
    layer = certify_skip(model, text_inputs()).layers[1]
    assert 0.01 * math.sqrt(0.5) / (1 - math.sqrt(0.5)) <= layer.min_lambda_paper < 1
    skips[layer.site].data.fill_(layer.min_lambda_paper)
    assert certify_skip(model, text_inputs()).layers[1].kept >= math.sqrt(0.5)


BROKEN: dict[str, tuple[Callable[[nn.Module], torch.Tensor], float, str]] = {
    "output bias": (lambda model: attention(model).output.dense.bias[:1], 50.0, "its output has a bias"),
    "value bias": (lambda model: attention(model).self.value.bias[3:4], 1e-3, "its values have a bias"),
    "gain": (lambda model: model.encoder.layer[0].output.LayerNorm.weight, 1.1, "do not lie on the sphere"),
    "shift": (lambda model: model.encoder.layer[0].output.LayerNorm.bias, 0.5, "do not lie on the sphere"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_numbers_are_none_if_a_hypothesis_is_broken(name: str) -> None:
    part, value, reason = BROKEN[name]
    model = weak_bert(1e-3)
    assert None not in numbers(certify_skip(model, text_inputs()))
    part(model).data.fill_(value)
    certificate = certify_skip(model, text_inputs())
    assert numbers(certificate) == [None] * len(NAMES)
    assert None not in numbers(certificate, layer=0)
    assert certificate.stacks[0].min_lambda_paper is None
    (note,) = [note for note in certificate.notes if note.startswith("the paper's theorem says nothing")]
    assert reason in note
    assert certificate.layers[1].value_norm is not None
    assert certificate.layers[1].min_lambda_any_mixing is not None


def test_an_output_bias_can_remove_nearly_all_spread() -> None:
    model = weak_bert(1e-3)
    attention(model).output.dense.bias.data.copy_(1e3 * torch.linspace(-1, 1, 32))
    layer = certify_skip(model, text_inputs()).layers[1]
    assert layer.kept < 0.01
    assert layer.paper_guaranteed is None
    assert layer.kept_lower_bound <= layer.kept


@pytest.mark.parametrize(("name", "settings"), [("GPT2Model", GPT), ("LlamaModel", LLAMA)])
def test_numbers_of_pre_norm_blocks_are_none(name: str, settings: dict[str, int]) -> None:
    model = hugging_face(name, **settings)()
    add_lambda_skip(model, init=0.1)
    certificate = certify_skip(model, text_inputs())
    assert all(numbers(certificate, layer) == [None] * len(NAMES) for layer in range(3))
    assert any("no norm reads the sum" in note for note in certificate.notes)


def test_numbers_are_none_if_the_mixer_reads_normalized_states() -> None:
    before, after = (nn.LayerNorm(8, elementwise_affine=False) for _ in range(2))
    block = Block(Attention(bias=False), before, after)
    x = nn.functional.layer_norm(3 * torch.randn(2, 5, 8), (8,))
    model = nn.Sequential(block, nn.Linear(8, 8)).eval()
    certificate = certify_skip(model, 1.001 * x)
    assert numbers(certificate, 0) == [None] * len(NAMES)
    assert any("reads something else than the state" in note for note in certificate.notes)
    block.before = nn.Identity()
    assert None not in numbers(certify_skip(model, x), 0)
