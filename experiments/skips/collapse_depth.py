"""Collapse of tokens through 64 layers, by mixer, skip, norm and gate, at random weights.

Claim     "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", ICLR 2025:
          without a skip tokens become alike with depth, in S4 by its weights, in Mamba also by its input;
          with large weights they need not; a λ-skip keeps them apart.
Question  μ, μ/‖Y‖_F and effective rank by depth for softmax, linear attention, S4D, Mamba, Mamba-2 and TSSA ×
          {no skip, λ = −2, −1, 0.5, 1, 2} × {no norm, pre, post} × {gate off, on}; without skip, norm and
          gate also weights × input sizes. A learned λ starts as the fixed λ of its initial value.
Setting   T = D = 64, 4 heads, states of 16 numbers, blocks without feed-forward part or biases, linear
          weights N(0, 1/fan-in), the state spaces' own parameters as published, input N(0, 1); 3 seeds of
          weights and input; float64.
Hardware  two CPU cores, some minutes
Expect    causal softmax, no skip, post-norm: token spread < 0.05 at layer 64; TSSA > 0.9 with any skip
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from experiments.figures import Panel, chart
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.measures import absolute_spread, spread, state_effective_rank
from rankwise.models import ToSTConfig
from rankwise.models.block import Block
from rankwise.models.mixers.recurrent import ShortConvolution

VARIANTS = {
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
DRAWN = ("softmax", "linear", "s4d", "mamba", "tssa")
"""Mixers of the figure; the others differ little from one of them."""
COLORS = {0.0: "#111111", -2.0: "#b2182b", -1.0: "#ef8a62", 0.5: "#92c5de", 1.0: "#2166ac", 2.0: "#1b7837"}
"""Colors of the lines by λ; 0 means without a skip."""
NORMS = {"none": "no norm", "pre": "pre-norm", "post": "post-norm"}
FLOOR = -6
"""Lowest log10 of the token spread that the figure shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    depth: int = 64
    tokens: int = 64
    width: int = 64
    heads: int = 4
    seeds: int = 3
    weights: tuple[float, ...] = (0.5, 1.0, 4.0)
    inputs: tuple[float, ...] = (0.1, 1.0, 10.0)
    mixers: tuple[str, ...] = tuple(VARIANTS)

    @property
    def layers(self) -> list[int]:
        """Numbers of the measured layers: 0, 1, 2, 4, … and the last."""
        powers = [2**k for k in range(math.ceil(math.log2(self.depth)))]
        return [0, *powers, self.depth]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One stack of equal blocks."""

    mixer: str
    skip: float = 0.0
    """λ; 0 means without a skip."""
    norm: str = "none"
    gate: bool = False
    weights: float = 1.0
    """Factor on every linear weight."""
    inputs: float = 1.0
    """Standard deviation of the input."""


def groups(settings: Settings) -> Iterator[list[Stack]]:
    """Yield the grid of blocks, then the grid of weights and inputs.

    Stacks that differ in λ or input alone run together.
    """
    for mixer, norm, gate in product(settings.mixers, NORMS, (False, True)):
        yield [Stack(mixer=mixer, norm=norm, gate=gate, skip=skip) for skip in COLORS]
    for mixer, weights in product(settings.mixers, settings.weights):
        rows = [Stack(mixer=mixer, weights=weights, inputs=size) for size in settings.inputs]
        yield [one for one in rows if (weights, one.inputs) != (1.0, 1.0)]


class RowSkips(nn.Module):
    """λ x + update, with a λ for each row of the batch."""

    def __init__(self, skips: Sequence[float]) -> None:
        super().__init__()
        self.skips = torch.tensor(skips, dtype=torch.float64)[:, None, None]

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Return the sum; without a skip the states never enter, not as 0·∞ either."""
        return update + torch.where(self.skips == 0, 0.0, self.skips * x)


