"""λ-skips are tried at every site: one that acts with another λ is found, and rounding is no fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND
from torch import Tensor, nn

from rankwise.skips import SkipError
from rankwise.skips.add import install
from rankwise.skips.hooks import Port, SkipHook
from rankwise.skips.locate import SkipSite, find_sites
from rankwise.skips.verify import SumCheck, verify

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


def mamba(depth: int) -> Build:
    """In its first block the branch is thousands of times the residual."""
    settings = {"vocab_size": 64, "hidden_size": 64, "state_size": 4, "num_hidden_layers": depth}
    return lambda: (hugging_face("MambaModel", **settings)(), text_inputs())


def deep(model: str, **settings: Any) -> Build:
    return lambda: (hugging_face(model, **settings)(), text_inputs())


FAMILIES = [
    "BERT", "DistilBERT", "ALBERT", "GPT-2", "GPT-NeoX", "Llama", "Mamba-2", "T5", "ViT", "nanoGPT style",
    "torch TransformerEncoder",
]  # fmt: skip
CASES = [
    *(pytest.param(mamba(6), at, id=f"Mamba-{at}") for at in range(6)),
    *(pytest.param(FOUND[name][0], at, id=f"{name}-{at}") for name in FAMILIES for at in (0, -1)),
]
DEEP = {
    "Mamba": mamba(12),  # its steps run in Python
    "Llama": deep("LlamaModel", **LLAMA | {"num_hidden_layers": 24}),
    "BERT": deep("BertModel", **BERT | {"num_hidden_layers": 24}),
    "GPT-2": deep("GPT2Model", **GPT | {"n_layer": 24}),
}


class OffScale(SkipHook):
    """A hook that acts with some multiple of any λ but 1."""

    def __init__(self, hook: SkipHook, by: float) -> None:
        self.hook, self.by, self.parameter = hook, by, hook.parameter

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        scale = module._parameters[self.parameter]
        if bool((scale != 1).all()):
            module._parameters[self.parameter] = nn.Parameter(self.by * scale.detach())
        try:
            return self.hook(module, *given)
        finally:
            module._parameters[self.parameter] = scale


def with_hooks(model: nn.Module, batch: dict[str, Any]) -> list[SkipSite]:
    found = find_sites(model, batch)[0]
    for site in found:
        install(model, site, learnable=True, per="layer")
    return found


def spoil(model: nn.Module, site: SkipSite, by: float) -> None:
    module = model.get_submodule(site.write.module)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in hooks.items():
            if isinstance(hook, SkipHook) and getattr(hook, "parameter", "") == site.parameter:
                hooks[number] = OffScale(hook, by)


@pytest.mark.parametrize(("build", "at"), CASES)
def test_one_percent_at_one_site_is_found_and_named(build: Build, at: int) -> None:
    model, batch = build()
    found = with_hooks(model, batch)
    spoil(model, found[at], by=1.01)
    with pytest.raises(SkipError) as error:
        verify(model, batch, found, found)
    assert f"at λ ≠ 1, got something else at {found[at].name}." in str(error.value)
    scales = [model.get_submodule(site.write.module).get_parameter(site.parameter) for site in found]
    assert all(bool((scale == 1).all()) for scale in scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Mamba", *FAMILIES])
def test_right_hooks_pass(name: str, dtype: torch.dtype) -> None:
    model, batch = FOUND[name][0]()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    found = with_hooks(model.to(dtype), batch)
    verify(model, batch, found, found)


@pytest.mark.parametrize(
    ("sites", "dtype"), [(slice(None), torch.bfloat16), (slice(1), torch.float32)], ids=["all", "the first"]
)
@pytest.mark.parametrize("name", DEEP)
def test_right_hooks_of_deep_models_pass(name: str, sites: slice, dtype: torch.dtype) -> None:
    """Rounding that grows with depth is no fault."""
    model, batch = DEEP[name]()
    found = find_sites(model.to(dtype), batch)[0]
    for site in found[sites]:
        install(model, site, learnable=True, per="layer")
    verify(model, batch, found[sites], found)


NAME = ("", 0, 0)
PORT = Port("", ("x", 0))
SITE = SkipSite("site", "lambda_skip", PORT, PORT, None, (NAME,))
SCALE = 0.75


def operands(dtype: torch.dtype, branch: float, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """A residual of some size and a branch that is some multiple of it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 5, 64, dtype=torch.float64, generator=generator)
    return (size * x).to(dtype), (size * branch * y).to(dtype)


