"""What the loops need for scores and memberships."""

import numpy as np
import torch
from torch import Tensor

from rankwise.ops.tssa.cpu.arrays import array


def score_room(w: np.ndarray, keep: bool) -> tuple[np.ndarray, np.ndarray]:
    """A place for scores and one for memberships: the same one where scores are not kept.

    Args:
        w: tokens, (M, H, K).
        keep: whether scores are wanted when memberships are there.

    Returns:
        Two arrays (M, H), or twice the same.
    """
    membership = np.empty(w.shape[:2], w.dtype)
    return np.empty_like(membership) if keep else membership, membership


def temperatures(temperature: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    """As the loops expect them.

    Args:
        temperature: (H,) or None.
        dtype: of the sums.

    Returns:
        (H,), or (0,) for None.
    """
    return np.empty(0, str(dtype)[6:]) if temperature is None else array(temperature, dtype)