def config_of(stack: Stack, settings: Settings) -> ToSTConfig:
    mixer, causal = VARIANTS[stack.mixer]
    return ToSTConfig(
        vocab_size=2,
        hidden_size=settings.width,
        num_hidden_layers=1,
        num_attention_heads=settings.heads,
        intermediate_size=0,
        layer_types=mixer,
        mixer_options={"s4d": {"state_dim": 8}, "mamba": {"state_dim": 16}, "mamba2": {"state_dim": 16}},
        causal=causal,
        position_bias=False,
        position_embeddings="none",
        use_bias=False,
        norm="none" if stack.norm == "none" else "layer",
        norm_position="post" if stack.norm == "post" else "pre",
        skip="fixed" if stack.skip else "none",
        skip_init=stack.skip or 1.0,
        gate=stack.gate,
    )


def redraw(block: Block, gain: float, seed: int) -> None:
    """Draw Gaussian linear weights; reset what has a published start; set the convolution's bias to 0."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            noise = torch.randn(module.weight.shape, generator=draw, dtype=torch.float64)
            module.weight.copy_(gain / module.in_features**0.5 * noise)
        elif name.startswith("mixer.") and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, ShortConvolution):  # otherwise a lost input would come back as a constant
            module.bias.zero_()  # type: ignore[union-attr]
    if hasattr(block.mixer, "reset_parameters"):
        block.mixer.reset_parameters()


@torch.no_grad()
def states_of(group: Sequence[Stack], settings: Settings, seed: int) -> Iterator[Float[Tensor, "S T D"]]:
    """Yield the token states at the measured layers, a row per stack."""
    block = Block(config_of(group[0], settings), 0).double().eval()
    block.skip = RowSkips([one.skip for one in group])  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, settings.tokens, settings.width, generator=draw, dtype=torch.float64)
    x = x * torch.tensor([one.inputs for one in group], dtype=torch.float64)[:, None, None]
    yield x
    for layer in range(1, settings.depth + 1):
        redraw(block, group[0].weights, 1000 * seed + layer)
        x = block(x)[0]
        if layer in settings.layers:
            yield x


def curves_of(group: Sequence[Stack], settings: Settings) -> list[Report]:
    """Return the curves of a group: means over seeds by measured layer, None if a seed is not finite."""
    runs = []
    for seed in range(settings.seeds):
        states = list(states_of(group, settings, seed))
        share = [spread(x) for x in states]
        mu = [absolute_spread(x).log10() for x in states]
        runs.append([share, mu, [state_effective_rank(x) for x in states]])
    found = np.array(runs)  # seed, measure, layer, stack
    with np.errstate(invalid="ignore"):  # sums of infinities
        mean = found.mean(0)
    std = [
        [float(torch.tensor(values).std(correction=0)) for values in layer]
        for layer in found[:, 0].transpose(1, 2, 0).tolist()
    ]
    return [
        {
            "setting": asdict(one),
            "share": digits(mean[0, :, at].tolist()),
            "share_std": digits([layer[at] for layer in std]),
            "log10_mu": digits(mean[1, :, at].tolist()),
            "rank": digits(mean[2, :, at].tolist()),
        }
        for at, one in enumerate(group)
    ]


def digits(values: Sequence[float]) -> list[float | None]:
    """Return numbers with four digits, None for infinities and NaN, which JSON cannot hold."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def measure(settings: Settings) -> Report:
    return {
        "settings": asdict(settings),
        "layers": settings.layers,
        "unit": "means over seeds by layer; share = μ/‖Y‖_F, share_std its spread, rank = effective rank",
        "curves": [curve for group in groups(settings) if group for curve in curves_of(group, settings)],
    }


def tables(report: Report) -> dict[str, str]:
    return {
        "seeds": str(report["settings"]["seeds"]),
        "grid": "\n\n".join(grid_tables(report)),
        "weights": "\n\n".join(weight_tables(report)),
    }


def select(report: Report, **wanted: Any) -> list[Report]:
    """Return the curves of stacks with these settings, and the usual weights and inputs if not given."""
    usual = {"weights": 1.0, "inputs": 1.0, **wanted}
    return [one for one in report["curves"] if usual.items() <= one["setting"].items()]


def grid_tables(report: Report) -> Iterator[str]:
    """Yield token spread and effective rank at the last layer, one table per norm and gate."""
    for (norm, name), gate in product(NORMS.items(), (False, True)):
        rows: dict[str, list[str]] = {}
        for one in select(report, norm=norm, gate=gate):
            rows.setdefault(one["setting"]["mixer"], []).append(cell(one))
        skips = dict.fromkeys(one["setting"]["skip"] for one in select(report))
        table = markdown_table(
            ["mixer", *map(skip_name, skips)], [[name, *row] for name, row in rows.items()]
        )
        yield f"{name}, gate {'on' if gate else 'off'}, layer {report['layers'][-1]}\n\n{table}"


