"""Observed sums and norms: names do not depend on the batch, and norms are read from their outputs."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT
from tests.skips.cases import FOUND
from tests.support.modules import Block, CausalAverage, kind
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.errors import SkipError
from rankwise.measures import absolute_spread as mu
from rankwise.skips import LayerCertificate, SkipCertificate, add_lambda_skip, certify_skip, skips_of
from rankwise.skips.observe import Norm, ObservedSkip, observe, read_norm

WIDTH, TOKENS = 8, 6
SLACK = 1e-4
"""Relative tolerance: states are sums of float32 numbers, with a constant of ten times their size."""


# --- sums ------------------------------------------------------------------------------------------------


def observed(model: nn.Module, ids: Tensor, scale: float = 0.5) -> list[ObservedSkip]:
    sites = list(skips_of(model).places.values())
    return observe(model, {"input_ids": ids}, sites, {site.name: scale for site in sites})


def random_ids(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Bamba", "GPT-2", "ALBERT"])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 8), (1, 24), (3, 5)])
def test_sums_are_observed_in_batches_of_other_sizes(name: str, sequences: int, tokens: int) -> None:
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, example=batch)
    seen = observed(model, random_ids(sequences, tokens))
    assert {one.place.name for one in seen} == set(skips)
    assert len(seen) == sum(len(site.sums) for site in skips.places.values())
    for one in seen:
        assert one.x.shape == one.branch.shape == (sequences, tokens, 32)
        assert torch.allclose(one.total, 0.5 * one.x + one.branch, atol=1e-5)


def test_sums_of_a_scan_do_not_change_the_sites() -> None:
    model, batch = FOUND["Mamba"][0]()
    add_lambda_skip(model, example=batch)
    inputs: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for one, residual in zip(observed(model, random_ids(2, 24), scale=1.0), inputs, strict=True):
        assert torch.equal(one.x, residual)
    assert len(certify_skip(model, {"input_ids": random_ids(2, 24)}).layers) == 2


def test_sites_are_found_in_a_larger_model_and_in_a_part() -> None:
    model, batch = FOUND["BERT"][0]()
    add_lambda_skip(model, example=batch)
    ids = batch["input_ids"]
    outer = kind(
        lambda self, input_ids: self.inner(input_ids=input_ids)[0], inner=lambda: copy.deepcopy(model)
    )
    inside = observed(outer(), ids)
    for one, other in zip(inside, observed(model, ids), strict=True):
        assert torch.equal(one.total, other.total)
        assert one.place.norm == f"inner.{other.place.norm}"
    (site,) = skips_of(copy.deepcopy(model.encoder.layer[1])).places.values()
    assert len(skips_of(model)) == BERT["num_hidden_layers"]
    assert (site.block, site.norm) == ("attention.output", "attention.output.LayerNorm")


@pytest.mark.parametrize("change", ["block left out", "other tokens added"])
def test_a_batch_with_other_sums_than_the_example_is_refused(change: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer, self.out = CausalAverage(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            branch = self.mixer(x)
            if len(x) == 1:
                return self.out(x + branch)
            return self.out(branch if change == "block left out" else x + branch[:1])

    model = Changing().eval()
    sites = list(add_lambda_skip(model, example=torch.randn(1, TOKENS, WIDTH)).places.values())
    with pytest.raises(SkipError, match="site 'mixer': expected a batch with the sums of the example"):
        observe(model, torch.randn(2, TOKENS, WIDTH), sites, {})


# --- norms -----------------------------------------------------------------------------------------------


class Written(nn.Module):
    """Norm that is a function of the module and x, with attributes and parameters."""

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
    """Apply a norm of (B, D, T), as for images."""
    return Written(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def of_rows(groups: int) -> nn.Module:
    """Apply GroupNorm to each token separately; with one group it is LayerNorm."""
    norm = nn.GroupNorm(groups, WIDTH)
    return Written(lambda self, x: self.norm(x.reshape(-1, WIDTH)).reshape(x.shape), norm=norm)


def then(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Change the output of a LayerNorm."""
    return Written(lambda self, x: change(self.norm(x)), norm=nn.LayerNorm(WIDTH))


