"""The numbers of the paper's theorem: only where it speaks, and true there."""

import math
from collections.abc import Callable

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from torch import Tensor, nn

from rankwise.skips import SkipCertificate, add_lambda_skip, certify_skip

bert = hugging_face("BertModel", **BERT)
NAMES = ("paper_guaranteed", "min_lambda_paper")


def attention(model: nn.Module, layer: int = 1) -> nn.Module:
    return model.encoder.layer[layer].attention


def weak(model: nn.Module, by: float) -> nn.Module:
    """With little to add, so that the theorem asks for little."""
    with torch.no_grad():
        for layer in range(3):
            attention(model, layer).output.dense.weight.mul_(by)
    return model


def numbers(certificate: SkipCertificate, layer: int = 1) -> list[float | None]:
    return [getattr(certificate.layers[layer], name) for name in NAMES]


@pytest.mark.parametrize(("by", "a"), [(1e-6, 0.9), (1e-6, 0.1), (1.0, 0.5)])
def test_where_the_theorem_speaks_it_is_kept(by: float, a: float) -> None:
    model = weak(bert(), by)
    skips = add_lambda_skip(model)
    wanted = certify_skip(model, text_inputs(), a).layers[1]
    assert wanted.paper_guaranteed == (wanted.min_lambda_paper <= 1)
    for factor in (1.0001, -1.5, 0.999):
        with torch.no_grad():
            skips[wanted.site].fill_(factor * wanted.min_lambda_paper)
        found = certify_skip(model, text_inputs(), a).layers[1]
        assert found.paper_guaranteed == (abs(factor) > 1)
        if found.paper_guaranteed:
            assert found.kept >= math.sqrt(a)


def test_eps_asks_for_a_scale_of_its_own() -> None:
    """A mixer that gives next to nothing: a λ of the size of √ε would shorten all rows."""
    model = weak(bert(), 1e-12)
    for layer in range(3):
        attention(model, layer).output.LayerNorm.eps = 1e-4
    skips = add_lambda_skip(model)
    layer = certify_skip(model, text_inputs()).layers[1]
    assert 0.01 * math.sqrt(0.5) / (1 - math.sqrt(0.5)) <= layer.min_lambda_paper < 1
    with torch.no_grad():
        skips[layer.site].fill_(layer.min_lambda_paper)
    assert certify_skip(model, text_inputs()).layers[1].kept >= math.sqrt(0.5)


def _output_bias(model: nn.Module) -> None:
    attention(model).output.dense.bias[0] = 50.0


def _value_bias(model: nn.Module) -> None:
    attention(model).self.value.bias[3] = 1e-3


def _gain(model: nn.Module) -> None:
    model.encoder.layer[0].output.LayerNorm.weight[:] = 1.1


def _shift(model: nn.Module) -> None:
    model.encoder.layer[0].output.LayerNorm.bias[:] = 0.5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_output_bias, "its output has a bias"),
        (_value_bias, "its values have a bias"),
        (_gain, "do not lie on the sphere"),
        (_shift, "do not lie on the sphere"),
    ],
)
def test_bert_with_what_the_theorem_has_not(change: Callable[[nn.Module], None], why: str) -> None:
    """With an output bias all tokens turn towards it: 0.005 of μ was kept where √½ was promised."""
    model = weak(bert(), 1e-3)
    assert None not in numbers(certify_skip(model, text_inputs()))
    with torch.no_grad():
        change(model)
    certificate = certify_skip(model, text_inputs())
    assert numbers(certificate) == [None] * len(NAMES)
    assert None not in numbers(certificate, layer=0)
    assert certificate.stacks[0].min_lambda_paper is None
    (note,) = [note for note in certificate.notes if note.startswith("the paper's theorem says nothing")]
    assert why in note
    assert certificate.layers[1].value_norm is not None
    assert certificate.layers[1].min_lambda_any_mixing is not None


def test_the_output_bias_that_takes_all() -> None:
    model = weak(bert(), 1e-3)
    with torch.no_grad():
        attention(model).output.dense.bias.copy_(1e3 * torch.linspace(-1, 1, 32))
    layer = certify_skip(model, text_inputs()).layers[1]
    assert layer.kept < 0.01
    assert layer.paper_guaranteed is None
    assert layer.kept_lower_bound <= layer.kept


@pytest.mark.parametrize("name", ["GPT2Model", "LlamaModel"])
def test_pre_norm_blocks_have_none(name: str) -> None:
    model = hugging_face(name, **(GPT if name == "GPT2Model" else LLAMA))()
    skips = add_lambda_skip(model, init=0.1)
    for parameter in skips.values():
        assert parameter.numel() == 1
    certificate = certify_skip(model, text_inputs())
    assert all(numbers(certificate, layer) == [None] * len(NAMES) for layer in range(3))
    assert any("no norm reads the sum" in note for note in certificate.notes)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))


class Sandwich(nn.Module):
    """A norm before the mixer and one behind the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head, self.reads_norm = Attention(), nn.Linear(8, 8), True
        self.before, self.after = (nn.LayerNorm(8, elementwise_affine=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(x + self.attention(self.before(x) if self.reads_norm else x)))


def test_a_post_norm_block_that_reads_a_norm_of_its_state_has_none() -> None:
    torch.manual_seed(0)
    model, x = Sandwich().eval(), nn.functional.layer_norm(3 * torch.randn(2, 5, 8), (8,))
    certificate = certify_skip(model, 1.001 * x)
    assert numbers(certificate, 0) == [None] * len(NAMES)
    assert any("reads something else than the state" in note for note in certificate.notes)
    model.reads_norm = False
    assert None not in numbers(certify_skip(model, x), 0)
