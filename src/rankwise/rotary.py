"""Rotary positions (RoPE): queries and keys turn with their position, so that scores see distances alone."""

import torch
from jaxtyping import Float
from torch import Tensor

ROPE_BASE = 10_000.0


def rotated(
    rows: Float[Tensor, "*B T K"], start: int = 0, base: float = ROPE_BASE
) -> Float[Tensor, "*B T K"]:
    """Turn each pair of channels (i, i + K/2) of row t by the angle (start + t)·base^(−2i/K).

    Angles are taken in float32 at least. Cost: O(T K).
    Source: Su et al., “RoFormer”, 2021, equation 34, in the channel order of Llama.

    Args:
        rows: queries or keys; K is even.
        start: position of the first row.
        base: of the wavelengths, which go from 2π to 2π·base tokens.

    Examples:
        >>> import torch
        >>> turned = rotated(torch.ones(3, 2))
        >>> [round(value, 3) for value in turned[1].tolist()]
        [-0.301, 1.382]
    """
    tokens, width = rows.shape[-2:]
    wide = torch.promote_types(rows.dtype, torch.float32)
    frequency = base ** (-torch.arange(0, width, 2, dtype=wide, device=rows.device) / width)
    angle = torch.arange(start, start + tokens, device=rows.device)[:, None] * frequency
    first, other = rows.chunk(2, dim=-1)
    cos, sin = angle.cos().to(rows.dtype), angle.sin().to(rows.dtype)
    return torch.cat([first * cos - other * sin, other * cos + first * sin], dim=-1)
