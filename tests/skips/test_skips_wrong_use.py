"""What is refused, in which words; and names, channels and other arguments."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from experiments.zoo.transformers import BERT, hugging_face, text_inputs
from tests.skips.cases import FOUND, outputs, same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rankwise.skips import (
    SkipError,
    add,
    add_lambda_skip,
    certify_skip,
    load_skips,
    remove_lambda_skip,
    save_skips,
    skips_of,
)

bert = hugging_face("BertModel", **BERT)
SITES = [f"encoder.layer.{layer}.attention.output" for layer in range(3)]


def test_sites_are_modules_and_can_be_read() -> None:
    model = bert()
    skips = add_lambda_skip(model, init=2.0)
    assert list(skips) == SITES
    assert skips[SITES[0]] is model.encoder.layer[0].attention.output.lambda_skip
    assert "encoder.layer.0.attention.output: 2" in repr(skips)
    assert all(parameter.requires_grad for parameter in skips.values())


@pytest.mark.parametrize(
    ("sites", "wanted"),
    [
        ("encoder.layer.1", [1]),
        ("encoder.layer.[12]", [1, 2]),
        (["encoder.layer.0.attention.output", "encoder.layer.2"], [0, 2]),
        ("encoder", [0, 1, 2]),
        ("encoder.*.*.attention.output", [0, 1, 2]),
    ],
)
def test_sites_by_name(sites: Any, wanted: list[int]) -> None:
    assert list(add_lambda_skip(bert(), sites=sites)) == [SITES[at] for at in wanted]


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_one_number_for_each_channel(name: str) -> None:
    model, batch = FOUND[name][0]()
    before = outputs(model, batch)
    skips = add_lambda_skip(model, per="channel", example=batch)
    assert {tuple(parameter.shape) for parameter in skips.values()} == {(32,)}
    assert same(outputs(model, batch), before)
    one = next(iter(skips.values()))
    with torch.no_grad():
        one[3] = 2.0
    assert not same(outputs(model, batch), before)


def test_fixed_skips_do_not_learn() -> None:
    skips = add_lambda_skip(bert(), learnable=False)
    assert not any(parameter.requires_grad for parameter in skips.values())


def test_no_skip_is_said_loudly() -> None:
    with pytest.warns(UserWarning, match="λ = 0 removes the skip connections"):
        skips = add_lambda_skip(bert(), init=0)
    assert next(iter(skips.values())).item() == 0


@pytest.mark.parametrize("init", [math.nan, math.inf, -math.inf])
def test_scales_that_are_none(init: Any) -> None:
    model = bert()
    with pytest.raises(SkipError, match=r"`init`: expected a finite number"):
        add_lambda_skip(model, init=init)
    assert not skips_of(model)


@pytest.mark.parametrize(
    "init", [np.float32(2), np.int64(2), Fraction(2)], ids=["float32", "int64", "Fraction"]
)
def test_scales_of_other_numeric_types(init: Any) -> None:
    assert {parameter.item() for parameter in add_lambda_skip(bert(), init=init).values()} == {2.0}


def test_names_that_match_nothing() -> None:
    model = bert()
    with pytest.raises(SkipError, match=r"site 'encoder.layer.7'.*Did you mean encoder.layer.\d"):
        add_lambda_skip(model, sites=["encoder.layer.0", "encoder.layer.7"])
    with pytest.raises(SkipError, match="expected the name of a residual mixer"):
        add_lambda_skip(model, sites=[])
    assert not skips_of(model)
    assert "lambda_skip" not in "".join(model.state_dict())


def test_twice() -> None:
    model = bert()
    add_lambda_skip(model)
    with pytest.raises(SkipError, match=r"expected a model without λ-skips, got one with 3"):
        add_lambda_skip(model)
    assert len(skips_of(model)) == 3


def test_a_second_call_adds_the_other_sites_and_keeps_what_is_there() -> None:
    model = bert()
    first = add_lambda_skip(model, init=0.5, learnable=False, sites=SITES[1])[SITES[1]]
    with pytest.raises(SkipError, match="expected a model without λ-skips at these sites, got one with 1"):
        add_lambda_skip(model, sites=SITES[1])
    with pytest.raises(SkipError, match="`per='channel'`: expected the kind of λ that the model has"):
        add_lambda_skip(model, per="channel")
    with pytest.raises(SkipError, match="site 'nowhere'"):
        add_lambda_skip(model, sites="nowhere")
    assert add_lambda_skip(model, sites=SITES[1], exist_ok=True)[SITES[1]] is first
    skips = add_lambda_skip(model, init=2.0)
    assert [(name, value.item(), value.requires_grad) for name, value in skips.items()] == [
        (SITES[0], 2.0, True), (SITES[1], 0.5, False), (SITES[2], 2.0, True)
    ]  # fmt: skip
    assert skips[SITES[1]] is first
    fresh = bert()
    with torch.no_grad():
        for value, init in zip(add_lambda_skip(fresh).values(), (2.0, 0.5, 2.0), strict=True):
            value.fill_(init)
    assert same(outputs(model, text_inputs()), outputs(fresh, text_inputs()))


@pytest.mark.parametrize("there", [0, 1])
def test_an_interrupt_undoes_what_was_added(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    if there:
        add_lambda_skip(model, init=0.5, sites=SITES[0])
    before, hooks = outputs(model, text_inputs()), hook_names(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(add, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        add_lambda_skip(model, init=2.0)
    assert len(skips_of(model)) == there
    assert hook_names(model) == hooks
    assert same(outputs(model, text_inputs()), before)


def hook_names(model: nn.Module) -> list[str]:
    hooks = [
        (*module._forward_pre_hooks.values(), *module._forward_hooks.values()) for module in model.modules()
    ]
    return [type(hook).__name__ for several in hooks for hook in several]


class Shared(nn.Module):
    """One mixer in two residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mix = nn.LayerNorm(8), nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True)
        self.scales = (1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        for norm, scale in zip((self.first, self.second), self.scales, strict=True):
            x = (x if scale == 1 else scale * x) + self.mix(norm(x))[0]
        return x


def test_a_module_of_two_sites_has_two_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(2, 5, 8)
    skips = add_lambda_skip(model, example=x)
    assert list(skips) == ["mix", "mix_2"]
    assert [name for name, _ in model.named_parameters() if "lambda" in name] == [
        "mix.lambda_skip",
        "mix.lambda_skip_2",
    ]
    with torch.no_grad():
        skips["mix"].fill_(2.0)
        skips["mix_2"].fill_(-3.0)
    got = model(x)
    save_skips(model, tmp_path)
    remove_lambda_skip(model)
    model.scales = (2.0, -3.0)
    torch.testing.assert_close(got, model(x))
    model.scales = (1.0, 1.0)
    load_skips(model, tmp_path, example=x)
    assert torch.equal(model(x), got)


def test_nothing_to_remove() -> None:
    with pytest.raises(SkipError, match="expected a model with λ-skips, got one without"):
        remove_lambda_skip(bert())


class Plain(nn.Module):
    """Attention without a residual, and a residual without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.think = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x, x, x)[0]
        return x + self.think(x)


def test_a_model_without_residual_mixers() -> None:
    with pytest.raises(SkipError, match=r"expected residual connections around mixers, got none"):
        add_lambda_skip(Plain(), example=torch.randn(1, 4, 8))


def test_one_token_shows_no_mixing() -> None:
    model, _ = FOUND["nanoGPT style"][0]()
    with pytest.raises(SkipError, match="its example have two tokens or more"):
        add_lambda_skip(model, example={"input_ids": torch.tensor([[3]])})


def test_a_model_that_does_not_say_what_it_reads() -> None:
    with pytest.raises(SkipError, match=r"expected an example of its input.*example=batch"):
        add_lambda_skip(Plain())


def test_what_is_compiled_already() -> None:
    with pytest.raises(SkipError, match="expected a module that is not compiled or wrapped yet"):
        add_lambda_skip(torch.compile(bert(), backend="eager"))


def test_what_is_wrapped_already() -> None:
    """A reducer that was built before λ would not synchronise it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrapped in (nn.parallel.DistributedDataParallel(bert()), nn.DataParallel(bert())):
            with pytest.raises(SkipError, match="got one wrapped by"):
                add_lambda_skip(wrapped, example=text_inputs())
            assert not skips_of(wrapped)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ask", [add_lambda_skip, certify_skip])
def test_weights_on_a_mesh_be_it_of_one_process(ask: Any) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, mesh = bert(), init_device_mesh("cpu", (1,))
        plan = {"encoder.layer.0.attention.self.query": ColwiseParallel()}
        parallelize_module(model, mesh, plan)
        with pytest.raises(
            SkipError, match=r"DTensor weights, such as 'encoder.layer.0.attention.self.query"
        ):
            ask(model, text_inputs()) if ask is certify_skip else ask(model)
    finally:
        dist.destroy_process_group()


def test_inference_mode() -> None:
    model = bert()
    with torch.inference_mode(), pytest.raises(SkipError, match=r"outside of torch.inference_mode\(\)"):
        add_lambda_skip(model)
    with torch.inference_mode():
        frozen = bert()
    with pytest.raises(SkipError, match=r"parameters made in it"):
        add_lambda_skip(frozen)
    with torch.no_grad():
        assert len(add_lambda_skip(model)) == 3


def spoiled(name: str, module: str, by: float, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = FOUND[name][0]()
    model.to(dtype)
    with torch.no_grad():
        model.get_submodule(module).weight.mul_(by)
    return model, batch


@pytest.mark.parametrize(
    ("name", "module", "by", "dtype"),
    [
        ("Llama", "embed_tokens", math.nan, torch.float32),
        ("Llama", "layers.1.self_attn.o_proj", math.nan, torch.float32),
        ("GPT-2", "ln_f", math.nan, torch.float32),
        ("Llama", "layers.0.mlp.down_proj", 3e5, torch.float16),
    ],
    ids=["embedding", "attention", "last norm", "overflow"],
)
def test_numbers_that_are_not_finite_tell_nothing(
    name: str, module: str, by: float, dtype: torch.dtype
) -> None:
    model, batch = spoiled(name, module, by, dtype)
    with pytest.raises(SkipError, match=r"expected finite numbers.*got NaN or infinity in"):
        add_lambda_skip(model, example=batch)
    assert not skips_of(model)
    add_lambda_skip(FOUND[name][0]()[0].to(dtype), example=batch)


class Masked(nn.Module):
    """Gives −∞ where an answer is not allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x, x, x, need_weights=False)[0]
        return torch.cat((total, torch.full_like(total, -math.inf)), -1)


def test_outputs_may_be_masked_by_infinity() -> None:
    assert len(add_lambda_skip(Masked(), example=torch.randn(1, 5, 8))) == 1


class Unusual(nn.Module):
    """Uses what its mixer gives twice: a correction there would be counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x.mT).mT
        branch = self.out(y)
        total = x + branch
        return torch.tanh(total) * torch.tanh(branch)


def test_what_hooks_cannot_follow_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Unusual(), torch.randn(2, 5, 8)
    before = model(x)
    with pytest.raises(SkipError, match=r"expected the scaled residual sums at λ ≠ 1"):
        add_lambda_skip(model, example=x)
    assert torch.equal(model(x), before)
    assert not skips_of(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_of_others_stay() -> None:
    model, seen = bert(), []
    model.encoder.layer[0].attention.output.register_forward_hook(lambda *given: seen.append("out"))
    model.encoder.layer[0].attention.output.register_forward_pre_hook(lambda *given: seen.append("in"))
    add_lambda_skip(model)
    remove_lambda_skip(model)
    seen.clear()
    model(**text_inputs())
    assert seen == ["in", "out"]


class InPlace(nn.Module):
    """A residual stream that is one tensor, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.think = nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x += self.mix(self.norm(x))[0]
        x += self.think(x.tanh())
        return x


def test_a_stream_changed_in_place_is_refused_and_left_alone() -> None:
    """Its earlier states are gone: no derivative tells what f mixes."""
    torch.manual_seed(0)
    model, x = InPlace().eval(), torch.randn(2, 5, 8)
    before = model(x)
    with pytest.raises(SkipError, match=r"no sum x \+ f\(x\) in which f mixes tokens"):
        add_lambda_skip(model, example=x)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("init", [1e39, -1e39, 10**400])
def test_a_scale_that_float32_does_not_hold_changes_nothing(init: float) -> None:
    model = bert()
    with pytest.raises(SkipError, match="float32"):
        add_lambda_skip(model, init=init)
    assert not skips_of(model)


def test_a_scale_that_float32_takes_for_zero_is_one() -> None:
    with pytest.warns(UserWarning, match="λ = 0"):
        add_lambda_skip(bert(), init=1e-50)
