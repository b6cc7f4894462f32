"""Ranks of heads in deeper layers of random transformers, and the law of K* in ln T."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.measures import numerical_rank
from rankwise.plan.planner import saturation
from rankwise.plan.ranks import RandomHead, count_winners
from rankwise.theory import rank_barrier

HEADS = 8
"""Not D/K: the rebuttal's widths are not multiples of K = 3."""
LAYERS, MEASURED = 4, 2
"""Layers, and the first heads of each that are measured."""


def stream(*numbers: int) -> torch.Generator:
    """Return a generator with its own stream for each tuple of numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def scaled(states: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    """Scale states to a mean squared row norm of D."""
    return states / states.square().mean().sqrt()


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw a weight with independent N(0, 1/fan-in) entries, fan-in first."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[0])


def head_rank(query: Float[Tensor, "T K"], key: Float[Tensor, "T K"], temperature: float) -> int:
    """Return the number of hardmax winners at temperature 0, else of singular values ≥ 0.01."""
    if temperature == 0:
        return count_winners(query, key)
    scores = query.double() @ key.double().mT / (temperature * math.sqrt(query.shape[-1]))
    return int(numerical_rank(scores.softmax(-1), 0.01))


def layer_ranks(
    states: Float[Tensor, "T D"],
    head_dim: int,
    block: str,
    generator: torch.Generator,
    temperatures: tuple[float, ...],
) -> Float[np.ndarray, "L M"]:
    """Return the mean rank over the first heads in each layer, by temperature in units of √K.

    Each block has full softmax attention at τ = √K and an MLP of width 4 D, all at new random weights, and
    norms before each part ("pre", as in GPT-2) or after each sum ("post", as in BERT).
    """
    width = states.shape[-1]

    def project(rows: Tensor, columns: int) -> Tensor:
        return rows @ gaussian(generator, rows.shape[-1], columns)

    def split(rows: Tensor) -> Float[Tensor, "H T K"]:
        return project(rows, HEADS * head_dim).unflatten(-1, (HEADS, head_dim)).transpose(0, 1)

    def before(rows: Tensor) -> Tensor:
        return F.layer_norm(rows, rows.shape[-1:]) if block == "pre" else rows

    def after(rows: Tensor) -> Tensor:
        return F.layer_norm(rows, rows.shape[-1:]) if block == "post" else rows

    ranks = []
    for _ in range(LAYERS):
        read = before(states)
        query, key = split(read), split(read)
        pairs = list(zip(query[:MEASURED], key[:MEASURED], strict=True))
        ranks.append([sum(head_rank(*pair, tau) for pair in pairs) / MEASURED for tau in temperatures])
        mixed = F.scaled_dot_product_attention(query, key, split(read)).transpose(0, 1).flatten(1)
        states = after(states + project(mixed, width))
        hidden = F.gelu(project(before(states), 4 * width))
        states = after(states + project(hidden, width))
    return np.array(ranks)


def embed_randomly(ids: Tensor, width: int, seed: int) -> Float[Tensor, "*batch T D"]:
    """Return an independent N(0, 1) row for each different id."""
    known, places = ids.unique(return_inverse=True)
    return torch.randn(len(known), width, generator=torch.Generator().manual_seed(seed))[places]


def fit_log_law(
    mask: str, lengths: tuple[int, ...], trials: int = 10, seed: int = 0, tolerance: float = 0.01
) -> dict[str, Any]:
    """Fit K* = intercept + slope·ln T over lengths, for hardmax heads on orthonormal tokens.

    `points` are (T, K*, lower and upper end of its 95 % bootstrap interval), `half` the widths at which
    rank/T reaches half of the barrier, `explained` is R². Short lengths have up to ten times the trials,
    lengths from T = 2,048 on have fewer, at least 3. It takes 15 s, and raises if rank/T still grows at
    K = 256 by the tolerance per unit of width.
    """
    points: list[tuple[int, int, int, int]] = []
    half = []
    for tokens in lengths:
        head = RandomHead(tokens, mask=mask, seed=seed)
        count = max(3, min(10 * trials, trials * 1024 // tokens))
        for widest in (64, 128, 256):
            widths = tuple(range(1, widest + 1))
            shares = np.stack([head.trial(widths, trial) for trial in range(count)])
            found, interval = saturation(widths, shares, tolerance, seed)
            if found >= 0:
                break
        else:
            raise ValueError(f"T = {tokens}: expected saturation at K ≤ 256, got a gain at every width")
        points.append((tokens, widths[found], *interval))
        means, middle = shares.mean(0), rank_barrier(tokens, mask) / tokens / 2
        half.append(float(np.interp(middle, means, widths)) if means[-1] > middle else math.nan)
    log, width = np.log([point[0] for point in points]), np.array([point[1] for point in points], float)
    slope, intercept = np.polyfit(log, width, 1)
    residuals = width - (intercept + slope * log)
    return {
        "points": points,
        "intercept": float(intercept),
        "slope": float(slope),
        "residuals": residuals.tolist(),
        "explained": 1 - float((residuals**2).sum() / ((width - width.mean()) ** 2).sum()),
        "half": half,
    }