def nano_layer_norm(bias: Tensor | None, weight: Tensor) -> nn.Module:
    """Return nanoGPT's LayerNorm, whose bias may be None."""
    return Written(
        lambda self, x: F.layer_norm(x, (WIDTH,), self.weight, self.bias, 1e-5), weight=weight, bias=bias
    )


def weighted_rms(
    weight: Tensor, eps: float, name: str = "variance_epsilon", offset: float = 0.0
) -> nn.Module:
    """Return the RMSNorm of T5 and Llama, or of Gemma, whose gain is 1 + weight."""
    return Written(lambda self, x: rms(x, eps) * (offset + self.weight), weight=weight, **{name: eps})


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_var.copy_(torch.linspace(0.01, 100, WIDTH))
    return over_tokens(norm)


def layer_norm(gain: float = 1.0) -> nn.LayerNorm:
    norm = nn.LayerNorm(WIDTH)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(gain / 3, gain, WIDTH))
        norm.bias.normal_()
    return norm


def ramp(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, WIDTH)


KNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch LayerNorm": (lambda: layer_norm(0.1), "LayerNorm"),
    "LayerNorm without gain": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "LayerNorm"),
    "nanoGPT": (lambda: nano_layer_norm(ramp(-1, 1), ramp(0.5, 1.5)), "LayerNorm"),
    "nanoGPT without bias": (lambda: nano_layer_norm(None, ramp(0.5, 1.5)), "LayerNorm"),
    "written out": (lambda: Written(lambda _, x: rms(centred(x), 0.01)), "LayerNorm"),
    "GroupNorm of rows": (lambda: of_rows(1), "LayerNorm"),
    "torch RMSNorm": (lambda: nn.RMSNorm(WIDTH), "RMSNorm"),
    "T5": (lambda: weighted_rms(ramp(-2, 2), 1e-6), "RMSNorm"),
    "Gemma": (lambda: weighted_rms(ramp(-0.5, 0.5), 1e-6, "eps", offset=1.0), "RMSNorm"),
    "Llama": (lambda: weighted_rms(torch.full((WIDTH,), 0.7), 1e-5), "RMSNorm"),
    "LayerNorm and dropout": (lambda: then(lambda x: F.dropout(x, 0.1, False)), "LayerNorm"),
    "Identity": (nn.Identity, "none"),
    "Dropout": (nn.Dropout, "none"),
}
FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "F.normalize": lambda _, x: F.normalize(x, dim=-1),
    "ScaleNorm": lambda _, x: 1.4 * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3),
    "DyT": lambda _, x: torch.tanh(0.5 * x) * 1.2 + 0.1,
    "partial RMSNorm": lambda _, x: x / (x[..., :2].square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    "without the mean token": lambda _, x: F.layer_norm(centred(x, -2), (WIDTH,)),
    "gain by sequence": lambda _, x: (
        F.layer_norm(x, (WIDTH,)) * (1 + x.mean((-2, -1), keepdim=True).sigmoid())
    ),
}
UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Written, function) for name, function in FUNCTIONS.items()},
    "GroupNorm of two groups": lambda: of_rows(2),
    "GroupNorm over tokens": lambda: over_tokens(nn.GroupNorm(1, WIDTH)),
    "BatchNorm": batch_norm,
    "clamped LayerNorm": lambda: then(lambda x: x.clamp(-0.05, 0.05)),
    "gain of 0": lambda: layer_norm(0.0),
}


