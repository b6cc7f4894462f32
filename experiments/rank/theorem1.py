"""Setting of Theorem 1: Gaussian weights over almost orthonormal tokens, hardmax rows.

Source: Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank Perspective".
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.errors import ShapeError, in_range, one_of, whole_number
from rankwise.theory import SimulatedRank, hardmax_rank
from rankwise.theory.barrier import MASKS
from rankwise.theory.random_heads import mean_and_std


def theorem1_bound(tokens: int) -> float:
    """Return the bound of Theorem 1 without its O(1): (1 − 1/e)·T, for every head width (eq. 4).

    It bounds an expectation over Gaussian weights, not a single matrix. With K = Q = X and a low temperature
    the matrix is the identity, and attention to the previous token has rank T − 1.

    For exactly orthonormal tokens the O(1) is at most 1/e (derived in this project). Given the keys, rows are
    drawn independently from one distribution p, so the expected number of winners is Σ_j 1 − (1 − p_j)^T. It
    is concave in p and largest for uniform p: T(1 − (1 − 1/T)^T), which is `rank_barrier` and exceeds
    (1 − 1/e)·T by 1/e at T = 1 and less beyond.

    Examples:
        >>> round(theorem1_bound(100), 2)
        63.21
    """
    return (1 - math.exp(-1)) * whole_number("`tokens`", tokens)


def theorem1_epsilon(tokens: int, width: int, head_dim: int) -> float:
    """Return the scale that ε must vanish against in Theorem 1: 1/(T^{3/2}(D + K)).

    The theorem requires XXᵀ = I + E with |E_ij| ≤ ε = o(1/(T^{3/2}(D + K))). It is asymptotic and names no
    constant, so take a small share of this scale.

    Examples:
        >>> theorem1_epsilon(100, 190, 10)
        5e-06
    """
    return 1 / (tokens**1.5 * (width + head_dim))


def almost_orthonormal(
    tokens: int, width: int, epsilon: float = 0.0, seed: int = 0
) -> Float64[Tensor, "T D"]:
    """Draw token states X with XXᵀ = I + E, E symmetric with entries uniform in [−ε, ε].

    Formula: X = (I + E)^{1/2} X₀ with X₀ the orthonormal factor of a Gaussian matrix. Cost: O(T² D).

    Args:
        tokens: T.
        width: D, at least T.
        epsilon: ε, below 1/T, so that I + E is positive definite for every draw; 0 for orthonormal rows.
        seed: random seed of a generator of its own.

    Examples:
        >>> x = almost_orthonormal(4, 6, epsilon=0.01)
        >>> bool(((x @ x.T - torch.eye(4)).abs() <= 0.01 + 1e-12).all())
        True
    """
    whole_number("`tokens`", tokens)
    if width < tokens:
        raise ShapeError(
            "`width`",
            expected=f"at least {tokens}, as many as tokens",
            got=str(width),
            fix="More than D rows of width D cannot be almost orthonormal.",
        )
    in_range("`epsilon`", epsilon, f"[0, {1 / tokens})", fix="theorem1_epsilon is far smaller.")
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
    """Return the rank of hardmax(X Wq Wkᵀ Xᵀ) over draws of the weights, for one X.

    Theorem 1 bounds its mean. Wq and Wk (D×K) have independent N(0, 1) entries. ε = 0 has the law of
    `random_head_rank` at temperature 0, which is cheaper: X Wq is then T×K Gaussian again.

    Range: [1, T]; the mean grows with K towards `rank_barrier`. The theorem has no mask; the causal mask is
    this project's counterpart. Cost: O(T² D) for X and O(T K (D + T)) per trial.

    Args:
        tokens: T.
        head_dim: K.
        width: D, at least T; T by default.
        mask: "full" or "causal".
        epsilon: ε of `almost_orthonormal`; see `theorem1_epsilon`.
        trials: draws of the weights.
        seed: random seed for X and the weights; the global generator is neither read nor moved.

    Examples:
        >>> theorem1_rank(50, 8).mean < theorem1_bound(50)
        True
    """
    width = tokens if width is None else width
    for name, size in (("head_dim", head_dim), ("trials", trials)):
        whole_number(f"`{name}`", size)
    one_of("`mask`", mask, MASKS)
    states = almost_orthonormal(tokens, width, epsilon, seed)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() if mask == "causal" else None
    generator = torch.Generator().manual_seed(seed + 1)  # not the stream of X
    ranks = []
    for _ in range(trials):
        weights = torch.randn(2, width, head_dim, dtype=torch.float64, generator=generator)
        query, key = states @ weights
        ranks.append(int(hardmax_rank(query @ key.mT, seen)))
    return mean_and_std(ranks)
