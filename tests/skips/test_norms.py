"""A norm is told by what it computes; a certificate behind it holds for the model's own state."""

import math
from functools import partial

import pytest
import torch
from tests.skips.foreign_norms import KNOWN, TOKENS, UNKNOWN, WIDTH, NanoLayerNorm, PostNorm, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.measures import token_spread
from rankwise.skips import SkipCertificate, add_lambda_skip, certify_skip
from rankwise.skips.observe import read_norm

mu = partial(token_spread, normalized=False)
SLACK = 1e-4
"""Relative: a model's states are sums of float32 numbers, with a constant of some ten times their size."""


def post_norm(norm: nn.Module, seed: int = 0, strength: float = 0.3) -> PostNorm:
    torch.manual_seed(seed)
    return PostNorm(norm, strength).eval()


def certified(model: nn.Module, x: Tensor, scale: float) -> SkipCertificate:
    skips = add_lambda_skip(model, example=torch.randn(2, TOKENS, WIDTH))
    with torch.no_grad():
        next(iter(skips.values())).fill_(scale)
        certificate = certify_skip(model, x)
        model(x)
    return certificate


@pytest.mark.parametrize(("alike", "scale"), [(False, -0.4), (True, 1.0)])
@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_what_is_promised_holds_for_the_state_behind_the_norm(name: str, alike: bool, scale: float) -> None:
    build, kind = KNOWN[name] if name in KNOWN else (UNKNOWN[name], "unknown")
    model, x = post_norm(build()), tokens(1, alike)
    certificate = certified(model, x, scale)
    layer = certificate.layers[0]
    assert layer.norm == kind
    if kind == "unknown":
        assert (
            layer.kept_lower_bound
            is layer.min_lambda_proved
            is layer.min_lambda_any_mixing
            is layer.kept
            is None
        )
        assert layer.paper_guaranteed is layer.min_lambda_paper is None
        assert any(note.startswith("nothing is promised") for note in certificate.notes)
        (stack,) = certificate.stacks
        assert stack.min_lambda_proved is stack.kept_mu is None
        return
    assert 0 <= layer.kept_lower_bound <= layer.kept * (1 + SLACK)
    read = (x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x).double()
    if kind != "none":
        read = math.sqrt(WIDTH) * read / read.norm(dim=-1, keepdim=True)
    true = mu(model.state)
    assert (true >= layer.norm_gain * layer.kept_lower_bound * mu(read) * (1 - SLACK)).all()
    if layer.norm_gain > 0.9:  # all channels have the same gain
        assert float(true.mean()) >= layer.norm_gain * layer.spread_out * (1 - SLACK)


@pytest.mark.parametrize("name", ["torch LayerNorm", "Foo", "T5"])
def test_the_sound_scale_holds_for_the_state_behind_the_norm(name: str) -> None:
    build, x = KNOWN[name][0], tokens(1, alike=False)
    model = post_norm(build())
    least = certified(model, x, 1.0).layers[0].min_lambda_proved
    assert math.isfinite(least)
    layer = certified(post_norm(build()), x, least).layers[0]
    assert math.sqrt(0.5) <= layer.kept_lower_bound * (1 + SLACK) <= layer.kept * (1 + 2 * SLACK)


def test_nanogpt_s_layer_norm_is_no_rms_norm() -> None:
    """Tokens that differ by a constant for each: the norm takes it off, and with it nearly all of μ."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn((1, 1, WIDTH), generator=generator)
    x = common + 5 * torch.randn((1, 16, 1), generator=generator)
    x += 0.02 * torch.randn((1, 16, WIDTH), generator=generator)
    norm = NanoLayerNorm(bias=False)
    nn.init.ones_(norm.weight)
    model = post_norm(norm, strength=0.01)
    layer = certified(model, x, 1.0).layers[0]
    assert layer.kept_lower_bound * layer.spread_in <= float(mu(model.state)) < 1
    assert layer.norm == "LayerNorm"


# --- where it is looked for ---------------------------------------------------------------------------------


class Inline(nn.Module):
    """A norm that is no module."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.block, self.norm, self.head = post_norm(nn.Identity()).mixer, norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.block(x)))


INLINE = {
    "layer_norm": lambda h: F.layer_norm(h, (WIDTH,)),
    "normalize": F.normalize,
    "written out": lambda h: h / h.square().mean(-1, keepdim=True).sqrt(),
    "over tokens": lambda h: F.instance_norm(h.transpose(1, 2)).transpose(1, 2),
    "in place": lambda h: h.tanh_(),
}


