"""The low-rank barrier: rank of random attention against head width, hardmax and softmax, full and causal.

Claim     Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank Perspective": over Gaussian
          weights and orthonormal tokens the mean rank of hardmax attention stays below (1 − 1/e)·T + O(1) for
          every head width K. Its counterpart under a causal mask, (T + 1)/2, is this project's.
Asked     Whether rank grows with K. Hardmax rank should; softmax rank (τ = √K, δ = 0.01) need not.
Hardware  one CPU core, float64, about half a minute
Expect    hardmax without a mask, rank/T at K = 1, 16, 256: .04 .54 .63 (T = 50), .01 .44 .61 (T = 200),
          .003 .34 .60 (T = 800), each ± 0.02

    python -m experiments run rank_barrier
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from experiments.rank.theorem1 import theorem1_bound, theorem1_rank
from experiments.render import markdown_table
from experiments.study import Study
from rankwise.theory import SimulatedRank, random_head_rank, rank_barrier

HEAD_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SIGNIFICANT = 5.0
"""Standard errors from which a fall counts: among 864 pairs of widths chance brings one in 20 runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    tokens: tuple[int, ...] = (50, 200, 800)
    head_dims: tuple[int, ...] = HEAD_DIMS
    temperatures: tuple[float, ...] = (0.25, 1.0, 4.0)
    """Of the softmax, in units of √K."""
    delta: float = 1e-2
    trials: int = 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Curve:
    """Rank over head width, for one mask, length and temperature."""

    tokens: int
    mask: str
    temperature: float
    """In units of √K; 0 is hardmax."""
    barrier: float
    """Expected rank of a hardmax matrix with winners drawn uniformly."""
    mean: list[float]
    std: list[float]
    fall: tuple[int, int] | None
    """The widths, the smaller first, between which the mean falls most, if by more than chance."""


def hardmax_curve(recipe: Recipe, tokens: int, mask: str) -> Curve:
    """Theorem 1's own setting: X with orthonormal rows, Gaussian Wq and Wk, D = max(T, 64)."""
    ranks = [
        theorem1_rank(tokens, k, width=max(tokens, 64), mask=mask, trials=recipe.trials, seed=recipe.seed + k)
        for k in recipe.head_dims
    ]
    return curve(recipe, tokens, mask, 0.0, ranks)


def softmax_curve(recipe: Recipe, tokens: int, mask: str, temperature: float) -> Curve:
    """The same heads with a softmax: queries and keys of orthonormal tokens are Gaussian."""
    ranks = [
        random_head_rank(
            tokens,
            k,
            mask,
            temperature=temperature * math.sqrt(k),
            delta=recipe.delta,
            trials=recipe.trials,
            seed=recipe.seed + k,
        )
        for k in recipe.head_dims
    ]
    return curve(recipe, tokens, mask, temperature, ranks)


def curve(
    recipe: Recipe, tokens: int, mask: str, temperature: float, ranks: Sequence[SimulatedRank]
) -> Curve:
    """Gather the ranks of all head widths, and where they fall."""
    means, stds = [rank.mean for rank in ranks], [round(rank.std, 4) for rank in ranks]
    return Curve(
        tokens, mask, temperature, round(rank_barrier(tokens, mask), 4), means, stds, fall(recipe, ranks)
    )


def fall(recipe: Recipe, ranks: Sequence[SimulatedRank]) -> tuple[int, int] | None:
    """Where rank falls most as the head widens."""
    falls = {
        widths: one.mean - other.mean
        for (one, other), widths in zip(
            combinations(ranks, 2), combinations(recipe.head_dims, 2), strict=True
        )
        if one.mean - other.mean > SIGNIFICANT * math.hypot(one.std, other.std) / math.sqrt(recipe.trials)
    }
    return max(falls, key=lambda widths: falls[widths], default=None)


def curves(recipe: Recipe) -> list[Curve]:
    """Every mask, temperature and length."""
    return [
        hardmax_curve(recipe, tokens, mask)
        if temperature == 0
        else softmax_curve(recipe, tokens, mask, temperature)
        for mask in ("full", "causal")
        for temperature in (0.0, *recipe.temperatures)
        for tokens in recipe.tokens
    ]


def measure(recipe: Recipe) -> dict[str, Any]:
    """Measure every curve."""
    return {
        "settings": asdict(recipe),
        "unit": "mean and standard deviation of the rank over trials, by head width",
        "theorem1_bound": {str(tokens): round(theorem1_bound(tokens), 4) for tokens in recipe.tokens},
        "curves": [asdict(one) for one in curves(recipe)],
    }


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return rank/T, with the standard deviation of single matrices in parentheses, by mask and kind."""
    settings, found = report["settings"], {}
    for mask, temperature in dict.fromkeys((one["mask"], one["temperature"]) for one in report["curves"]):
        softmax = f"softmax, τ = {temperature:g}·√K, δ = {settings['delta']:g}"
        name = f"{mask} mask, {'hardmax' if temperature == 0 else softmax}, rank/T"
        rows = []
        for one in report["curves"]:
            if (one["mask"], one["temperature"]) == (mask, temperature):
                tokens = one["tokens"]
                numbers = zip(one["mean"], one["std"], strict=True)
                shares = [f"{mean / tokens:.3f} ({std / tokens:.3f})" for mean, std in numbers]
                falls = "{} → {}".format(*one["fall"]) if one["fall"] else "–"
                rows.append([str(tokens), *shares, f"{one['barrier'] / tokens:.3f}", falls])
        head = ["T \\ K", *map(str, settings["head_dims"]), "barrier", "falls at K"]
        found[name] = markdown_table(head, rows)
    return found


STUDY = Study("rank_barrier", lambda data: measure(Recipe()), tables=tables)
