"""Ranks of heads in deeper layers of random transformers, and the law of K* in ln T."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise._internals.rotary import ROPE_BASE, apply_rope, rope_angles
from rankwise.plan.planner import saturation
from rankwise.plan.ranks import RandomHead
from rankwise.theory import rank_barrier

BLOCKS = ("pre", "post", "attention")
"""Pre-norm as in GPT-2, Llama and ViT; post-norm as in BERT; attention alone, without skip, norm and MLP."""


@dataclass(frozen=True)
class Setting:
    """All that decides the law of one trial."""

    tokens: int
    mask: str = "full"
    inputs: str = "orthonormal"
    given: Tensor | None = None
    """(B, T, D) token states of the user's own; trial i reads sequence i mod B."""
    width: int | None = None
    heads: int | None = None
    """None: D // K, so that D = H·K."""
    kv_heads: int | None = None
    value_dim: int | None = None
    """None: as wide as queries and keys."""
    positions: str = "none"
    block: str = "attention"
    layers: int = 1
    temperature: float = 0.0
    delta: float = 1e-2
    seed: int = 0

    @property
    def dim(self) -> int:
        """D of the states."""
        if self.given is not None:
            return self.given.shape[-1]
        return max(self.tokens, 64) if self.width is None else self.width

    @cached_property
    def fixed_states(self) -> Float[Tensor, "T D"]:
        """Orthonormal rows: one draw serves all trials, for Gaussian weights turn it anyhow."""
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randn(self.dim, self.tokens, dtype=torch.float64, generator=generator)
        return torch.linalg.qr(columns).Q.mT.float()

    def generator(self, trial: int, *more: int) -> torch.Generator:
        """A stream of its own for each trial (and width)."""
        mixed = np.random.SeedSequence((self.seed, trial, *more)).generate_state(1)
        return torch.Generator().manual_seed(int(mixed[0]))


def token_states(setting: Setting, trial: int) -> Float[Tensor, "T D"]:
    """States of one trial, scaled so that the mean squared row norm is D; learned positions added.

    A learned position is a Gaussian row as long as a token's on average: both tables start from one
    distribution in the usual models.
    """
    generator = setting.generator(trial, 1)
    if setting.given is not None:
        states = setting.given[trial % len(setting.given)].float()
    elif setting.inputs == "orthonormal":
        states = setting.fixed_states
    else:
        states = torch.randn(setting.tokens, setting.dim, generator=generator)
    states = states / states.square().mean().sqrt()
    if setting.positions == "learned":
        states = states + torch.randn(states.shape, generator=generator)
    return states


