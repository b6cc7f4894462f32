"""λ-skips of every family: λ = 1 changes nothing, other λ scale the sums, and removal is complete."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from experiments.zoo.transformers import hugging_face
from tests.skips.cases import FOUND, MAMBA2, STATE_SPACE, outputs, same
from tests.support.modules import SelfAttention, Stack
from tests.support.torch_names import hooks_of
from tests.support.untouched import state_of
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.batches import tensors_in
from rankwise.skips import add_lambda_skip, remove_lambda_skip, skips_of
from rankwise.skips.observe import scaled_sums, without_skips
from rankwise.skips.residual_sums import run_with


@pytest.mark.parametrize("name", FOUND)
def test_skips_act_in_every_family(name: str) -> None:
    build, sites = FOUND[name]
    model, batch = build()
    before, keys = outputs(model, batch), list(model.state_dict())
    torch.manual_seed(0)
    state, classes = state_of(model), [type(module) for module in model.modules()]
    skips = add_lambda_skip(model, example=batch)
    assert len(skips) == sites
    assert [type(module) for module in model.modules()] == classes
    assert same(outputs(model, batch), before)

    out = tensors_in(model(**batch))[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
    gradients = torch.autograd.grad((out * weights).sum(), list(skips.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert set(skips.values()) <= set(model.parameters())

    twin, frozen = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for at, parameter in enumerate(skips_of(twin).values()):
        parameter.data.fill_(-0.5 - 0.1 * at)
    assert same(outputs(model, batch), before)
    assert same(outputs(frozen, batch), before)

    # at other λ, the oracle is a forward pass in which the sums are scaled directly
    values = {site: parameter.detach() for site, parameter in skips_of(twin).items()}
    with without_skips(twin):
        wanted = run_with(twin, batch, scaled_sums(list(skips_of(twin).places.values()), values))
    for first, second in zip(wanted, outputs(twin, batch), strict=True):
        # λ·x + f has two roundings in place of one, through a few layers of float32
        assert torch.allclose(first, second, rtol=1e-3, atol=1e-4 * float(first.abs().max()))
    assert not same(wanted, before)

    for changed in (model, twin, frozen):
        remove_lambda_skip(changed)
        assert not skips_of(changed)
        assert same(outputs(changed, batch), before)
        assert list(changed.state_dict()) == keys
        assert not hooks_of(changed)
    torch.manual_seed(0)
    assert state_of(model) == state


@pytest.mark.parametrize(
    ("name", "dtype"), [("ViT", torch.float32), ("ViT", torch.bfloat16), ("T5", torch.bfloat16)]
)
def test_an_example_is_made_for_images_and_texts(name: str, dtype: torch.dtype) -> None:
    (model, batch), (other, _) = (FOUND[name][0]() for _ in range(2))
    sites = add_lambda_skip(model.to(dtype)).places
    assert list(sites) == list(add_lambda_skip(other, example=batch))
    assert {site.dtype for site in sites.values()} == {dtype}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Mamba", torch.float16),
        ("Mamba", torch.float64),
        ("Mamba2", torch.bfloat16),
        ("FalconMamba", torch.bfloat16),
    ],
)
def test_a_residual_in_float32_is_the_state_that_it_was_cast_from(name: str, dtype: torch.dtype) -> None:
    sizes = (MAMBA2 if name == "Mamba2" else STATE_SPACE) | {"num_hidden_layers": 4}
    skips = add_lambda_skip(hugging_face(f"{name}Model", f"{name}Config", **sizes)().to(dtype))
    assert list(skips) == [f"layers.{at}.mixer" for at in range(4)]
    assert skips.notes == ()


class Copying(nn.Module):
    """Block that adds its branch to a copy of its input; `branch` has the same layout as the copy."""

    def __init__(self, copied: Callable[[Tensor], Tensor], branch: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), SelfAttention(), nn.Linear(8, 8)
        self.copied, self.branch, self.skip = copied, branch, 1.0

    def forward(self, x: Tensor) -> Tensor:
        residual, branch = self.copied(x), self.branch(self.mix(self.norm(x)))
        residual = residual if self.skip == 1 else self.skip * residual
        return self.out((residual + branch).to(x.dtype)).view(x.shape)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "cast": Tensor.double,
    "type": lambda x: x.type(torch.float64),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "slice": lambda x: x[:],
    "view": lambda x: x.view(x.shape),
    "axes added and removed": lambda x: x[None].squeeze(0),
    "copy in place": lambda x: torch.empty_like(x).copy_(x),
    "cat of one": lambda x: torch.cat([x]),
    "stack of one": lambda x: torch.stack([x])[0],
    "chunk of one": lambda x: x.chunk(1)[0],
    "no dropout": lambda x: F.dropout(x, 0.0),
    "contiguous": lambda x: x.mT.contiguous().mT,
    "several": lambda x: x.clone().flatten().view(x.shape).double(),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens in a row": lambda x: x.reshape(-1, 8),
    "time first": lambda x: x.transpose(0, 1),
    "copy with time first": lambda x: x.transpose(0, 1).contiguous(),
}


@pytest.mark.parametrize("name", [*COPIES, *LAYOUTS])
def test_a_copy_of_the_state_is_the_state(name: str) -> None:
    torch.manual_seed(0)
    copied = (COPIES | LAYOUTS)[name]
    blocks = [Copying(copied, LAYOUTS.get(name, torch.positive)) for _ in range(2)]
    model, x = nn.Sequential(*blocks), torch.randn(2, 5, 8)
    skips = add_lambda_skip(model, example=x)
    assert (list(skips), skips.notes) == (["0.mix", "1.mix"], ())
    for value in skips.values():
        value.data.fill_(0.5)
    got = model(x)
    remove_lambda_skip(model)
    for block in blocks:
        block.skip = 0.5
    torch.testing.assert_close(got, model(x))


NO_SUM = "no sum x + f(x) ran in it in which f mixes tokens"


class Keyed(nn.Module):
    """Model that runs the blocks of its dict in turn."""

    def __init__(self, **blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Other(Copying):
    """Block of another class."""


def test_blocks_without_a_lambda_are_named() -> None:
    """A product is not a copy, so its block has no sum x + f(x); a list of parts is not a list of blocks."""
    scaled, whole = Copying(lambda x: 0.9 * x, torch.positive), Copying(torch.clone, torch.positive)
    one, two, three = (copy.deepcopy(whole) for _ in range(3))
    other = Other(lambda x: 0.9 * x, torch.positive)
    for names, model in (
        (["1", "3"], nn.Sequential(whole, scaled, one, copy.deepcopy(scaled))),
        (["0.1"], nn.Sequential(nn.Sequential(whole, scaled), nn.Sequential(one, two))),
        (["blocks.0"], Stack([other, whole, one])),
        (["0.blocks.1"], nn.Sequential(Stack([whole, other]), Stack([one, two]))),
        (["blocks.middle"], Keyed(first=whole, middle=other, last=one)),
        ([], nn.Sequential(nn.Sequential(whole, nn.Linear(8, 8)), nn.Sequential(three, nn.Linear(8, 8)))),
    ):
        notes = add_lambda_skip(model, example=torch.randn(2, 5, 8)).notes
        assert notes == ((f"no λ in {', '.join(names)}: {NO_SUM}",) if names else ())
        remove_lambda_skip(model)
