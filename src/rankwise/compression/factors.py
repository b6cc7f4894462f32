r"""Rank-r stand-ins for the logits of a head: Q A (K B)ᵀ ≈ Q Kᵀ.

Each way gives two K×K bases of which the first r columns are A and B: narrower widths are prefixes. The
closed form is `rankwise.measures.logits.logit_bases`; those here are what it is held against. For it keys are
not centred: a shift that all keys of a row share changes no softmax, but measured it is worse.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.logits import LogitBases


def key_components(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> LogitBases:
    """Principal components of the keys, for both sides.

    Args:
        query: not looked at.
        key: second moments of keys.
    """
    return _shared(key)


def joint_components(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> LogitBases:
    """Principal components of queries and keys together, each side scaled to the same mean square.

    Args:
        query: second moments of queries.
        key: second moments of keys.
    """
    return _shared(query / query.trace().clamp(min=1e-300) + key / key.trace().clamp(min=1e-300))


def random_directions(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"], seed: int) -> LogitBases:
    """Random orthonormal directions, for both sides.

    Args:
        query: not looked at.
        key: not looked at but for its size.
        seed: of the directions.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(key.shape, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(drawn).Q.to(key.device)
    return LogitBases(basis, basis)


def _shared(moments: Tensor) -> LogitBases:
    basis = torch.linalg.eigh(moments).eigenvectors.flip(-1)
    return LogitBases(basis, basis)
