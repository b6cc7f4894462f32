"""The low-rank barrier: rank of random attention against head width, hardmax and softmax, full and causal.

Claim     Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank Perspective": over Gaussian
          weights and orthonormal tokens the mean rank of hardmax attention stays below (1 − 1/e)·T + O(1) for
          every head width K. Its counterpart under a causal mask, (T + 1)/2, is this project's.
Question  Does rank grow with K? Hardmax rank should; softmax rank (τ = √K, δ = 0.01) need not.
Hardware  one CPU core, float64, about half a minute
Expect    hardmax without a mask, rank/T at K = 1, 16, 256: .04 .54 .63 (T = 50), .01 .44 .61 (T = 200),
          .003 .34 .60 (T = 800), each ± 0.02
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
from jaxtyping import Float64
from torch import Tensor

from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.theory import SimulatedRank, hardmax_rank, random_head_rank, rank_barrier
from rankwise.theory.random_heads import mean_and_std

SIGNIFICANT = 5.0
"""Standard errors from which a fall counts: among 864 pairs of widths, chance reaches it once in 20 runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    tokens: tuple[int, ...] = (50, 200, 800)
    head_dims: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    temperatures: tuple[float, ...] = (0.25, 1.0, 4.0)
    """Softmax temperatures in units of √K."""
    delta: float = 1e-2
    trials: int = 10
    seed: int = 0


# --- Theorem 1 -------------------------------------------------------------------------------------------


def theorem1_bound(tokens: int) -> float:
    """Return the bound of Theorem 1 without its O(1): (1 − 1/e)·T, for every head width (eq. 4).

    It bounds an expectation over Gaussian weights, not a single matrix. With K = Q = X and a low temperature
    the matrix is the identity, and attention to the previous token has rank T − 1.

    For exactly orthonormal tokens the O(1) is at most 1/e (derived in this project). Given the keys, rows are
    drawn independently from one distribution p, so the expected number of winners is Σ_j 1 − (1 − p_j)^T. It
    is concave in p and largest for uniform p: T(1 − (1 − 1/T)^T), which is `rank_barrier` and exceeds
    (1 − 1/e)·T by 1/e at T = 1 and less beyond.
    """
    return (1 - math.exp(-1)) * tokens


def almost_orthonormal(
    tokens: int, width: int, epsilon: float = 0.0, seed: int = 0
) -> Float64[Tensor, "T D"]:
    """Draw token states X with XXᵀ = I + E, E symmetric with entries uniform in [−ε, ε].

    X = (I + E)^{1/2} X₀ with X₀ the orthonormal factor of a Gaussian matrix. It requires D ≥ T, and ε < 1/T,
    so that I + E is positive definite for every draw. Theorem 1 requires ε = o(1/(T^{3/2}(D + K))).
    """
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(width, tokens, dtype=torch.float64, generator=generator)
    states = torch.linalg.qr(gaussian).Q.mT
    if epsilon == 0:
        return states
    noise = (2 * torch.rand(tokens, tokens, dtype=torch.float64, generator=generator) - 1) * epsilon
    symmetric = noise.tril() + noise.tril(-1).mT
    values, vectors = torch.linalg.eigh(torch.eye(tokens, dtype=torch.float64) + symmetric)
    return (vectors * values.sqrt()) @ vectors.mT @ states


def theorem1_rank(
    tokens: int,
    head_dim: int,
    width: int | None = None,
    mask: str = "full",
    epsilon: float = 0.0,
    trials: int = 10,
    seed: int = 0,
) -> SimulatedRank:
    """Return the rank of hardmax(X Wq Wkᵀ Xᵀ) over draws of the weights, for one X; T ≤ D, by default D = T.

    Theorem 1 bounds its mean. Wq and Wk (D×K) have independent N(0, 1) entries. ε = 0 has the law of
    `random_head_rank` at temperature 0, which is cheaper: X Wq is then T×K Gaussian again.
    Cost: O(T² D) for X and O(T K (D + T)) per trial.
    """
    width = tokens if width is None else width
    states = almost_orthonormal(tokens, width, epsilon, seed)
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() if mask == "causal" else None
    generator = torch.Generator().manual_seed(seed + 1)  # not the stream of X
    ranks = []
    for _ in range(trials):
        weights = torch.randn(2, width, head_dim, dtype=torch.float64, generator=generator)
        query, key = states @ weights
        ranks.append(int(hardmax_rank(query @ key.mT, allowed)))
    return mean_and_std(ranks)


def curve(settings: Settings, tokens: int, mask: str, temperature: float) -> Report:
    """Return rank over head width; the temperature is in units of √K, and 0 is hardmax.

    Hardmax has the setting of Theorem 1 with D = max(T, 64). Queries and keys of orthonormal tokens are
    Gaussian, which the softmax relies on. `fall` is None, or the two widths of `largest_fall`.
    """
    ranks = []
    for k in settings.head_dims:
        draws = {"trials": settings.trials, "seed": settings.seed + k}
        if temperature == 0:
            ranks.append(theorem1_rank(tokens, k, max(tokens, 64), mask, **draws))
        else:
            tau = temperature * math.sqrt(k)
            ranks.append(random_head_rank(tokens, k, mask, temperature=tau, delta=settings.delta, **draws))
    return {
        "tokens": tokens,
        "mask": mask,
        "temperature": temperature,
        "barrier": round(rank_barrier(tokens, mask), 4),
        "mean": [rank.mean for rank in ranks],
        "std": [round(rank.std, 4) for rank in ranks],
        "fall": largest_fall(settings, ranks),
    }


def largest_fall(settings: Settings, ranks: Sequence[SimulatedRank]) -> tuple[int, int] | None:
    """Return the widths between which rank falls most as the head widens, if by more than chance."""
    falls = {
        widths: one.mean - other.mean
        for (one, other), widths in zip(
            combinations(ranks, 2), combinations(settings.head_dims, 2), strict=True
        )
        if one.mean - other.mean > SIGNIFICANT * math.hypot(one.std, other.std) / math.sqrt(settings.trials)
    }
    return max(falls, key=lambda widths: falls[widths], default=None)


def measure(settings: Settings) -> Report:
    return {
        "settings": asdict(settings),
        "unit": "mean and standard deviation of the rank over trials, by head width",
        "theorem1_bound": {str(tokens): round(theorem1_bound(tokens), 4) for tokens in settings.tokens},
        "curves": [
            curve(settings, tokens, mask, temperature)
            for mask in ("full", "causal")
            for temperature in (0.0, *settings.temperatures)
            for tokens in settings.tokens
        ],
    }


def tables(report: Report) -> dict[str, str]:
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


STUDY = Study("rank_barrier", lambda data: measure(Settings()), tables=tables)
