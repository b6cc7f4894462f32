"""λ-skips where models are used: generation, mixed precision, compilation, checkpointing, DDP."""

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND, outputs, same
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from rankwise.skips import SkipError, Skips, add_lambda_skip, remove_lambda_skip, skips_of

LANGUAGE = {
    "BERT": hugging_face("BertForMaskedLM", "BertConfig", **BERT),
    "GPT-2": hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT),
    "Llama": hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA),
}
families = pytest.mark.parametrize("name", LANGUAGE)


def with_skips(name: str, value: float = 0.8) -> tuple[nn.Module, Skips]:
    model = LANGUAGE[name]()
    return model, filled(add_lambda_skip(model), value)


def filled(skips: Skips, value: float) -> Skips:
    with torch.no_grad():
        for parameter in skips.values():
            parameter.fill_(value)
    return skips


def gradients(model: nn.Module, run: Callable[..., object] | None = None) -> list[Tensor]:
    model.zero_grad()
    (model if run is None else run)(**text_inputs()).logits.square().mean().backward()
    return [parameter.grad.clone() for parameter in skips_of(model).values()]


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_generation_with_a_cache_is_generation_without(name: str) -> None:
    model, _ = with_skips(name)
    cached, plain = (
        model.generate(**text_inputs(), max_new_tokens=5, do_sample=False, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, plain)
    other = LANGUAGE[name]().generate(**text_inputs(), max_new_tokens=5, do_sample=False)
    assert not torch.equal(cached, other)  # λ does act


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_exactly_nothing_in_other_precisions(name: str, dtype: torch.dtype) -> None:
    model = LANGUAGE[name]().to(dtype)
    before = outputs(model, text_inputs())
    skips = add_lambda_skip(model)
    assert same(outputs(model, text_inputs()), before)
    wide = torch.promote_types(dtype, torch.float32)
    assert {parameter.dtype for parameter in skips.values()} == {wide}


@families
def test_exactly_nothing_under_autocast(name: str) -> None:
    model = LANGUAGE[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = outputs(model, text_inputs())
        add_lambda_skip(model)
        assert same(outputs(model, text_inputs()), before)


@families
def test_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, _ = with_skips(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    for one, other in zip(plain, gradients(model), strict=True):
        assert torch.allclose(one, other, rtol=1e-4)  # the same sums in float32, perhaps in another order


@families
def test_compiles_whole(name: str) -> None:
    torch._dynamo.reset()
    model, _ = with_skips(name)
    eager = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(model, compiled), eager, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_compiles_whole_without_gradients() -> None:
    torch._dynamo.reset()
    model, _ = with_skips("GPT-2")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(outputs(compiled, text_inputs()), outputs(model, text_inputs()), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_trains_under_data_parallel_of_one_process() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, skips = with_skips("GPT-2")
        alone = gradients(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for one, other in zip(gradients(model, wrapped), alone, strict=True):
            assert torch.allclose(one, other, rtol=1e-5)
        before = {name: parameter.item() for name, parameter in skips.items()}
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(parameter.item() != before[name] for name, parameter in skips.items())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_dropout_acts_on_the_branch_alone(name: str) -> None:
    """With the whole of the branches dropped, and no norm, three blocks make of x just λ³·x."""
    model, batch = FOUND[name][0]()
    skips = filled(add_lambda_skip(model), 3.0)
    blocks = next(iter(skips.sites.values())).block.rpartition(".")[0]
    given: list[Tensor] = []
    model.get_submodule(blocks)[0].register_forward_pre_hook(lambda module, args: given.append(args[0]))
    model.get_submodule(blocks)[-1].register_forward_hook(lambda module, args, out: given.append(out))
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0
    for name_, module in model.named_modules():  # or nothing would reach the blocks
        if "embed" in name_ or name_ == "drop":
            module.eval()
    model(**batch)
    last = given[1][0] if isinstance(given[1], tuple) else given[1]
    assert given[0].abs().max() > 0
    assert torch.allclose(last, 27 * given[0], rtol=1e-5, atol=1e-5)


def test_functional_dropout_is_told() -> None:
    model, batch = FOUND["OPT"][0]()
    skips = add_lambda_skip(model, example=batch)
    assert any("in training, the dropout after decoder.layers.0.self_attn" in note for note in skips.notes)


def test_state_dict_and_device_moves_see_the_skips() -> None:
    model, skips = with_skips("GPT-2", 0.3)
    keys = [key for key in model.state_dict() if key.endswith("lambda_skip")]
    assert len(keys) == len(skips) == 3
    model.to(torch.float64)
    assert {parameter.dtype for parameter in skips.values()} == {torch.float64}
    other, others = with_skips("GPT-2", 1.0)
    other.load_state_dict(model.state_dict())
    assert all(math.isclose(parameter.item(), 0.3, rel_tol=1e-6) for parameter in others.values())


def test_training_mode_gradients_and_seed_are_left_alone() -> None:
    model = LANGUAGE["GPT-2"]().train()
    model.transformer.h[1].eval()
    frozen = next(model.parameters()).requires_grad_(False)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    add_lambda_skip(model)
    assert torch.equal(torch.rand(3), wanted)
    assert model.training
    assert not model.transformer.h[1].training
    assert not frozen.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    remove_lambda_skip(model)


class SeveralForms(nn.Module):
    """Causal mixer whose output is a tensor, a tuple or an output of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor, form: str) -> Any:
        y = self.map(x).tanh().cumsum(1)
        return {"tensor": y, "tuple": (y, x), "output": BaseModelOutput(last_hidden_state=y)}[form]


class SeveralFormsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(8), SeveralForms(), nn.Linear(8, 8)
        self.skip = 1.0

    def forward(self, x: Tensor, form: str) -> Tensor:
        mixed = self.mixer(self.norm(x), form)
        mixed = mixed if form == "tensor" else mixed[0]
        return self.out(x + mixed if self.skip == 1 else self.skip * x + mixed)


@pytest.mark.parametrize(
    ("example", "forms"),
    [
        ("tensor", ["tensor", "tuple", "output"]),  # such as a tensor without a cache, and a tuple with one
        ("tuple", ["tensor", "tuple", "output"]),
        ("output", ["output"]),
    ],
)
def test_a_mixer_may_return_another_form_of_output_than_for_the_example(
    example: str, forms: list[str]
) -> None:
    model, x = SeveralFormsBlock().eval(), torch.randn(2, 5, 8)
    before = [model(x, form) for form in forms]
    skips = add_lambda_skip(model, example=(x, example))
    assert list(skips) == ["mixer"]
    assert same([model(x, form) for form in forms], before)
    filled(skips, 0.5)
    got = [model(x, form) for form in forms]
    remove_lambda_skip(model)
    model.skip = 0.5
    torch.testing.assert_close(got, [model(x, form) for form in forms])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def padded() -> dict[str, Tensor]:
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return {"src": torch.randn(2, 5, 8), "src_key_padding_mask": mask}


def test_padded_rows_that_torch_makes_a_nested_tensor_of() -> None:
    model, batch = encoder(), padded()
    skips = add_lambda_skip(model, example=batch)
    filled(skips, 0.5)
    wanted = model(**batch)  # with gradients torch takes the plain way
    with torch.no_grad():
        got = model(**batch)
    real = ~batch["src_key_padding_mask"]
    torch.testing.assert_close(got[real], wanted[real])


def test_nested_tensors_have_no_skips_by_channel() -> None:
    model, batch = encoder(), padded()
    add_lambda_skip(model, per="channel", example=batch)
    with torch.no_grad(), pytest.raises(SkipError, match="enable_nested_tensor=False"):
        model(**batch)
