"""Arguments and models that `add_lambda_skip` refuses; names of sites, values of λ and repeated calls."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experiments.zoo.transformers import BERT, hugging_face, text_inputs
from tests.skips.cases import FOUND, outputs, same
from tests.support.modules import SelfAttention
from tests.support.torch_names import hooks_of
from tests.support.untouched import untouched
from tests.unchecked import unchecked
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel

from rankwise.errors import InputError
from rankwise.models import ToSTConfig, ToSTModel
from rankwise.skips import (
    SkipError,
    add,
    add_lambda_skip,
    certify_skip,
    choose_lambda,
    load_skips,
    remove_lambda_skip,
    save_skips,
    skips_of,
)

bert = hugging_face("BertModel", **BERT)
CPU = torch.device("cpu")
SITES = [f"encoder.layer.{layer}.attention.output.dropout" for layer in range(3)]
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


# --- names, values and repeated calls --------------------------------------------------------------------


def test_sites_are_modules_and_their_parameters_can_be_read() -> None:
    model = bert()
    skips = add_lambda_skip(model, init=2.0)
    assert list(skips) == SITES
    assert skips[SITES[0]] is model.encoder.layer[0].attention.output.dropout.lambda_skip
    assert f"{SITES[0]}: 2" in repr(skips)
    assert all(parameter.requires_grad for parameter in skips.values())
    assert not any(one.requires_grad for one in add_lambda_skip(bert(), learnable=False).values())


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
def test_sites_are_chosen_by_name(sites: Any, wanted: list[int]) -> None:
    assert list(add_lambda_skip(bert(), sites=sites)) == [SITES[at] for at in wanted]


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_each_channel_can_have_its_own_lambda(name: str) -> None:
    model, batch = FOUND[name][0]()
    before = outputs(model, batch)
    skips = add_lambda_skip(model, per="channel", example=batch)
    assert {tuple(parameter.shape) for parameter in skips.values()} == {(32,)}
    assert same(outputs(model, batch), before)
    with torch.no_grad():
        next(iter(skips.values()))[3] = 2.0
    assert not same(outputs(model, batch), before)


@pytest.mark.parametrize("init", [0, 1e-50])
def test_a_lambda_of_0_in_float32_warns(init: float) -> None:
    with pytest.warns(UserWarning, match="λ = 0 removes the skip connections"):
        skips = add_lambda_skip(bert(), init=init)
    assert next(iter(skips.values())).item() == 0


def test_a_second_call_adds_other_sites_and_keeps_existing_skips() -> None:
    model = bert()
    first = add_lambda_skip(model, init=0.5, learnable=False, sites=SITES[1])[SITES[1]]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"sites": SITES[1]}, "expected a model without λ-skips at these sites, got one with 1"),
        ({"per": "channel"}, "`per='channel'`: expected the kind of λ that the model has"),
        ({"sites": "nowhere"}, "site 'nowhere'"),
    ]
    for arguments, message in refused:
        with pytest.raises(SkipError, match=message):
            add_lambda_skip(model, **arguments)
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


@pytest.mark.parametrize("existing", [0, 1])
def test_an_interrupted_call_undoes_its_changes(existing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    if existing:
        add_lambda_skip(model, init=0.5, sites=SITES[0])
    before, hooks = outputs(model, text_inputs()), hook_names(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(add, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        add_lambda_skip(model, init=2.0)
    assert (len(skips_of(model)), hook_names(model)) == (existing, hooks)
    assert same(outputs(model, text_inputs()), before)


def hook_names(model: nn.Module) -> list[str]:
    return [type(hook).__name__ for hook in hooks_of(model)]


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


def test_a_module_with_two_sites_has_two_parameters(tmp_path: Path) -> None:
    model = Shared().eval()
    skips = add_lambda_skip(model, example=X)
    assert list(skips) == ["mix", "mix_2"]
    assert [name for name, _ in model.named_parameters() if "lambda" in name] == [
        "mix.lambda_skip", "mix.lambda_skip_2"
    ]  # fmt: skip
    with torch.no_grad():
        skips["mix"].fill_(2.0)
        skips["mix_2"].fill_(-3.0)
    got = model(X)
    save_skips(model, tmp_path)
    remove_lambda_skip(model)
    model.scales = (2.0, -3.0)
    torch.testing.assert_close(got, model(X))
    model.scales = (1.0, 1.0)
    load_skips(model, tmp_path, example=X)
    assert torch.equal(model(X), got)


def test_hooks_of_users_are_not_removed() -> None:
    model, seen = bert(), []
    model.encoder.layer[0].attention.output.register_forward_hook(lambda *given: seen.append("out"))
    model.encoder.layer[0].attention.output.register_forward_pre_hook(lambda *given: seen.append("in"))
    add_lambda_skip(model)
    remove_lambda_skip(model)
    seen.clear()
    model(**text_inputs())
    assert seen == ["in", "out"]


class Masked(SelfAttention):
    """Attention with a residual connection; half of the output is −∞."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + super().forward(x)
        return torch.cat((total, torch.full_like(total, -math.inf)), -1)


