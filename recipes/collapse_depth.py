"""Collapse of tokens through 64 layers, by mixer, skip, norm and gate, at random weights.

Claim     "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", ICLR 2025:
          without a skip tokens become alike with depth, S4's by its weights, Mamba's also by its input; with
          large weights they need not; a λ-skip keeps them apart.
Asked     μ, μ/‖Y‖_F and effective rank by depth for softmax, linear attention, S4D, Mamba, Mamba-2 and TSSA ×
          {no skip, λ = −2, −1, 0.5, 1, 2, learned from −1} × {no norm, pre, post} × {gate off, on}; without
          skip, norm and gate also weights × input sizes.
Setting   T = D = 64, 4 heads, blocks without feed-forward part or biases, linear weights N(0, 1/fan-in), the
          state spaces' own parameters as published, input N(0, 1); 3 seeds of weights and input; float64.
Hardware  two CPU cores, some minutes
Expect    causal softmax, no skip, post-norm: μ/‖Y‖ below 0.05 at layer 64; TSSA above 0.9 with any skip

    python -m recipes.collapse_depth            writes recipes/results/collapse_depth.json and the docs page
    python -m recipes.collapse_depth --quick    16 layers, one seed; give --results and --page of your own
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

import rankwise
from rankwise.files import write_whole
from rankwise.measures import state_effective_rank, token_collapse
from rankwise.models import ToSTConfig
from rankwise.models.block import Block
from recipes.collapse_depth_page import write_page

RESULTS = Path(__file__).with_name("results") / "collapse_depth.json"
PAGE = Path(__file__).parents[1] / "docs" / "collapse-depth.md"
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
SKIPS = {
    "none": ("none", 1.0),
    "-2": ("fixed", -2.0),
    "-1": ("fixed", -1.0),
    "0.5": ("fixed", 0.5),
    "1": ("fixed", 1.0),
    "2": ("fixed", 2.0),
    "learned": ("learned", -1.0),
}
"""By name in tables: kind and λ. A learned λ starts at the paper's −1."""
NORMS = ("none", "pre", "post")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    depth: int = 64
    tokens: int = 64
    width: int = 64
    heads: int = 4
    seeds: int = 3
    weights: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
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
    skip: str = "none"
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


def settings(recipe: Recipe) -> Iterator[Setting]:
    """The grid of blocks, then that of weights and inputs."""
    for mixer, norm, gate, skip in product(recipe.mixers, NORMS, (False, True), SKIPS):
        yield Setting(mixer=mixer, norm=norm, gate=gate, skip=skip)
    for mixer, weights, inputs in product(recipe.mixers, recipe.weights, recipe.inputs):
        if (weights, inputs) != (1.0, 1.0):
            yield Setting(mixer=mixer, weights=weights, inputs=inputs)


def config_of(setting: Setting, recipe: Recipe) -> ToSTConfig:
    """A block of this package."""
    mixer, causal = MIXERS[setting.mixer]
    kind, init = SKIPS[setting.skip]
    return ToSTConfig(
        vocab_size=2,
        hidden_size=recipe.width,
        num_hidden_layers=1,
        num_attention_heads=recipe.heads,
        intermediate_size=0,
        layer_types=mixer,
        causal=causal,
        position_bias=False,
        position_embeddings="none",
        use_bias=False,
        norm="none" if setting.norm == "none" else "layer",
        norm_position="post" if setting.norm == "post" else "pre",
        skip=kind,
        skip_init=init,
        gate=setting.gate,
    )


def layer_of(setting: Setting, recipe: Recipe, draw: torch.Generator) -> Block:
    """A block with Gaussian linear weights; only what publishes a start of its own keeps it."""
    block = Block(config_of(setting, recipe), 0).double().eval()
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("step_proj"):
            gain = setting.weights / module.in_features**0.5
            module.weight.copy_(gain * torch.randn(module.weight.shape, generator=draw, dtype=torch.float64))
    return block


@torch.no_grad()
def states_of(setting: Setting, recipe: Recipe, seed: int) -> Iterator[Tensor]:
    """Token states at the measured layers. The same seed draws the same weights, whatever the block."""
    torch.manual_seed(seed)  # the state spaces' own parameters
    draw = torch.Generator().manual_seed(seed)
    size = (1, recipe.tokens, recipe.width)
    x = setting.inputs * torch.randn(size, generator=draw, dtype=torch.float64)
    yield x
    for layer in range(1, recipe.depth + 1):
        x = layer_of(setting, recipe, draw)(x)[0]
        if layer in recipe.layers:
            yield x


def curve_of(setting: Setting, recipe: Recipe) -> Curve:
    """Measure one setting with every seed."""
    share, mu, rank = [], [], []
    for seed in range(recipe.seeds):
        states = list(states_of(setting, recipe, seed))
        share.append([float(token_collapse(x)) for x in states])
        mu.append([log10(float(token_collapse(x, normalized=False))) for x in states])
        rank.append([float(state_effective_rank(x)) for x in states])
    spread = [float(torch.tensor(layer).std(correction=0)) for layer in zip(*share, strict=True)]
    return Curve(setting, means(share), [number(x) for x in spread], means(mu), means(rank))


def means(seeds: Sequence[Sequence[float]]) -> list[float | None]:
    """Mean over seeds, by layer."""
    return [number(sum(layer) / len(layer)) for layer in zip(*seeds, strict=True)]


def number(value: float) -> float | None:
    """Four digits; None where JSON has no word for it."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def log10(value: float) -> float:
    """Minus infinity for 0."""
    return math.log10(value) if value > 0 else -math.inf if value == 0 else math.nan


def curves(recipe: Recipe, wanted: Iterable[Setting] | None = None) -> list[Curve]:
    """Measure every setting."""
    return [curve_of(one, recipe) for one in (settings(recipe) if wanted is None else wanted)]


def report_of(recipe: Recipe, found: Sequence[Curve], seconds: float) -> dict[str, object]:
    """What was run and what came out."""
    return {
        "recipe": "collapse_depth",
        "command": " ".join(["python", "-m", "recipes.collapse_depth", *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds),
        "settings": asdict(recipe),
        "layers": recipe.layers,
        "unit": "mean over seeds by layer; share = μ/‖Y‖_F with its standard deviation, rank = effective rank",
        "curves": [asdict(one) for one in found],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rankwise": rankwise.__version__,
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe, print its tables, write the results and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="16 layers, one seed")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--mixers", nargs="+", choices=list(MIXERS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    recipe = Recipe(depth=16, seeds=1, weights=(1.0, 4.0), inputs=(0.1, 1.0)) if options.quick else Recipe()
    given = {name: getattr(options, name) for name in ("depth", "seeds", "mixers")}
    given["mixers"] = tuple(given["mixers"]) if given["mixers"] else None
    recipe = replace(recipe, **{name: value for name, value in given.items() if value})
    start = time.monotonic()
    found = curves(recipe)
    report = report_of(recipe, found, time.monotonic() - start)
    text = json.dumps(report, ensure_ascii=False)
    text = text.replace('{"setting"', '\n{"setting"').replace('"versions"', '\n"versions"')
    write_whole(options.results, text + "\n", "results")
    print(write_page(options.page, json.loads(text)))
    print(f"\nwrote {options.results} and {options.page}")


if __name__ == "__main__":
    main()
