"""A norm is told by what it computes; a certificate behind it holds for the model's own state."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.measures import token_spread
from rankwise.skips import SkipCertificate, add_lambda_skip, certify_skip
from rankwise.skips.observe import read_norm

mu = partial(token_spread, normalized=False)
WIDTH, TOKENS = 8, 6
ENDS = ("proved", "any_mixing", "paper")
SLACK = 1e-4
"""Relative: a model's states are sums of float32 numbers, with a constant of some ten times their size."""


class Written(nn.Module):
    """A norm as others write it, under a name that says nothing."""

    def __init__(self, function: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def centred(x: Tensor, axis: int = -1) -> Tensor:
    return x - x.mean(axis, keepdim=True)


def over_tokens(norm: nn.Module) -> nn.Module:
    """A norm of (B, D, T), as for pictures."""
    return Written(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def of_rows(groups: int) -> nn.Module:
    """GroupNorm of each token by itself; of one group it is LayerNorm."""
    norm = nn.GroupNorm(groups, WIDTH)
    return Written(lambda self, x: self.norm(x.reshape(-1, WIDTH)).reshape(x.shape), norm=norm)


def nano_layer_norm(bias: Tensor | None, weight: Tensor) -> nn.Module:
    """nanoGPT's: LayerNorm with a bias that may be None."""
    return Written(
        lambda self, x: F.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-5), weight=weight, bias=bias
    )


def batch_norm(affine: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH, affine=affine)
    with torch.no_grad():
        norm.running_var.copy_(torch.linspace(0.01, 100, WIDTH))
    return over_tokens(norm)


def layer_norm(gain: float = 1.0) -> nn.LayerNorm:
    norm = nn.LayerNorm(WIDTH)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(gain / 3, gain, WIDTH))
        norm.bias.normal_()
    return norm


def scale_norm(shortest: float) -> nn.Module:
    """g·x/‖x‖ with one g for all channels: RMSNorm with γ = g/√D, down to a length."""
    return Written(
        lambda self, x: self.g * x / x.norm(dim=-1, keepdim=True).clamp(min=shortest),
        g=torch.tensor(math.sqrt(2.0)),
    )


def compressed_rms(_: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm of D + 1 channels, of which the last makes the sum 0."""
    square = x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square()
    return x / (square / (WIDTH + 1) + 1e-6).sqrt()


def ramp(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, WIDTH)


KNOWN = {
    "torch LayerNorm": (lambda: layer_norm(0.1), "LayerNorm"),
    "LayerNorm without gain": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "LayerNorm"),
    "nanoGPT": (lambda: nano_layer_norm(ramp(-1, 1), ramp(0.5, 1.5)), "LayerNorm"),
    "nanoGPT without bias": (lambda: nano_layer_norm(None, ramp(0.5, 1.5)), "LayerNorm"),
    "written out": (lambda: Written(lambda _, x: rms(centred(x), 0.01)), "LayerNorm"),
    "GroupNorm of rows": (lambda: of_rows(1), "LayerNorm"),
    "torch RMSNorm": (lambda: nn.RMSNorm(WIDTH), "RMSNorm"),
    "T5": (
        lambda: Written(
            lambda self, x: self.weight * rms(x, 1e-6), weight=ramp(-2, 2), variance_epsilon=1e-6
        ),
        "RMSNorm",
    ),
    "Gemma": (  # its gain is 1 + weight
        lambda: Written(lambda self, x: rms(x, 1e-6) * (1 + self.weight), weight=ramp(-0.5, 0.5), eps=1e-6),
        "RMSNorm",
    ),
    "Llama": (
        lambda: Written(
            lambda self, x: self.weight * rms(x, 1e-5),
            weight=torch.full((WIDTH,), 0.7),
            variance_epsilon=1e-5,
        ),
        "RMSNorm",
    ),
    "Identity": (nn.Identity, "none"),
    "Dropout": (nn.Dropout, "none"),
}
UNKNOWN = {
    "F.normalize": lambda: Written(lambda _, x: F.normalize(x, dim=-1)),
    "ScaleNorm": lambda: scale_norm(1e-12),
    "ScaleNorm down to 1e-3": lambda: scale_norm(1e-3),
    "GroupNorm of two groups": lambda: of_rows(2),
    "GroupNorm over tokens": lambda: over_tokens(nn.GroupNorm(1, WIDTH)),
    "GroupNorm of channels over tokens": lambda: over_tokens(nn.GroupNorm(WIDTH, WIDTH)),
    "InstanceNorm": lambda: over_tokens(nn.InstanceNorm1d(WIDTH, affine=True)),
    "BatchNorm": batch_norm,
    "BatchNorm without gain": lambda: batch_norm(affine=False),
    "LayerNorm over tokens too": lambda: nn.LayerNorm((TOKENS, WIDTH)),
    "PowerNorm": lambda: Written(lambda _, x: x / ramp(0.1, 3).sqrt()),  # by a running square per channel
    "DyT": lambda: Written(lambda _, x: torch.tanh(0.5 * x) * 1.2 + 0.1),
    "CRMSNorm": lambda: Written(compressed_rms),
    "annotated transformer": lambda: Written(lambda _, x: centred(x) / (x.std(-1, keepdim=True) + 1e-6)),
    "partial RMSNorm": lambda: Written(
        lambda _, x: x / (x[..., :2].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    ),
    "less the mean token": lambda: Written(lambda _, x: F.layer_norm(centred(x, -2), (WIDTH,))),
    "gain by sequence": lambda: Written(
        lambda _, x: F.layer_norm(x, (WIDTH,)) * (1 + x.mean((-2, -1), keepdim=True).sigmoid())
    ),
    "ReLU": nn.ReLU,
    "softmax": lambda: nn.Softmax(-1),
    "gain of 0": lambda: layer_norm(0.0),
}


class Mixer(nn.Module):
    """Causal averaging with a projection."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.out.weight.mul_(strength)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None])


class PostNorm(nn.Module):
    """norm(x + f(x)), kept as the state; what a hook sees of it is what a certificate speaks of."""

    def __init__(self, norm: nn.Module, strength: float = 0.3) -> None:
        super().__init__()
        self.mixer, self.norm, self.head = Mixer(strength), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.norm(x + self.mixer(x))
        return self.head(self.state)


def tokens(seed: int, alike: bool) -> Tensor:
    """Random states; ``alike``: which differ by a constant added to all channels, all but a little."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn((2, TOKENS, WIDTH), generator=generator)
    if not alike:
        return own
    common = torch.randn((2, 1, WIDTH), generator=generator)
    return common + 3 * torch.randn((2, TOKENS, 1), generator=generator) + 0.03 * own


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
        names = ("kept_lower_bound", "kept", "paper_guaranteed", *(f"min_lambda_{end}" for end in ENDS))
        assert all(getattr(layer, name) is None for name in names)
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


@pytest.mark.parametrize("name", ["torch LayerNorm", "written out", "T5"])
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
    model = post_norm(nano_layer_norm(None, torch.ones(WIDTH)), strength=0.01)
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