class PostNorm(nn.Module):
    """Compute head(norm(x + mixer(x))), and store the output of the norm."""

    def __init__(self, norm: nn.Module, strength: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer, self.norm, self.head = CausalAverage(WIDTH, strength), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.norm(x + self.mixer(x))
        return self.head(self.state)


def tokens(similar: bool = False) -> Tensor:
    """Return random states; if ``similar``, states that nearly differ by a constant of all channels only."""
    own = torch.randn((2, TOKENS, WIDTH), generator=torch.Generator().manual_seed(1))
    common, constants = torch.randn((2, 1, WIDTH)), torch.randn((2, TOKENS, 1))
    return common + 3 * constants + 0.03 * own if similar else own


def certified(model: nn.Module, x: Tensor, scale: float) -> SkipCertificate:
    (skip,) = add_lambda_skip(model, example=torch.randn(2, TOKENS, WIDTH)).values()
    skip.data.fill_(scale)
    with torch.no_grad():
        certificate = certify_skip(model, x)
        model(x)
    return certificate


@pytest.mark.parametrize(
    ("name", "similar", "scale"),
    [*((name, False, -0.4) for name in [*KNOWN, *UNKNOWN]), *((name, True, 1.0) for name in KNOWN)],
)
def test_bounds_hold_for_the_state_after_the_norm(name: str, similar: bool, scale: float) -> None:
    build, kind = KNOWN[name] if name in KNOWN else (UNKNOWN[name], "unknown")
    model, x = PostNorm(build()).eval(), tokens(similar)
    certificate = certified(model, x, scale)
    layer = certificate.layers[0]
    assert layer.norm == kind
    if kind == "unknown":
        names = ("absolute_spread_ratio", "absolute_spread_ratio_bound", "min_lambda_proved")
        assert all(getattr(layer, name) is None for name in names)
        assert any(note.startswith("nothing is promised") for note in certificate.notes)
        return
    assert 0 <= layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio * (1 + SLACK)
    read = (centred(x) if kind == "LayerNorm" else x).double()
    if kind != "none":
        read = math.sqrt(WIDTH) * read / read.norm(dim=-1, keepdim=True)
    (skip,) = observe(model, x, list(skips_of(model).places.values()), {})
    gain = 1.0 if skip.norm.gain is None else float(skip.norm.gain.abs().min())
    assert (mu(model.state) >= gain * layer.absolute_spread_ratio_bound * mu(read) * (1 - SLACK)).all()


@pytest.mark.parametrize("name", ["torch LayerNorm", "written out", "T5"])
def test_the_proved_lambda_keeps_the_spread_after_the_norm(name: str) -> None:
    build = KNOWN[name][0]
    least = certified(PostNorm(build()).eval(), tokens(), 1.0).layers[0].min_lambda_proved
    assert math.isfinite(least)
    layer = certified(PostNorm(build()).eval(), tokens(), least).layers[0]
    assert (
        math.sqrt(0.5)
        <= layer.absolute_spread_ratio_bound * (1 + SLACK)
        <= layer.absolute_spread_ratio * (1 + 2 * SLACK)
    )


# --- which module is the norm ----------------------------------------------------------------------------


def layers_of(*modules: nn.Module) -> list[LayerCertificate]:
    return certify_skip(nn.Sequential(*modules).eval(), tokens()).layers


def inline(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a block that applies a function to the sum outside of any module."""
    return nn.Sequential(Block(CausalAverage(WIDTH), after=function), nn.Linear(WIDTH, WIDTH)).eval()


NO_MODULE = {
    "layer_norm": lambda h: F.layer_norm(h, (WIDTH,)),
    "normalize": F.normalize,
    "written out": lambda h: h / h.square().mean(-1, keepdim=True).sqrt(),
    "over tokens": lambda h: F.instance_norm(h.transpose(1, 2)).transpose(1, 2),
    "in place": lambda h: h.tanh_(),
}
NO_NORM = {
    "nothing": lambda h: h,
    "mean over tokens": lambda h: h.mean(1, keepdim=True),
    "first token": lambda h: h[:, :1],
    "a layer": nn.Linear(WIDTH, WIDTH),
    "a product": lambda h: h @ torch.ones(WIDTH, WIDTH),
    "another shape": lambda h: h.reshape(-1, WIDTH),
}


@pytest.mark.parametrize("name", [*NO_MODULE, *NO_NORM])
def test_a_norm_outside_of_modules_is_unknown_and_other_readers_are_not_norms(name: str) -> None:
    certificate = certify_skip(inline((NO_MODULE | NO_NORM)[name]), tokens())
    (layer,) = certificate.layers
    assert layer.norm == ("unknown" if name in NO_MODULE else "none")
    assert (layer.absolute_spread_ratio_bound is None) == (name in NO_MODULE)
    noted = any("reads the sum outside of any module" in note for note in certificate.notes)
    assert noted == (name in NO_MODULE)


# Computes the sum in a module of its own, with dropout between the sum and the norm.
AddOutside = kind(
    lambda self, x: self.norm(self.drop(self.add(x, self.mixer(x)))),
    mixer=lambda: CausalAverage(WIDTH),
    add=kind(lambda self, x, y: x + y),
    drop=lambda: nn.Dropout(0.1),
    norm=lambda: nn.LayerNorm(WIDTH),
)


def test_a_norm_outside_of_the_module_of_the_sum_is_found() -> None:
    post_norm = [part for _ in range(3) for part in (Block(CausalAverage(WIDTH)), nn.LayerNorm(WIDTH))]
    for modules in ([AddOutside() for _ in range(3)], post_norm):
        assert [layer.norm for layer in layers_of(*modules)] == ["LayerNorm"] * 3


@pytest.mark.parametrize("end", [nn.LayerNorm(WIDTH), nn.BatchNorm1d(TOKENS), nn.Tanh()])
def test_a_norm_after_a_stack_does_not_belong_to_the_last_block(end: nn.Module) -> None:
    blocks = [Block(CausalAverage(WIDTH), before=nn.LayerNorm(WIDTH)) for _ in range(2)]
    assert [layer.norm for layer in layers_of(*blocks, end)] == ["none", "none"]


class Parallel(nn.Module):
    """Compute x + f(x) + g(x) with a norm after the sum (``post``), or before f and g."""

    def __init__(self, post: bool) -> None:
        super().__init__()
        self.norm, self.mixer, self.post = nn.LayerNorm(WIDTH), CausalAverage(WIDTH), post
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        read = x if self.post else self.norm(x)
        total = x + self.mixer(read) + self.dense(read)
        return self.norm(total) if self.post else total


@pytest.mark.parametrize(("post", "norm"), [(True, "unknown"), (False, "none")])
def test_a_norm_that_reads_more_than_the_sum_is_unknown(post: bool, norm: str) -> None:
    stack = nn.Sequential(Parallel(post), Parallel(post), nn.LayerNorm(WIDTH)).eval()
    certificate = certify_skip(stack, tokens())
    assert [layer.norm for layer in certificate.layers] == [norm] * 2
    assert [layer.absolute_spread_ratio_bound is None for layer in certificate.layers] == [post] * 2
    assert any("does not receive the sum itself" in note for note in certificate.notes) == post


# --- recognition -----------------------------------------------------------------------------------------


def norm_of(module: nn.Module, x: Tensor) -> Norm:
    with torch.no_grad():
        return read_norm(module, x, module(x))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eps_and_gain_are_read_from_the_output(kind, size: float, eps: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    norm = kind(24, eps=eps).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24))
    found = norm_of(norm, size * torch.randn(2, 5, 24, dtype=dtype))
    assert found.kind == kind.__name__
    assert torch.allclose(found.gain, norm.weight.double(), rtol=1e-5, atol=1e-6)
    assert found.eps == pytest.approx(eps, rel=1e-3, abs=1e-16 * size**2)


def test_hooks_that_change_the_output_of_a_norm_count() -> None:
    norm = nn.LayerNorm(WIDTH)
    norm.register_forward_hook(lambda module, args, output: output.tanh())
    assert norm_of(norm, tokens()).kind == "unknown"
