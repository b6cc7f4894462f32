"""Rotary positions (RoPE): queries and keys turn with their position, so that scores see distances alone."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rankwise.errors import InputError

ROPE_BASE = 10_000.0


def rotated(
    rows: Float[Tensor, "*B T K"],
    positions: Shaped[Tensor, "*#P T"] | None = None,
    base: int | float = ROPE_BASE,
) -> Float[Tensor, "*B T K"]:
    """Turn each pair of channels (i, i + K/2) of a row by the angle p·base^(−2i/K), p its position.

    Angles are taken in float32 at least, so that those of tokens beyond 10^5 have lost digits.
    Range: norms stay as they are. Cost: O(T K).
    Source: Su et al., “RoFormer”, 2021, equation 34, in the channel order of Llama.

    Args:
        rows: queries or keys.
        positions: of the rows; 0 … T − 1 where None.
        base: of the wavelengths, which go from 2π to 2π·base^(1 − 2/K) tokens.

    Raises:
        InputError: if K is odd.

    Examples:
        >>> import torch
        >>> turned = rotated(torch.ones(3, 2))
        >>> [round(value, 3) for value in turned[1].tolist()]
        [-0.301, 1.382]
    """
    tokens, width = rows.shape[-2:]
    if width % 2:
        raise InputError(
            "rotary positions", expected="pairs of channels", got=f"{width}", fix="Make it even."
        )
    wide = torch.promote_types(rows.dtype, torch.float32)
    frequency = base ** (-torch.arange(0, width, 2, dtype=wide, device=rows.device) / width)
    if positions is None:
        positions = torch.arange(tokens, device=rows.device)
    angle = positions[..., None] * frequency
    first, other = rows.chunk(2, dim=-1)
    cos, sin = angle.cos().to(rows.dtype), angle.sin().to(rows.dtype)
    return torch.cat([first * cos - other * sin, other * cos + first * sin], dim=-1)
