"""Value and output weights count only where what they give is what is added."""

import math

import pytest
import torch
from experiments.zoo.transformers import GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND
from torch import Tensor, nn

from rankwise.skips import add_lambda_skip, certify_skip

WIDTH = 8
llama = hugging_face("LlamaModel", **LLAMA)
NAMES = ("value_norm", "min_lambda_paper", "paper_guaranteed", "min_lambda_any_mixing")


class Attention(nn.Module):
    """One head, written out, with something behind its projection."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.behind = behind
        self.q, self.k, self.v, self.o, self.beside = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / math.sqrt(WIDTH)
        out = self.o(scores.softmax(-1) @ self.v(x))
        if self.behind == "gain":
            return 10 * out
        if self.behind == "gain in place":
            return out.mul_(10)
        if self.behind == "norm":
            return nn.functional.layer_norm(out, (WIDTH,))
        return out + torch.relu(self.beside(x)) if self.behind == "summand" else out


class Block(nn.Module):
    """x + attention(norm(x)), read by a linear map."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(WIDTH), Attention(behind), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.attention(self.norm(x)))


def block(behind: str) -> nn.Module:
    torch.manual_seed(0)
    return Block(behind).eval()


@pytest.mark.parametrize("behind", ["gain", "gain in place", "norm", "summand"])
def test_what_stands_behind_the_projection_takes_the_numbers_away(behind: str) -> None:
    certificate = certify_skip(block(behind), torch.randn(2, 5, WIDTH))
    assert all(getattr(certificate.layers[0], name) is None for name in NAMES)
    assert certificate.layers[0].mixing_norm is not None
    assert any("nothing between its output projection and the sum" in note for note in certificate.notes)


class Louder(nn.Linear):
    """Ten times what its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Turned(nn.Module):
    """A linear map whose weight has its inputs first."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(like.weight.detach().mT.clone()), like.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("name", ["v", "o"])
def test_a_linear_map_is_told_by_what_it_computes(name: str) -> None:
    """A promise of 1.6 for any mixing, of a projection taken for a tenth of what it is."""
    model, x = block(""), torch.randn(2, 5, WIDTH)
    plain = getattr(model.attention, name)
    wanted = certify_skip(model, x).layers[0]
    setattr(model.attention, name, Turned(plain))
    assert certify_skip(model, x).layers[0].value_norm == pytest.approx(wanted.value_norm)
    louder = Louder(WIDTH, WIDTH)
    louder.load_state_dict(plain.state_dict())
    setattr(model.attention, name, louder)
    assert all(getattr(certify_skip(model, x).layers[0], name) is None for name in NAMES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_dtypes_are_found(dtype: torch.dtype) -> None:
    model = block("").to(dtype)
    layer = certify_skip(model, torch.randn(2, 5, WIDTH, dtype=dtype)).layers[0]
    wanted = (model.attention.o.weight.double() @ model.attention.v.weight.double()).norm().item()
    assert layer.value_norm == pytest.approx(wanted)


@pytest.mark.parametrize("init", [1.0, 0.3, -2.0])
def test_with_nothing_there_they_are_given_at_any_scale(init: float) -> None:
    model, x = block(""), torch.randn(2, 5, WIDTH)
    add_lambda_skip(model, init=init, example=x)
    certificate = certify_skip(model, x)
    wanted = float((model.attention.o.weight @ model.attention.v.weight).norm())
    assert certificate.layers[0].value_norm == pytest.approx(wanted, rel=1e-5)
    assert certificate.layers[0].min_lambda_any_mixing is not None
    assert not any("any mixing" in note for note in certificate.notes)


@pytest.mark.parametrize("sharpness", [0.0, 3.0, -3.0, 30.0])
def test_any_mixing_is_any(sharpness: float) -> None:
    """λ for any mixing keeps √a whatever queries and keys are, the values as they were."""
    model, x = block(""), torch.randn(2, 5, WIDTH)
    with torch.no_grad():  # values that undo what tells tokens apart
        model.attention.v.weight.copy_(torch.eye(WIDTH))
        model.attention.o.weight.copy_(-3 * torch.eye(WIDTH))
    least = certify_skip(model, x, 0.9).layers[0].min_lambda_any_mixing
    assert least is not None
    with torch.no_grad():
        model.attention.q.weight.copy_(sharpness * torch.eye(WIDTH))
        model.attention.k.weight.copy_(torch.eye(WIDTH))
    skips = add_lambda_skip(model, example=x)
    with torch.no_grad():
        next(iter(skips.values())).fill_(least)
    assert certify_skip(model, x, 0.9).layers[0].kept >= math.sqrt(0.9)


@pytest.mark.parametrize("name", ["Gemma-2", "GPT-NeoX", "Falcon"])
def test_families_that_put_something_there(name: str) -> None:
    model, batch = FOUND[name][0]()
    for layer in certify_skip(model, batch).layers:
        assert all(getattr(layer, number) is None for number in NAMES)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_hide_the_weights(side: str) -> None:
    model, batch = llama(), text_inputs()
    with torch.no_grad():
        model.embed_tokens.weight[0] = 0  # as a padding token has it: all columns are the same there
    pads, ids = torch.zeros(2, 4, dtype=torch.long), batch["input_ids"]
    real, none = torch.ones_like(ids), torch.zeros_like(pads)
    order = (lambda one, other: [one, other]) if side == "left" else (lambda one, other: [other, one])
    padded = {
        "input_ids": torch.cat(order(pads, ids), 1),
        "attention_mask": torch.cat(order(none, real), 1),
    }
    for one, other in zip(certify_skip(model, padded).layers, certify_skip(model, batch).layers, strict=True):
        assert one.value_norm == pytest.approx(other.value_norm)
        assert one.min_lambda_any_mixing == pytest.approx(other.min_lambda_any_mixing, rel=1e-3)


def test_equal_columns_are_each_taken_once() -> None:
    """A head without values: its columns are all zero, its output weights are not."""
    model = hugging_face("GPT2Model", **GPT)()
    attention = model.h[0].attn
    with torch.no_grad():
        attention.c_attn.weight[:, 64:72] = attention.c_attn.bias[64:72] = 0
    values, out = attention.c_attn.weight[:, 64:], attention.c_proj.weight
    heads = [values[:, 8 * h : 8 * h + 8] @ out[8 * h : 8 * h + 8] for h in range(4)]
    wanted = math.sqrt(sum(float(head.detach().square().sum()) for head in heads))
    assert certify_skip(model, text_inputs()).layers[0].value_norm == pytest.approx(wanted, rel=1e-5)