def normalized(states: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    """LayerNorm without gain: rows centred, of norm √D."""
    return F.layer_norm(states, states.shape[-1:])


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """A weight with independent N(0, 1/fan-in) entries, fan-in first."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[0])


def with_rope(rows: Float[Tensor, "*H T K"]) -> Float[Tensor, "*H T K"]:
    """Return queries or keys with rotary positions 0 … T − 1."""
    tokens, width = rows.shape[-2:]
    return apply_rope(rows, *rope_angles(torch.arange(tokens), width, ROPE_BASE, rows.dtype), "halves")


@dataclass(frozen=True)
class RandomBlock:
    """One transformer block at random weights, for one width."""

    setting: Setting
    head_dim: int
    generator: torch.Generator

    @property
    def heads(self) -> int:
        """H."""
        setting = self.setting
        return max(1, setting.dim // self.head_dim) if setting.heads is None else setting.heads

    def query_key(
        self, states: Float[Tensor, "T D"]
    ) -> tuple[Float[Tensor, "H T K"], Float[Tensor, "Hkv T K"]]:
        """Queries and keys of all heads, positions in them."""
        states = normalized(states) if self.setting.block == "pre" else states
        query = self._split(states, self.heads, self.head_dim)
        key = self._split(states, self.setting.kv_heads or self.heads, self.head_dim)
        return (with_rope(query), with_rope(key)) if self.setting.positions == "rope" else (query, key)

    def mixed(
        self, states: Tensor, query: Float[Tensor, "H T K"], key: Float[Tensor, "Hkv T K"]
    ) -> Float[Tensor, "T D"]:
        """What softmax attention at τ = √K gives, through the output projection."""
        setting = self.setting
        states = normalized(states) if setting.block == "pre" else states
        value = self._split(states, len(key), setting.value_dim or self.head_dim)
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=setting.mask == "causal")
        joined = out.transpose(0, 1).flatten(1)
        return joined @ gaussian(self.generator, joined.shape[-1], setting.dim)

    def passed(self, states: Tensor, mixed: Tensor) -> Float[Tensor, "T D"]:
        """The rest of the block: skips, norms, an MLP of width 4 D."""
        if self.setting.block == "attention":
            return mixed
        after = self.setting.block == "post"
        states = normalized(states + mixed) if after else states + mixed
        hidden = F.gelu((states if after else normalized(states)) @ self._weight(1, 4))
        states = states + hidden @ self._weight(4, 1)
        return normalized(states) if after else states

    def _weight(self, rows: int, columns: int) -> Tensor:
        return gaussian(self.generator, rows * self.setting.dim, columns * self.setting.dim)

    def _split(self, states: Tensor, heads: int, width: int) -> Float[Tensor, "H T K"]:
        weight = gaussian(self.generator, self.setting.dim, heads * width)
        return (states @ weight).unflatten(-1, (heads, width)).transpose(0, 1)


def layer_ranks(
    setting: Setting, head_dim: int, trial: int, temperatures: tuple[float, ...], heads: int = 1
) -> Float[np.ndarray, "L M"]:
    """Return the mean rank over the first heads in each layer, by temperature in units of √K."""
    states = token_states(setting, trial)
    block = RandomBlock(setting, head_dim, setting.generator(trial, 3, head_dim))
    measures = [
        RandomHead(setting.tokens, mask=setting.mask, temperature=tau, delta=setting.delta)
        for tau in temperatures
    ]
    ranks = []
    for _ in range(setting.layers):
        query, key = block.query_key(states)
        pairs = list(zip(query[:heads], key[:heads], strict=True))
        ranks.append([sum(measure.rank(*pair) for pair in pairs) / heads for measure in measures])
        states = block.passed(states, block.mixed(states, query, key))
    return np.array(ranks)


def embed_randomly(ids: Tensor, width: int, seed: int = 0) -> Float[Tensor, "*batch T D"]:
    """Return an independent N(0, 1) row for each different id."""
    known, places = ids.unique(return_inverse=True)
    return torch.randn(len(known), width, generator=torch.Generator().manual_seed(seed))[places]


LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class LogLaw:
    """K* = intercept + slope·ln T, fitted to simulated lengths."""

    points: list[tuple[int, int, int, int]]
    """(T, K*, lower and upper end of its 95 % bootstrap interval)."""
    intercept: float
    slope: float
    residuals: list[float]
    """K* minus the line, for each length."""
    explained: float
    """R², the share of the variance of K* that the line explains."""
    half: list[float] = field(default_factory=list)
    """Width at which rank/T reaches half of the barrier, for each length: another reading of saturation."""
    unsaturated: list[int] = field(default_factory=list)
    """Lengths left out: their gain stayed above the tolerance at every width tried."""
    notes: list[str] = field(default_factory=list)
    """Lengths at which K* falls, and whether the intervals allow that it does not."""


def fit_log_law(
    mask: str = "full",
    tolerance: float = 0.01,
    lengths: tuple[int, ...] = LENGTHS,
    trials: int = 10,
    seed: int = 0,
) -> LogLaw:
    """Fit K* = a + b·ln T over lengths, for hardmax heads on orthonormal tokens.

    At long T curves flatten below the tolerance, so by this rule K* grows ever more slowly. The width that
    reaches half of the barrier grows faster than ln T.
    Cost: O(trials·T² K) for each length; short lengths have up to ten times the trials, lengths from
    T = 2,048 on have fewer, at least 3. About 15 s on one core.
    Source: "On the Limitation and Redundancy of Transformers: A Rank Perspective" states K* = Ω(log T).

    Args:
        mask: "full" or "causal".
        tolerance: minimum gain in rank/T per unit of width.
        lengths: numbers of tokens T.
        trials: draws of the weights at each length.
        seed: random seed for the weights.
    """
    points: list[tuple[int, int, int, int]] = []
    missing, half = [], []
    for tokens in lengths:
        head = RandomHead(tokens, mask=mask, seed=seed)
        count = max(3, min(10 * trials, trials * 1024 // tokens))
        for widest in (64, 128, 256):
            widths = tuple(range(1, widest + 1))
            shares = np.stack([head.trial(widths, trial) for trial in range(count)])
            found, interval = saturation(widths, shares, tolerance, seed)
            if found >= 0:
                break
        if found < 0:
            missing.append(tokens)
            continue
        points.append((tokens, widths[found], *interval))
        means = shares.mean(0)
        middle = rank_barrier(tokens, mask) / tokens / 2
        half.append(float(np.interp(middle, means, widths)) if means[-1] > middle else math.nan)
    if len(points) < 3:
        raise ValueError(f"a line requires three lengths that saturate, got {len(points)}")
    log, width = np.log([point[0] for point in points]), np.array([point[1] for point in points], float)
    slope, intercept = np.polyfit(log, width, 1)
    residuals = width - (intercept + slope * log)
    total = float(((width - width.mean()) ** 2).sum())
    return LogLaw(
        points=points,
        intercept=float(intercept),
        slope=float(slope),
        residuals=[float(residual) for residual in residuals],
        explained=1 - float((residuals**2).sum()) / total if total > 0 else math.nan,
        half=half,
        unsaturated=missing,
        notes=describe_falls(points),
    )


def describe_falls(points: list[tuple[int, int, int, int]]) -> list[str]:
    """Describe where K* falls from one length to the next, and if its intervals overlap there.

    Args:
        points: (T, K*, lower and upper end of its interval), T ascending.
    """
    return [
        f"K* is not monotone: {before} ({low} to {high}) at T = {short:,}, {after} ({down} to {up}) at "
        f"{long:,}. "
        + (
            "The 95 % bootstrap intervals overlap: the few trials do not show that K* itself falls."
            if up >= low
            else "The 95 % bootstrap intervals do not overlap: their spread does not explain the fall."
        )
        for (short, before, low, high), (long, after, down, up) in pairwise(points)
        if after < before
    ]
