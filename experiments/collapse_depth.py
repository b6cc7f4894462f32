"""Collapse of tokens through 64 layers, by mixer, skip, norm and gate, at random weights.

Claim     "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", ICLR 2025:
          without a skip tokens become alike with depth, S4's by its weights, Mamba's also by its input; with
          large weights they need not; a λ-skip keeps them apart.
Asked     μ, μ/‖Y‖_F and effective rank by depth for softmax, linear attention, S4D, Mamba, Mamba-2 and TSSA ×
          {no skip, λ = −2, −1, 0.5, 1, 2} × {no norm, pre, post} × {gate off, on}; without skip, norm and
          gate also weights × input sizes. A learned λ starts as the fixed one of its initial value.
Setting   T = D = 64, 4 heads, states of 16 numbers, blocks without feed-forward part or biases, linear
          weights N(0, 1/fan-in), the state spaces' own parameters as published, input N(0, 1); 3 seeds of
          weights and input; float64.
Hardware  two CPU cores, some minutes
Expect    causal softmax, no skip, post-norm: μ/‖Y‖ below 0.05 at layer 64; TSSA above 0.9 with any skip

    python -m experiments run collapse_depth
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor, nn

from experiments.collapse_depth_page import figures, tables
from experiments.study import Study
from rankwise.measures import state_effective_rank, token_spread
from rankwise.models import ToSTConfig
from rankwise.models.block import Block
from rankwise.models.mixers.recurrent import ShortConvolution

MIXERS = {
    "softmax": ("softmax", True),
    "softmax, full": ("softmax", False),
    "linear": ("linear", True),
    "linear, full": ("linear", False),
    "s4d": ("s4d", True),
    "mamba": ("mamba", True),
    "mamba2": ("mamba2", True),
    "tssa": ("tssa", True),
}
"""By name in tables: the mixer, and whether it is causal."""
SKIPS = (0.0, -2.0, -1.0, 0.5, 1.0, 2.0)
"""λ; 0 is no skip."""
Measured = tuple[list[list[float]], list[list[float]], list[list[float]]]
NORMS = ("none", "pre", "post")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    depth: int = 64
    tokens: int = 64
    width: int = 64
    heads: int = 4
    seeds: int = 3
    weights: tuple[float, ...] = (0.5, 1.0, 4.0)
    inputs: tuple[float, ...] = (0.1, 1.0, 10.0)
    mixers: tuple[str, ...] = tuple(MIXERS)

    @property
    def layers(self) -> list[int]:
        """Where states are measured: 0, 1, 2, 4, … and the last."""
        powers = [2**k for k in range(math.ceil(math.log2(self.depth)))]
        return [0, *powers, self.depth]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One stack."""

    mixer: str
    skip: float = 0.0
    """λ; 0 is no skip."""
    norm: str = "none"
    gate: bool = False
    weights: float = 1.0
    """Factor on every linear weight."""
    inputs: float = 1.0
    """Standard deviation of the input."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one setting did: means over seeds by measured layer; None where a seed is not finite."""

    setting: Setting
    share: list[float | None]
    """μ/‖Y‖_F."""
    share_std: list[float | None]
    log10_mu: list[float | None]
    """Mean of log10 μ; None also where μ is 0."""
    rank: list[float | None]
    """Effective rank of the token states."""


def groups(recipe: Recipe) -> Iterator[list[Setting]]:
    """The grid of blocks, then that of weights and inputs: what differs in λ or input alone runs as one."""
    for mixer, norm, gate in product(recipe.mixers, NORMS, (False, True)):
        yield [Setting(mixer=mixer, norm=norm, gate=gate, skip=skip) for skip in SKIPS]
    for mixer, weights in product(recipe.mixers, recipe.weights):
        rows = [Setting(mixer=mixer, weights=weights, inputs=size) for size in recipe.inputs]
        yield [one for one in rows if (weights, one.inputs) != (1.0, 1.0)]