def weight_tables(report: Report) -> Iterator[str]:
    """Yield two tables by size of weights and input, without skip, norm and gate: `cell`, and log10 μ."""
    plain = [
        one
        for one in report["curves"]
        if {"skip": 0, "norm": "none", "gate": False}.items() <= one["setting"].items()
    ]
    by_size = {tuple(one["setting"][key] for key in ("mixer", "weights", "inputs")): one for one in plain}
    sizes = sorted({key[1:] for key in by_size})
    for name, show in (("token spread (effective rank)", cell), ("log10 μ", power)):
        rows = [
            [mixer, *(show(by_size[mixer, *size]) for size in sizes)]
            for mixer in dict.fromkeys(key[0] for key in by_size)
        ]
        head = f"{name} without skip, norm and gate, layer {report['layers'][-1]}, by weights × input"
        table = markdown_table(["mixer", *(f"{weight:g} × {size:g}" for weight, size in sizes)], rows)
        yield f"{head}\n\n{table}"


def cell(one: Report) -> str:
    """Return share ± spread (effective rank), or how the states ended."""
    share, spread, rank = (one[name][-1] for name in ("share", "share_std", "rank"))
    if share is None:
        return "∞"
    if rank == 0:
        return "0"
    shown = f"{share:.2f}" if share >= 0.01 else f"{share:.0e}" if share else "0"
    more = f" ± {spread:.2f}" if share >= 0.01 and spread is not None and spread >= 0.005 else ""
    return f"{shown}{more} ({rank:.0f})" if rank is not None else shown


def power(one: Report) -> str:
    """Return the mean log10 μ, or how the states ended."""
    if one["share"][-1] is None:
        return "∞"
    value = one["log10_mu"][-1]
    return "−∞" if value is None else f"{value:.1f}"


def skip_name(skip: float) -> str:
    return f"λ = {skip:g}" if skip else "no skip"


def figures(report: Report) -> dict[str, str]:
    """Return panels of norms by `DRAWN`: token spread over depth for each λ, gate off."""
    width, height = 100 + 132 * len(DRAWN), 426
    end = len(report["layers"]) - 1
    parts = []
    for (column, mixer), (row, norm) in product(enumerate(DRAWN), enumerate(NORMS)):
        panel = Panel(
            (0, end), (FLOOR, 0), left=100 + 132 * column, top=44 + 114 * row, width=118, height=100
        )
        parts.append(panel.line([(0, 0), (end, 0), (end, FLOOR), (0, FLOOR), (0, 0)], "#bbbbbb"))
        if row == 0:
            parts.append(panel.text(end / 2, 0, mixer, down=-8))
        if column == 0:
            parts.append(panel.text(0, FLOOR / 2, NORMS[norm], "end", right=-16))
            parts += [
                panel.text(0, at, words, "end", right=-4, down=6) for at, words in ((0, "1"), (FLOOR, "1e-6"))
            ]
        for one in select(report, mixer=mixer, norm=norm, gate=False):
            shares = [share for share in one["share"] if share is not None]  # a line ends at infinite states
            points = [(at, math.log10(max(share, 10**FLOOR))) for at, share in enumerate(shares)]
            parts.append(panel.line(points, COLORS[one["setting"]["skip"]]))
    legend = Panel((0, 5), (0, 1), left=100, top=12, width=520, height=height - 22)
    for at, (skip, color) in enumerate(COLORS.items()):
        parts += [legend.dot(at, 1, color), legend.text(at, 1, skip_name(skip), "start", right=10, down=5)]
    depth = f"token spread (log scale) at layers 0, 1, 2, 4 … {report['layers'][-1]}, left to right"
    parts.append(legend.text(0, 0, depth, "start"))
    return {"collapse-depth.svg": chart("Token spread by depth, norm and λ", parts, width, height, font=16)}


STUDY = Study("collapse_depth", lambda data: measure(Settings()), "evidence/collapse-depth", tables, figures)