@pytest.mark.parametrize("name", INLINE)
def test_a_norm_outside_of_any_module_is_not_known(name: str) -> None:
    certificate = certify_skip(Inline(INLINE[name]).eval(), tokens(0, alike=False))
    assert certificate.layers[0].norm == "unknown"
    assert certificate.layers[0].kept_lower_bound is None
    assert any("reads the sum outside of any module" in note for note in certificate.notes)


NO_NORM = {
    "nothing": lambda h: h,
    "mean over tokens": lambda h: h.mean(1, keepdim=True),
    "first token": lambda h: h[:, :1],
    "a layer": nn.Linear(WIDTH, WIDTH),
    "a product": lambda h: h @ torch.ones(WIDTH, WIDTH),
    "another shape": lambda h: h.reshape(-1, WIDTH),
}


@pytest.mark.parametrize("name", NO_NORM)
def test_the_sum_itself_is_the_state(name: str) -> None:
    certificate = certify_skip(Inline(NO_NORM[name]).eval(), tokens(0, alike=False))
    assert certificate.layers[0].norm == "none"
    assert certificate.layers[0].kept_lower_bound is not None


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class AddOutside(nn.Module):
    """The sum is taken in a module of its own, with dropout between it and the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.add, self.drop = post_norm(nn.Identity()).mixer, Add(), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.add(x, self.mixer(x))))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_a_norm_outside_of_the_module_that_adds_is_found() -> None:
    torch.manual_seed(0)
    stacks = (
        nn.Sequential(*[AddOutside() for _ in range(3)]),
        nn.Sequential(
            *[layer for _ in range(3) for layer in (Residual(Inline(nn.Identity())), nn.LayerNorm(WIDTH))]
        ),
    )
    for stack in stacks:
        layers = certify_skip(stack.eval(), tokens(0, alike=False)).layers
        assert [layer.norm for layer in layers] == ["LayerNorm"] * 3


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), post_norm(nn.Identity()).mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


@pytest.mark.parametrize("end", [nn.LayerNorm(WIDTH), nn.BatchNorm1d(TOKENS), nn.Tanh()])
def test_a_norm_behind_a_stack_is_not_that_of_its_last_block(end: nn.Module) -> None:
    torch.manual_seed(0)
    layers = certify_skip(nn.Sequential(PreNorm(), PreNorm(), end).eval(), tokens(0, alike=False)).layers
    assert [layer.norm for layer in layers] == ["none", "none"]


class Parallel(nn.Module):
    """Attention and feed-forward side by side, then or before a norm: x + f(x) + g(x)."""

    def __init__(self, post: bool) -> None:
        super().__init__()
        self.norm, self.mixer, self.dense = (
            nn.LayerNorm(WIDTH),
            post_norm(nn.Identity()).mixer,
            nn.Linear(WIDTH, WIDTH),
        )
        self.post = post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            return self.norm(x + self.mixer(x) + self.dense(x))
        read = self.norm(x)
        return x + self.mixer(read) + self.dense(read)


@pytest.mark.parametrize(("post", "norm"), [(True, "unknown"), (False, "none")])
def test_a_norm_behind_two_branches_reads_more_than_the_sum(post: bool, norm: str) -> None:
    """x + f(x), which no norm reads, is no state where x + f(x) + g(x) is what the norm makes a state of."""
    torch.manual_seed(0)
    stack = nn.Sequential(Parallel(post), Parallel(post), nn.LayerNorm(WIDTH)).eval()
    certificate = certify_skip(stack, tokens(0, alike=False))
    assert [layer.norm for layer in certificate.layers] == [norm] * 2
    assert [layer.kept_lower_bound is None for layer in certificate.layers] == [post] * 2
    assert any("was not given the sum as it is" in note for note in certificate.notes) == post


# --- recognition --------------------------------------------------------------------------------------------


def of(norm: nn.Module, x: Tensor):
    with torch.no_grad():
        return read_norm(norm, x, norm(x))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eps_and_gain_are_read_off(kind, size: float, eps: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    norm = kind(24, eps=eps).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24))
    found = of(norm, size * torch.randn(2, 5, 24, dtype=dtype))
    assert found.kind == kind.__name__
    assert torch.allclose(found.gain, norm.weight.double(), rtol=1e-5, atol=1e-6)
    assert found.eps == pytest.approx(eps, rel=1e-3, abs=1e-16 * size**2)


def test_a_hook_that_changes_what_it_gives_counts() -> None:
    norm, x = nn.LayerNorm(WIDTH), tokens(0, alike=False)
    norm.register_forward_hook(lambda module, args, output: output.tanh())
    assert of(norm, x).kind == "unknown"