def test_outputs_may_be_masked_by_infinity() -> None:
    assert len(add_lambda_skip(Masked(), example=X)) == 1


# --- refusals --------------------------------------------------------------------------------------------


class Plain(SelfAttention):
    """Attention without a residual connection, and a residual connection without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.think = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.think(x)


class Unusual(nn.Module):
    """Use the output of the mixer twice, so that a correction there would count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.out(self.mix(x.mT).mT)
        return torch.tanh(x + branch) * torch.tanh(branch)


class InPlace(nn.Module):
    """Change the states in place, so that no derivative shows which tokens f mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.think = nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x += self.mix(self.norm(x))[0]
        x += self.think(x.tanh())
        return x


def spoiled(name: str, module: str, by: float, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    """Return a builder of a model whose weights in one module are multiplied by a number."""

    def build() -> nn.Module:
        model = FOUND[name][0]()[0].to(dtype)
        with torch.no_grad():
            model.get_submodule(module).weight.mul_(by)
        return model

    return build


DOWN = "layers.0.mlp.down_proj"


def nano() -> nn.Module:
    return FOUND["nanoGPT style"][0]()[0]


def compiled() -> nn.Module:
    return torch.compile(bert(), backend="eager")


def inference_bert() -> nn.Module:
    with torch.inference_mode():
        return bert()


def tost(**options: Any) -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ToSTModel(ToSTConfig(**sizes, **options))


IDS, ONE = text_inputs(), {"input_ids": torch.tensor([[3]])}
INIT = "`init`: expected a number in"
NOT_FINITE = "expected finite numbers.*got NaN or infinity in"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    **{
        f"λ {value:g}": (bert, INIT, {"init": value})
        for value in (math.nan, math.inf, -math.inf, 1e39, -1e39)
    },
    "integer λ": (bert, INIT, {"init": 10**400}),
    "number as a site": (bert, "`sites`: expected names of modules, got int", {"sites": 3}),
    "number among sites": (bert, "`sites`: expected names of modules, got int", {"sites": [3]}),
    "unknown site": (bert, "'encoder.layer.7'.*Did you mean", {"sites": ["encoder.layer.7"]}),
    "a word as learnable": (bert, "`learnable`: expected one of True, False", {"learnable": "no"}),
    "no site": (bert, "expected the name of a residual mixer", {"sites": []}),
    "no residual mixer": (Plain, "expected residual connections around mixers, got none", {"example": X}),
    "one token": (nano, "have two tokens or more", {"example": ONE}),
    "unknown input": (Plain, "expected an example of its input.*example=batch", {}),
    "compiled": (compiled, "not compiled or wrapped yet, got.*compiled.*inside, `model._orig_mod`", {}),
    "own λ of ½": (partial(tost, skip_init=0.5), "none: no sum.* own λ in layers.0.* set `skip_init`", {}),
    "own learned λ": (partial(tost, skip="learned"), "has its own λ in layers.0.* set `skip_init`", {}),
    "inference mode": (inference_bert, "parameters made in it", {}),
    "NaN in the embedding": (spoiled("Llama", "embed_tokens", math.nan), NOT_FINITE, {"example": IDS}),
    "NaN in a mixer": (spoiled("Llama", "layers.1.self_attn.o_proj", math.nan), NOT_FINITE, {"example": IDS}),
    "NaN in the last norm": (spoiled("GPT-2", "ln_f", math.nan), NOT_FINITE, {"example": IDS}),
    "overflow": (spoiled("Llama", DOWN, 3e5, torch.float16), NOT_FINITE, {"example": IDS}),
    "branch used twice": (Unusual, "expected the scaled residual sums at λ ≠ 1", {"example": X}),
    "states changed in place": (InPlace, r"no sum x \+ f\(x\) in which f mixes tokens", {"example": X}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_does_not_change_the_model(name: str) -> None:
    build, message, arguments = REFUSED[name]
    model = build()
    with untouched(model), unchecked(), pytest.raises(SkipError, match=message):
        add_lambda_skip(model, **arguments)
    assert not skips_of(model)


@pytest.mark.parametrize("call", [save_skips, load_skips])
def test_an_object_other_than_a_path_is_refused(call: Any) -> None:
    model = bert()
    with (
        untouched(model),
        unchecked(),
        pytest.raises(InputError, match="`folder`: expected a path, got None"),
    ):
        call(model, None)


LOADER = torch.utils.data.DataLoader([1])
ARGUMENTS: dict[str, Callable[[nn.Module, Any], object]] = {
    "example": lambda model, batch: add_lambda_skip(model, example=batch),
    "batch": certify_skip,
    "batch of choose_lambda": lambda model, batch: choose_lambda(model, batch, "encoder.layer"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ([IDS], "list"), ("text", "str"), (LOADER, "DataLoader"), (iter([IDS]), "list_iterator"),
        ({"input_ids": torch.zeros(2, 0)}, "tensors of 0 elements"), ({"input_ids": [[1]]}, "dict"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)  # fmt: skip
def test_an_object_other_than_a_batch_is_refused(name: str, batch: Any, got: str) -> None:
    expected = f"`{name.split()[0]}`: expected a batch with tokens: .*, got {got}"
    with unchecked(), pytest.raises(InputError, match=expected):
        ARGUMENTS[name](bert(), batch)


def test_models_with_finite_float16_states_are_accepted() -> None:
    assert add_lambda_skip(spoiled("Llama", DOWN, 1, torch.float16)(), example=IDS)


def test_a_second_addition_and_a_second_removal_are_refused() -> None:
    model = bert()
    add_lambda_skip(model)
    with pytest.raises(SkipError, match="expected a model without λ-skips, got one with 3"):
        add_lambda_skip(model)
    assert len(skips_of(model)) == 3
    remove_lambda_skip(model)
    with pytest.raises(SkipError, match="expected a model with λ-skips, got one without"):
        remove_lambda_skip(model)


def test_inference_mode_is_refused_but_no_grad_is_not() -> None:
    model = bert()
    with torch.inference_mode(), pytest.raises(SkipError, match=r"outside of torch.inference_mode\(\)"):
        add_lambda_skip(model)
    with torch.no_grad():
        assert len(add_lambda_skip(model)) == 3


@contextmanager
def one_process() -> Iterator[None]:
    """Initialize torch.distributed with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_wrapped_models_are_refused() -> None:
    """DDP would not synchronize a λ that is added after wrapping."""
    with one_process():
        for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel):
            wrapped = wrap(bert())
            with pytest.raises(SkipError, match=r"one wrapped by .* Use the model inside, `model\.module`"):
                add_lambda_skip(wrapped, example=text_inputs())
            assert not skips_of(wrapped)
            assert len(add_lambda_skip(wrapped.module)) == 3
        del wrapped  # if DDP is the last to hold the process group, its end can wait for the GIL forever


