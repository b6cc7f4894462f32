"""Certificates use value and output weights if their output is the branch, and the theorem if it applies."""

import math
from collections.abc import Callable

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND
from tests.support.modules import Attention, Block
from torch import Tensor, nn

from rankwise.skips import LayerCertificate, SkipCertificate, add_lambda_skip, certify_skip

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
PAPER = ("paper_guaranteed", "min_lambda_paper")
NAMES = ("value_norm", "min_lambda_any_mixing", *PAPER)


class ChangedAttention(Attention):
    """Attention with a function of (input, output) after its output projection."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(WIDTH)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x, super().forward(x))


def block(after: Callable[[Tensor, Tensor], Tensor] = lambda _, y: y) -> nn.Module:
    """Return x + attention(norm(x)) and a linear map of the sum."""
    torch.manual_seed(0)
    attention = ChangedAttention(after)
    return nn.Sequential(Block(attention, before=nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WIDTH)).eval()


def layer_of(model: nn.Module, a: float = 0.5) -> LayerCertificate:
    return certify_skip(model, X, a).layers[0]


def has_none(layer: LayerCertificate) -> bool:
    return all(getattr(layer, name) is None for name in NAMES)


AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gain": lambda _, y: 10 * y,
    "gain in place": lambda _, y: y.mul_(10),
    "norm": lambda _, y: nn.functional.layer_norm(y, (WIDTH,)),
    "summand": lambda x, y: y + torch.relu(x),
}


@pytest.mark.parametrize("name", AFTER)
def test_weights_are_not_used_if_the_projection_is_not_the_branch(name: str) -> None:
    certificate = certify_skip(block(AFTER[name]), X)
    assert has_none(certificate.layers[0])
    assert certificate.layers[0].mixing_norm is not None
    assert any("nothing between its output projection and the sum" in note for note in certificate.notes)


@pytest.mark.parametrize("name", ["Gemma-2", "GPT-NeoX", "Falcon"])
def test_weights_are_not_used_in_families_that_change_the_branch(name: str) -> None:
    model, batch = FOUND[name][0]()
    assert all(has_none(layer) for layer in certify_skip(model, batch).layers)


class Louder(nn.Linear):
    """Multiply the output of a linear layer by 10."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Transposed(nn.Module):
    """Linear map with its input axis first."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(like.weight.detach().mT.clone()), like.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("name", ["v", "o"])
def test_a_linear_map_is_recognized_by_its_output(name: str) -> None:
    model = block()
    attention = model[0].mixer
    plain, wanted = getattr(attention, name), layer_of(model)
    setattr(attention, name, Transposed(plain))
    assert layer_of(model).value_norm == pytest.approx(wanted.value_norm)
    louder = Louder(WIDTH, WIDTH)
    louder.load_state_dict(plain.state_dict())
    setattr(attention, name, louder)
    assert has_none(layer_of(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_dtypes_are_found(dtype: torch.dtype) -> None:
    model = block().to(dtype)
    wanted = (model[0].mixer.o.weight.double() @ model[0].mixer.v.weight.double()).norm().item()
    assert certify_skip(model, X.to(dtype)).layers[0].value_norm == pytest.approx(wanted)


@pytest.mark.parametrize("init", [1.0, 0.3, -2.0])
def test_weights_are_found_at_any_lambda(init: float) -> None:
    model = block()
    add_lambda_skip(model, init=init, example=X)
    certificate = certify_skip(model, X)
    wanted = float((model[0].mixer.o.weight @ model[0].mixer.v.weight).norm())
    assert certificate.layers[0].value_norm == pytest.approx(wanted, rel=1e-5)
    assert certificate.layers[0].min_lambda_any_mixing is not None
    assert not any("any mixing" in note for note in certificate.notes)


@pytest.mark.parametrize("sharpness", [0.0, 3.0, -3.0, 30.0])
def test_the_lambda_for_any_mixing_holds_for_any_queries_and_keys(sharpness: float) -> None:
    model = block()
    attention, eye = model[0].mixer, torch.eye(WIDTH)
    attention.v.weight.data.copy_(eye)
    attention.o.weight.data.copy_(-3 * eye)  # the branch cancels differences of tokens
    least = layer_of(model, 0.9).min_lambda_any_mixing
    attention.q.weight.data.copy_(sharpness * eye)
    attention.k.weight.data.copy_(eye)
    (skip,) = add_lambda_skip(model, example=X).values()
    skip.data.fill_(least)
    assert layer_of(model, 0.9).kept >= math.sqrt(0.9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_hide_the_weights(side: str) -> None:
    model, batch = hugging_face("LlamaModel", **LLAMA)(), text_inputs()
    model.embed_tokens.weight.data[0] = 0  # the embedding of padding: all columns are equal there
    pads, ids = torch.zeros(2, 4, dtype=torch.long), batch["input_ids"]
    order = slice(None, None, 1 if side == "left" else -1)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)][order], 1)
    padded = {"input_ids": torch.cat([pads, ids][order], 1), "attention_mask": mask}
    for one, other in zip(certify_skip(model, padded).layers, certify_skip(model, batch).layers, strict=True):
        assert one.value_norm == pytest.approx(other.value_norm)
        assert one.min_lambda_any_mixing == pytest.approx(other.min_lambda_any_mixing, rel=1e-3)


def test_equal_columns_are_each_counted_once() -> None:
    """The columns of a head without values are all zero, but its output weights are not."""
    model = hugging_face("GPT2Model", **GPT)()
    attention = model.h[0].attn
    with torch.no_grad():
        attention.c_attn.weight[:, 64:72] = attention.c_attn.bias[64:72] = 0
    values, out = attention.c_attn.weight[:, 64:], attention.c_proj.weight
    heads = [values[:, 8 * h : 8 * h + 8] @ out[8 * h : 8 * h + 8] for h in range(4)]
    wanted = math.sqrt(sum(float(head.detach().square().sum()) for head in heads))
    assert certify_skip(model, text_inputs()).layers[0].value_norm == pytest.approx(wanted, rel=1e-5)


# --- the paper's theorem ---------------------------------------------------------------------------------


def attention(model: nn.Module, layer: int = 1) -> nn.Module:
    return model.encoder.layer[layer].attention


def weak_bert(by: float) -> nn.Module:
    """Return a BERT whose mixers add little, so that the theorem requires a small λ."""
    model = hugging_face("BertModel", **BERT)()
    for layer in range(3):
        attention(model, layer).output.dense.weight.data.mul_(by)
    return model


def numbers(certificate: SkipCertificate, layer: int = 1) -> list[float | None]:
    return [getattr(certificate.layers[layer], name) for name in PAPER]


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
def test_the_theorem_is_not_applied_if_a_hypothesis_is_broken(name: str) -> None:
    part, value, reason = BROKEN[name]
    model = weak_bert(1e-3)
    assert None not in numbers(certify_skip(model, text_inputs()))
    part(model).data.fill_(value)
    certificate = certify_skip(model, text_inputs())
    assert numbers(certificate) == [None] * len(PAPER)
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
def test_the_theorem_is_not_applied_to_pre_norm_blocks(name: str, settings: dict[str, int]) -> None:
    model = hugging_face(name, **settings)()
    add_lambda_skip(model, init=0.1)
    certificate = certify_skip(model, text_inputs())
    assert all(numbers(certificate, layer) == [None] * len(PAPER) for layer in range(3))
    assert any("no norm reads the sum" in note for note in certificate.notes)


def test_the_theorem_is_not_applied_if_the_mixer_reads_normalized_states() -> None:
    before, after = (nn.LayerNorm(8, elementwise_affine=False) for _ in range(2))
    block = Block(Attention(bias=False), before, after)
    x = nn.functional.layer_norm(3 * torch.randn(2, 5, 8), (8,))
    model = nn.Sequential(block, nn.Linear(8, 8)).eval()
    certificate = certify_skip(model, 1.001 * x)
    assert numbers(certificate, 0) == [None] * len(PAPER)
    assert any("reads something else than the state" in note for note in certificate.notes)
    block.before = nn.Identity()
    assert None not in numbers(certify_skip(model, x), 0)