class RowSkips(nn.Module):
    """λ x + update, a λ for each row of the batch."""

    def __init__(self, skips: Sequence[float]) -> None:
        super().__init__()
        self.skips = torch.tensor(skips, dtype=torch.float64)[:, None, None]

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Add; without a skip the states never enter, not even as 0·∞."""
        return update + torch.where(self.skips == 0, 0.0, self.skips * x)


def config_of(setting: Setting, recipe: Recipe) -> ToSTConfig:
    """A block of this package."""
    mixer, causal = MIXERS[setting.mixer]
    return ToSTConfig(
        vocab_size=2,
        hidden_size=recipe.width,
        num_hidden_layers=1,
        num_attention_heads=recipe.heads,
        intermediate_size=0,
        layer_types=mixer,
        mixer_options={"s4d": {"state_dim": 8}, "mamba": {"state_dim": 16}, "mamba2": {"state_dim": 16}},
        causal=causal,
        position_bias=False,
        position_embeddings="none",
        use_bias=False,
        norm="none" if setting.norm == "none" else "layer",
        norm_position="post" if setting.norm == "post" else "pre",
        skip="fixed" if setting.skip else "none",
        skip_init=setting.skip or 1.0,
        gate=setting.gate,
    )


def redraw(block: Block, gain: float, seed: int) -> None:
    """Gaussian linear weights; what has a published start gets that, and a convolution no bias."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            noise = torch.randn(module.weight.shape, generator=draw, dtype=torch.float64)
            module.weight.copy_(gain / module.in_features**0.5 * noise)
        elif name.startswith("mixer.") and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, ShortConvolution):  # else a lost input would come back as a constant
            module.bias.zero_()  # type: ignore[union-attr]
    if hasattr(block.mixer, "reset_parameters"):
        block.mixer.reset_parameters()


@torch.no_grad()
def states_of(group: Sequence[Setting], recipe: Recipe, seed: int) -> Iterator[Tensor]:
    """Token states at the measured layers, a row for each setting."""
    block = Block(config_of(group[0], recipe), 0).double().eval()
    block.skip = RowSkips([one.skip for one in group])  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, recipe.tokens, recipe.width, generator=draw, dtype=torch.float64)
    x = x * torch.tensor([one.inputs for one in group], dtype=torch.float64)[:, None, None]
    yield x
    for layer in range(1, recipe.depth + 1):
        redraw(block, group[0].weights, 1000 * seed + layer)
        x = block(x)[0]
        if layer in recipe.layers:
            yield x


def measured(group: Sequence[Setting], recipe: Recipe, seed: int) -> Measured:
    """Share, log10 μ and effective rank, by layer, then by setting."""
    states = list(states_of(group, recipe, seed))
    return (
        [token_spread(x).tolist() for x in states],
        [[log10(v) for v in token_spread(x, normalized=False).tolist()] for x in states],
        [state_effective_rank(x).tolist() for x in states],
    )


def curves_of(group: Sequence[Setting], seeds: Sequence[Measured]) -> list[Curve]:
    """Gather what the seeds gave for a group."""
    share, mu, rank = zip(*seeds, strict=True)
    return [
        Curve(one, *gather(share, place), gather(mu, place)[0], gather(rank, place)[0])
        for place, one in enumerate(group)
    ]


def gather(
    seeds: Sequence[Sequence[Sequence[float]]], place: int
) -> tuple[list[float | None], list[float | None]]:
    """Mean and standard deviation over seeds, by layer, for one row."""
    layers = list(zip(*([layer[place] for layer in seed] for seed in seeds), strict=True))
    mean = [sum(layer) / len(layer) for layer in layers]
    spread = [float(torch.tensor(layer).std(correction=0)) for layer in layers]
    return [number(x) for x in mean], [number(x) for x in spread]


def number(value: float) -> float | None:
    """Four digits; None where JSON has no word for it."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def log10(value: float) -> float:
    """Minus infinity for 0."""
    return math.log10(value) if value > 0 else -math.inf if value == 0 else math.nan


def measure(recipe: Recipe) -> dict[str, object]:
    """Return the curves of every setting, means over seeds."""
    grid = [group for group in groups(recipe) if group]
    found = [[measured(group, recipe, seed) for seed in range(recipe.seeds)] for group in grid]
    curves = [curve for group, seeds in zip(grid, found, strict=True) for curve in curves_of(group, seeds)]
    return {
        "settings": asdict(recipe),
        "layers": recipe.layers,
        "unit": "means over seeds by layer; share = μ/‖Y‖_F, share_std its spread, rank = effective rank",
        "curves": [asdict(one) for one in curves],
    }


STUDY = Study("collapse_depth", lambda data: measure(Recipe()), "collapse-depth", tables, figures)
