r"""Rank-r stand-ins for the logits of a head: Q A (K B)ᵀ ≈ Q Kᵀ.

Each way gives two K×K bases of which the first r columns are A and B: narrower widths are prefixes. With
P = Σ qqᵀ and S = Σ kkᵀ the squared error of the logits over all pairs of tokens is that of [P^½ S^½] against
P^½ A Bᵀ S^½: its least value at rank r comes from the first r singular directions (KQ-SVD, arXiv 2512.05916).
Keys are not centred: a shift that all keys of a row share changes no softmax, but measured it is worse.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

RIDGE = 1e-9
"""Added to second moments, relative to their mean eigenvalue: directions never seen stay finite."""


@dataclass(frozen=True)
class Bases:
    """Two bases of the head's K dimensions, best directions first."""

    query: Float64[Tensor, "K K"]
    key: Float64[Tensor, "K K"]


def optimal(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> Bases:
    """The closed form: least squared error of the logits over all pairs of the tokens seen.

    Formula: A = S^½ V_r, B = S^−½ V_r, V the eigenvectors of S^½ P S^½, largest first. Where several query
    heads read one key head, P is the sum of theirs, and A is the same for all.

    Args:
        query: P, second moments of queries.
        key: S, second moments of keys.
    """
    root, inverse = _roots(key)
    vectors = torch.linalg.eigh(root @ query @ root).eigenvectors.flip(-1)
    return Bases(root @ vectors, inverse @ vectors)


def key_components(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> Bases:
    """Principal components of the keys, for both sides.

    Args:
        query: not looked at.
        key: second moments of keys.
    """
    return _shared(key)


def joint_components(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> Bases:
    """Principal components of queries and keys together, each side scaled to the same mean square.

    Args:
        query: second moments of queries.
        key: second moments of keys.
    """
    return _shared(query / query.trace().clamp(min=1e-300) + key / key.trace().clamp(min=1e-300))


def random_directions(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"], seed: int) -> Bases:
    """Random orthonormal directions, for both sides.

    Args:
        query: not looked at.
        key: not looked at but for its size.
        seed: of the directions.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(key.shape, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(drawn).Q.to(key.device)
    return Bases(basis, basis)


def _shared(moments: Tensor) -> Bases:
    basis = torch.linalg.eigh(moments).eigenvectors.flip(-1)
    return Bases(basis, basis)


def _roots(moments: Float64[Tensor, "K K"]) -> tuple[Tensor, Tensor]:
    """S^½ and S^−½ of S with a ridge."""
    width = moments.shape[-1]
    ridge = RIDGE * moments.trace().clamp(min=1e-300) / width
    values, vectors = torch.linalg.eigh(moments + ridge * torch.eye(width).to(moments))
    roots = values.clamp(min=ridge).sqrt()
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT
