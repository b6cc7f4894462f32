"""`verify` finds a λ-skip that applies another λ, at every site, and accepts rounding errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND, Build
from tests.support.torch_names import hook_stores
from torch import Tensor, nn

from rankwise.skips import SkipError, SkipPlace
from rankwise.skips.add import install
from rankwise.skips.hook_places import find_places
from rankwise.skips.hooks import Argument, SkipHook
from rankwise.skips.verify import SumCheck, verify


def deep(model: str, **settings: Any) -> Build:
    return lambda: (hugging_face(model, **settings)(), text_inputs())


def mamba(depth: int) -> Build:
    """Return a builder of a model whose first branch is thousands of times larger than the residual."""
    return deep("MambaModel", vocab_size=64, hidden_size=64, state_size=4, num_hidden_layers=depth)


FAMILIES = [
    "BERT", "DistilBERT", "ALBERT", "GPT-2", "GPT-NeoX", "Llama", "Mamba-2", "T5", "ViT", "nanoGPT style",
    "torch TransformerEncoder",
]  # fmt: skip
CASES = [
    *(pytest.param(mamba(6), at, id=f"Mamba-{at}") for at in (0, 5)),
    *(pytest.param(FOUND[name][0], -1, id=name) for name in FAMILIES),
]
DEEP = {
    "Mamba": mamba(8),  # its steps run in Python
    "Llama": deep("LlamaModel", **LLAMA | {"num_hidden_layers": 16}),
    "BERT": deep("BertModel", **BERT | {"num_hidden_layers": 16}),
    "GPT-2": deep("GPT2Model", **GPT | {"n_layer": 16}),
}


class OffScale(SkipHook):
    """Hook that applies 1.01 times λ, except for λ = 1."""

    def __init__(self, hook: SkipHook) -> None:
        self.hook, self.parameter = hook, hook.parameter

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        scale = module.get_parameter(self.parameter)
        if bool((scale != 1).all()):
            setattr(module, self.parameter, nn.Parameter(1.01 * scale.detach()))
        try:
            return self.hook(module, *given)
        finally:
            setattr(module, self.parameter, scale)


def with_hooks(model: nn.Module, batch: dict[str, Any], sites: slice = slice(None)) -> list[SkipPlace]:
    """Install λ-skips at some of the sites of a model, and return all sites."""
    found = find_places(model, batch)[0]
    for site in found[sites]:
        install(model, site, learnable=True, per="layer")
    return found


@pytest.mark.parametrize(("build", "at"), CASES)
def test_an_error_of_one_percent_at_one_site_is_found_and_named(build: Build, at: int) -> None:
    model, batch = build()
    found = with_hooks(model, batch)
    module = model.get_submodule(found[at].module)
    for hooks in hook_stores(module):
        for number, hook in hooks.items():
            if isinstance(hook, SkipHook) and getattr(hook, "parameter", "") == found[at].parameter:
                hooks[number] = OffScale(hook)
    with pytest.raises(SkipError) as error:
        verify(model, batch, found, found)
    assert f"at λ ≠ 1, got something else at {found[at].name}." in str(error.value)
    scales = [model.get_submodule(site.module).get_parameter(site.parameter) for site in found]
    assert all(bool((scale == 1).all()) for scale in scales)


@pytest.mark.parametrize(
    ("name", "sites", "dtype"),
    [*((name, slice(None), torch.bfloat16) for name in DEEP), ("Mamba", slice(1), torch.float32)],
    ids=str,
)
def test_rounding_errors_of_deep_models_pass(name: str, sites: slice, dtype: torch.dtype) -> None:
    model, batch = DEEP[name]()
    found = with_hooks(model.to(dtype), batch, sites)
    verify(model, batch, found[sites], found)


def test_a_lambda_that_also_acts_at_another_site_is_found() -> None:
    model, batch = FOUND["GPT-2"][0]()
    found = with_hooks(model, batch, slice(1))
    scale = model.get_submodule(found[0].name).get_parameter(found[0].parameter)

    def leak(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (output[0] * scale, *output[1:])

    model.get_submodule(found[1].name).register_forward_hook(leak)
    with pytest.raises(SkipError, match=rf"something else at {found[1].name}\."):
        verify(model, batch, found[:1], found)


# --- tolerance of one sum --------------------------------------------------------------------------------

NAME = ("", 0, 0)
SITE = SkipPlace("site", "lambda_skip", "mix", None, "norm", Argument("x", 0), "", (NAME,))
SCALE = 0.75


def operands(dtype: torch.dtype, branch: float, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return a residual of a size, and a branch that is larger by a factor."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 5, 64, dtype=torch.float64, generator=generator)
    return (size * x).to(dtype), (size * branch * y).to(dtype)


def agrees(x: Tensor, y: Tensor, hooked: tuple[Tensor, Tensor]) -> bool:
    check = SumCheck(SITE, SCALE)
    check.keep(NAME, x, y)
    assert not check.right  # not compared yet
    got = check.at_sum(NAME, *hooked)
    assert torch.equal(got, (x * SCALE).to(x.dtype) + y)  # the exact sum replaces the compared sum
    return check.right


BRANCHES = pytest.mark.parametrize("branch", [0.0, 1e-3, 1.0, 1e3])
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@BRANCHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wrong_lambda_of_one_token_differs(dtype: torch.dtype, branch: float) -> None:
    x, y = operands(dtype, branch)
    for by in (0.99, 1.01):
        scaled = x * SCALE
        scaled[1, 2] *= by
        assert not agrees(x, y, (scaled, y))


@BRANCHES
@pytest.mark.parametrize("size", [1e-6, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rounding_in_another_order_agrees(dtype: torch.dtype, size: float, branch: float) -> None:
    """(λ − 1)·x is added to the branch; some tokens are zero, and some numbers are subnormal."""
    x, y = operands(dtype, branch, size)
    x[0, 0] = y[0, 0] = y[0, 1] = 0
    assert agrees(x, y, (x, y + x * (SCALE - 1)))


@HALF
def test_a_branch_of_a_finer_dtype_agrees(dtype: torch.dtype) -> None:
    """λ·x is rounded to the dtype of x, but (λ − 1)·x is not; one channel per token averages no errors."""
    x, y = operands(dtype, 1.0)[0][..., :1], operands(torch.float32, 1.0)[1][..., :1]
    assert agrees(x, y, (x, y + x.float() * (SCALE - 1)))


@HALF
def test_an_effect_below_rounding_agrees(dtype: torch.dtype) -> None:
    x, y = operands(dtype, branch=1e3)
    assert agrees(x, y, (x, y))
    assert not agrees(x, x, (x, x))  # the same error above rounding


WRONG: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "NaN": lambda x, y: (x * SCALE, y.index_fill(0, torch.tensor([0]), float("nan"))),
    "infinity": lambda x, y: (x * SCALE, y.index_fill(0, torch.tensor([0]), float("inf"))),
    "another shape": lambda x, y: (x[None] * SCALE, y[None]),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_that_are_not_finite_and_other_shapes_differ(name: str) -> None:
    x, y = operands(torch.float32, 1.0)
    assert not agrees(x, y, WRONG[name](x, y))
