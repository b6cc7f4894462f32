"""The setting of the low-rank barrier: Gaussian weights over almost orthonormal tokens, hardmax rows."""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.errors import RankwiseError, ShapeError
from rankwise.theory._checks import check_count, check_mask_name
from rankwise.theory.hardmax import hardmax_rank
from rankwise.theory.random_heads import SimulatedRank, summarized


def theorem1_bound(tokens: int) -> float:
    """The bound of Theorem 1 without its O(1): (1 − 1/e)·T, for every head width.

    It bounds an expectation over Gaussian weights, not a single matrix: with K = Q = X and a low temperature
    the matrix is the identity, and attention to the previous token has rank T − 1.

    For exactly orthonormal tokens the O(1) is at most 1/e. Given the keys, rows are drawn independently from
    one distribution p, so the expected number of winners is Σ_j 1 − (1 − p_j)^T, concave in p and largest for
    uniform p: T(1 − (1 − 1/T)^T), which is `rank_barrier` and exceeds (1 − 1/e)·T by 1/e at T = 1 and less
    beyond.

    Source: Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank Perspective", eq. 4; the
    paragraph above is this project's derivation.

    Args:
        tokens: T.

    Raises:
        ShapeError: if it is not a whole number, at least 1.

    Examples:
        >>> round(theorem1_bound(100), 2)
        63.21
    """
    check_count("tokens", tokens)
    return (1 - math.exp(-1)) * tokens


def theorem1_epsilon(tokens: int, width: int, head_dim: int) -> float:
    """The scale that ε must vanish against in Theorem 1: 1/(T^{3/2}(D + K)).

    The theorem asks for XXᵀ = I + E with |E_ij| ≤ ε = o(1/(T^{3/2}(D + K))): it is asymptotic and names no
    constant, so take a small share of this.

    Source: Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank Perspective".

    Args:
        tokens: T.
        width: D, model width.
        head_dim: K.

    Raises:
        ShapeError: if a size is not a whole number, at least 1.

    Examples:
        >>> theorem1_epsilon(100, 190, 10)
        5e-06
    """
    for name, size in (("tokens", tokens), ("width", width), ("head_dim", head_dim)):
        check_count(name, size)
    return 1 / (tokens**1.5 * (width + head_dim))


def almost_orthonormal(
    tokens: int, width: int, epsilon: float = 0.0, seed: int = 0
) -> Float64[Tensor, "T D"]:
    """Token states X with XXᵀ = I + E, E symmetric with entries uniform in [−ε, ε].

    Formula: X = (I + E)^{1/2} X₀ with X₀ the orthonormal factor of a Gaussian matrix.
    Cost: O(T² D).

    Args:
        tokens: T.
        width: D, at least T.
        epsilon: ε, below 1/T, so that I + E is positive definite whatever is drawn; 0 gives orthonormal rows.
        seed: of its own generator.

    Raises:
        ShapeError: if D < T or a size is not positive.
        RankwiseError: if ε is negative or not below 1/T.

    Examples:
        >>> x = almost_orthonormal(4, 6, epsilon=0.01)
        >>> bool(((x @ x.T - torch.eye(4)).abs() <= 0.01 + 1e-12).all())
        True
    """
    _check_tokens(tokens, width, epsilon)
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
    """Rank of hardmax(X Wq Wkᵀ Xᵀ) over draws of the weights, one X: what Theorem 1 bounds the mean of.

    Wq and Wk (D×K) have independent N(0, 1) entries. ε = 0 has the law of `random_head_rank` at temperature
    0, which is cheaper: X Wq is then T×K Gaussian again.

    Range: [1, T]; the mean grows with K towards `rank_barrier`.
    Cost: O(T² D) for X and O(T K (D + T)) a trial.
    Source: the setting of Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank
    Perspective"; it has no mask, the causal one is this project's counterpart.

    Args:
        tokens: T.
        head_dim: K.
        width: D, at least T; T by default.
        mask: "full" or "causal".
        epsilon: of `almost_orthonormal`; see `theorem1_epsilon`.
        trials: draws of the weights.
        seed: of X and the weights; PyTorch's global generator is left alone.

    Raises:
        ShapeError: if D < T or a size is not positive.
        RankwiseError: if the mask has no such name, or ε is negative or not below 1/T.

    Examples:
        >>> theorem1_rank(50, 8).mean < theorem1_bound(50)
        True
    """
    width = tokens if width is None else width
    check_count("head_dim", head_dim)
    check_count("trials", trials)
    check_mask_name(mask)
    states = almost_orthonormal(tokens, width, epsilon, seed)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() if mask == "causal" else None
    generator = torch.Generator().manual_seed(seed + 1)  # not the stream that X came from
    ranks = []
    for _ in range(trials):
        weights = torch.randn(2, width, head_dim, dtype=torch.float64, generator=generator)
        query, key = states @ weights
        ranks.append(int(hardmax_rank(query @ key.mT, seen)))
    return summarized(ranks)


def _check_tokens(tokens: int, width: int, epsilon: float) -> None:
    check_count("tokens", tokens)
    check_count("width", width)
    if width < tokens:
        raise ShapeError(
            "`width`",
            expected=f"at least {tokens}, as many as tokens",
            got=str(width),
            fix="More than D rows of width D cannot be almost orthonormal.",
        )
    if not 0 <= epsilon < 1 / tokens:
        raise RankwiseError(
            "`epsilon`",
            expected=f"at least 0 and below 1/T = {1 / tokens:.3g}",
            got=str(epsilon),
            fix="theorem1_epsilon gives the scale of the theorem, which is far smaller.",
        )
