"""Where memberships go."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu.arrays import array


def uniform(like: Tensor, mask: Tensor | None) -> Tensor:
    """1/H, and 0 where masked.

    Args:
        like: a tensor (B, T, H).
        mask: (B, T) or None.

    Returns:
        (B, T, H).
    """
    out = torch.full_like(like, 1 / like.shape[-1])
    return out if mask is None else out.masked_fill_(~mask[..., None], 0.0)


def membership_room(
    like: Tensor, temperature: Tensor | None, mask: Tensor | None
) -> tuple[np.ndarray, Tensor]:
    """The temperatures and a place for memberships; without a temperature none, and 1/H at once.

    Args:
        like: a tensor (B, T, H) in the dtype of the sums.
        temperature: (H,) or None.
        mask: (B, T) or None.

    Returns:
        (H,) or (0,), and (B, T, H).
    """
    tau = temperatures(temperature, like.dtype)
    return tau, uniform(like, mask) if temperature is None else torch.empty_like(like)


def temperatures(temperature: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    """As the loops expect them.

    Args:
        temperature: (H,) or None.
        dtype: of the sums.

    Returns:
        (H,), or (0,) for None.
    """
    return np.empty(0, str(dtype)[6:]) if temperature is None else array(temperature, dtype)
