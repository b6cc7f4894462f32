"""Norms as others write them, under names that say little, and blocks that end in them."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS = 8, 6


class NanoLayerNorm(nn.Module):
    """nanoGPT's: LayerNorm with a bias that may be None."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Foo(nn.Module):
    """LayerNorm, written out, under no name."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt()


class T5LayerNorm(nn.Module):
    """RMSNorm under the name of LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(-2, 2, WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon)).to(self.weight.dtype)


class GemmaRMSNorm(nn.Module):
    """Its gain is 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (out * (1.0 + self.weight.float())).type_as(x)


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.full((WIDTH,), 0.7)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class UnitRows(nn.Module):
    """x/max(‖x‖, 1e-12)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class ScaleNorm(nn.Module):
    """g·x/‖x‖ with one g for all channels: RMSNorm with γ = g/√D, down to a length."""

    def __init__(self, shortest: float) -> None:
        super().__init__()
        self.g, self.shortest = nn.Parameter(torch.tensor(math.sqrt(2.0))), shortest

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / x.norm(dim=-1, keepdim=True).clamp(min=self.shortest)


class RowsGroupNorm(nn.Module):
    """GroupNorm of one group for each token by itself: LayerNorm."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, WIDTH)).reshape(x.shape)


class OverTokens(nn.Module):
    """A norm of (B, D, T), as for pictures."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class PowerNorm(nn.Module):
    """By the running mean square of each channel, fixed in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.linspace(0.1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.square.sqrt()


class DynamicTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * x) * 1.2 + 0.1


class CompressedRMSNorm(nn.Module):
    """RMSNorm of D + 1 channels, of which the last makes the sum 0."""

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square()
        return x / (square / (WIDTH + 1) + 1e-6).sqrt()


class HarvardLayerNorm(nn.Module):
    """Of the annotated transformer: ε outside of the root."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


class PartialRMSNorm(nn.Module):
    """The mean square of the first channels stands for that of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x[..., :2].square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Subtracting(nn.Module):
    """LayerNorm of tokens less their mean token."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x - x.mean(-2, keepdim=True), (WIDTH,))


class Conditioned(nn.Module):
    """Its gain comes from the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)) * (1 + x.mean((-2, -1), keepdim=True).sigmoid())


def batch_norm(affine: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH, affine=affine)
    with torch.no_grad():
        norm.running_var.copy_(torch.linspace(0.01, 100, WIDTH))
    return OverTokens(norm)


def layer_norm(gain: float = 1.0) -> nn.LayerNorm:
    norm = nn.LayerNorm(WIDTH)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(gain / 3, gain, WIDTH))
        norm.bias.normal_()
    return norm


KNOWN = {
    "torch LayerNorm": (lambda: layer_norm(0.1), "LayerNorm"),
    "LayerNorm without gain": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "LayerNorm"),
    "nanoGPT": (lambda: NanoLayerNorm(True), "LayerNorm"),
    "nanoGPT without bias": (lambda: NanoLayerNorm(False), "LayerNorm"),
    "Foo": (Foo, "LayerNorm"),
    "GroupNorm of rows": (RowsGroupNorm, "LayerNorm"),
    "torch RMSNorm": (lambda: nn.RMSNorm(WIDTH), "RMSNorm"),
    "T5": (T5LayerNorm, "RMSNorm"),
    "Gemma": (GemmaRMSNorm, "RMSNorm"),
    "Llama": (LlamaRMSNorm, "RMSNorm"),
    "Identity": (nn.Identity, "none"),
    "Dropout": (nn.Dropout, "none"),
}
UNKNOWN = {
    "F.normalize": UnitRows,
    "ScaleNorm": lambda: ScaleNorm(1e-12),
    "ScaleNorm down to 1e-3": lambda: ScaleNorm(1e-3),
    "GroupNorm of two groups": lambda: RowsGroupNorm(2),
    "GroupNorm over tokens": lambda: OverTokens(nn.GroupNorm(1, WIDTH)),
    "GroupNorm of channels over tokens": lambda: OverTokens(nn.GroupNorm(WIDTH, WIDTH)),
    "InstanceNorm": lambda: OverTokens(nn.InstanceNorm1d(WIDTH, affine=True)),
    "BatchNorm": batch_norm,
    "BatchNorm without gain": lambda: batch_norm(affine=False),
    "LayerNorm over tokens too": lambda: nn.LayerNorm((TOKENS, WIDTH)),
    "PowerNorm": PowerNorm,
    "DyT": DynamicTanh,
    "CRMSNorm": CompressedRMSNorm,
    "annotated transformer": HarvardLayerNorm,
    "partial RMSNorm": PartialRMSNorm,
    "less the mean token": Subtracting,
    "gain by sequence": Conditioned,
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
        mean = x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None]
        return self.out(mean)


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