def test_weights_on_a_mesh_are_refused_although_one_process_has_all(tmp_path: Path) -> None:
    with one_process():
        model, mesh = bert(), init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"encoder.layer.0.attention.self.query": ColwiseParallel()})
        for call in (add_lambda_skip, lambda model: certify_skip(model, text_inputs())):
            with pytest.raises(SkipError, match=r"DTensor weights, such as .encoder\.layer\.0"):
                call(model)
        for shard in (partial(fully_shard, mesh=mesh), partial(FullyShardedDataParallel, device_id=CPU)):
            model = bert()
            add_lambda_skip(model, init=0.5)
            sharded = shard(model)
            if shard.func is fully_shard:  # λ is gathered
                save_skips(sharded, tmp_path)
                assert [value.item() for value in load_skips(bert(), tmp_path).values()] == [0.5] * 3
            else:
                with pytest.raises(
                    SkipError, match=r"expected a parameter of its module.* FSDP2 in place of FSDP1"
                ):
                    save_skips(sharded, tmp_path)


def with_example(model: nn.Module, batch: Any) -> None:
    add_lambda_skip(model, example=batch, exist_ok=True)


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("call", [certify_skip, partial(choose_lambda, stack="decoder.block"), with_example])
def test_a_batch_on_which_the_model_fails_is_refused(call: Callable[..., Any], skipped: bool) -> None:
    model, batch = FOUND["T5"][0]()
    if skipped:
        add_lambda_skip(model, example=batch)
    with pytest.raises(InputError, match="`batch`: expected a batch that T5Model runs on, got Value"):
        call(model, {"input_ids": batch["input_ids"]})