def agrees(x: Tensor, y: Tensor, hooked: tuple[Tensor, Tensor]) -> bool:
    check = SumCheck(SITE, SCALE)
    check.keep(NAME, x, y)
    assert not check.right  # not compared yet
    got = check.at_sum(NAME, *hooked)
    assert torch.equal(got, (x * SCALE).to(x.dtype) + y)  # whatever it was: errors do not add up
    return check.right


BRANCHES = pytest.mark.parametrize("branch", [0.0, 1e-3, 1.0, 1e3])


@BRANCHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wrong_scale_of_one_token(dtype: torch.dtype, branch: float) -> None:
    x, y = operands(dtype, branch)
    for by in (0.99, 1.01):
        scaled = x * SCALE
        scaled[1, 2] *= by
        assert not agrees(x, y, (scaled, y))


@BRANCHES
@pytest.mark.parametrize("size", [1e-6, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rounding_in_another_order_agrees(dtype: torch.dtype, size: float, branch: float) -> None:
    """(λ − 1)·x added to the branch; some tokens are zero, some numbers subnormal."""
    x, y = operands(dtype, branch, size)
    x[0, 0] = 0
    y[0, 0] = y[0, 1] = 0
    assert agrees(x, y, (x, y + x * (SCALE - 1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_branch_of_a_finer_dtype(dtype: torch.dtype) -> None:
    """λ·x is rounded to the dtype of x, (λ − 1)·x is not; in tokens of one channel, no mean hides it."""
    x, y = operands(dtype, 1.0)[0][..., :1], operands(torch.float32, 1.0)[1][..., :1]
    assert agrees(x, y, (x, y + x.float() * (SCALE - 1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_effect_below_rounding_cannot_be_told(dtype: torch.dtype) -> None:
    x, y = operands(dtype, branch=1e3)
    assert agrees(x, y, (x, y))
    assert not agrees(x, x, (x, x))  # the same scale, where it can


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(spoiled: float) -> None:
    x, y = operands(torch.float32, 1.0)
    wrong = y.clone()
    wrong[0, 0, 0] = spoiled
    assert not agrees(x, y, (x * SCALE, wrong))


def test_another_shape() -> None:
    x, y = operands(torch.float32, 1.0)
    assert not agrees(x, y, (x[None] * SCALE, y[None]))


def test_a_sum_that_only_the_pass_with_hooks_takes() -> None:
    x, y = operands(torch.float32, 1.0)
    check = SumCheck(SITE, SCALE)
    assert torch.equal(check.at_sum(NAME, x, y), x + y)
    assert check.right


class Sum(nn.Module):
    """Gives the sum of what it is given and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x + self.mix(x.mT).mT, "more"


def test_what_a_module_gives_is_compared_when_it_ends() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Sum()), torch.randn(2, 5, 64)
    found = with_hooks(model, {"input": x})
    ((read, write, scope),) = [(site.read, site.write, site.scope) for site in found]
    assert (read.argument, write.argument, scope) == (("x", 0), None, None)  # the sum is corrected
    verify(model, {"input": x}, found, found)
    hooks = model[0]._forward_hooks
    right = dict(hooks)
    hooks.clear()
    with pytest.raises(SkipError, match="something else at 0"):
        verify(model, {"input": x}, found, found)
    hooks.update(right)
    verify(model, {"input": x}, found, found)
    assert len(hooks) == 1  # its own are gone
    assert not model[0]._forward_pre_hooks


def test_a_residual_sum_without_a_skip_must_stay() -> None:
    """A hook whose λ also acts in the block behind it."""
    model, batch = FOUND["GPT-2"][0]()
    found = find_sites(model, batch)[0]
    install(model, found[0], learnable=True, per="layer")
    scale = model.get_submodule(found[0].name).get_parameter(found[0].parameter)

    def leak(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (output[0] * scale, *output[1:])

    model.get_submodule(found[1].name).register_forward_hook(leak)
    with pytest.raises(SkipError, match=rf"something else at {found[1].name}\."):
        verify(model, batch, found[:1], found)
