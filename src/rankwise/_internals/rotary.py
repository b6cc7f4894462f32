"""Rotary positions (RoPE): each pair of query or key channels is rotated by an angle per position."""

from typing import Literal

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

ROPE_BASE = 10_000.0
Pairing = Literal["halves", "neighbors"]
"""Channels of pair i among P pairs: "halves" is (i, i + P), "neighbors" is (2i, 2i + 1)."""


def rope_angles(
    positions: Shaped[Tensor, "*P T"], width: int, base: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "*P T N"], Float[Tensor, "*P T N"]]:
    """Return cosine and sine of the angle p·base^(−2i/width) for each position p and pair i.

    Angles are computed in float32 or float64. Beyond about 10^5 tokens, float32 angles lose digits.
    Source: Su et al., “RoFormer”, 2021, equation 34.

    Args:
        positions: positions of the tokens.
        width: K, the even width of a head.
        base: base of the wavelengths, which range from 2π to 2π·base^(1 − 2/K) tokens.
        dtype: dtype of the result.

    Examples:
        >>> cos, sin = rope_angles(torch.arange(2), 2, 10_000.0, torch.float32)
        >>> [round(value, 3) for value in apply_rope(torch.ones(2, 2), cos, sin, "halves")[1].tolist()]
        [-0.301, 1.382]
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency = base ** (-torch.arange(0, width, 2, dtype=wide, device=positions.device) / width)
    angle = positions[..., None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(
    x: Float[Tensor, "*B T K"], cos: Float[Tensor, "*#B T P"], sin: Float[Tensor, "*#B T P"], pairing: Pairing
) -> Float[Tensor, "*B T K"]:
    """Rotate P pairs of channels, (a, b) → (a cos − b sin, b cos + a sin); copy the other channels."""
    pairs = cos.shape[-1]
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if pairing == "halves":
        a, b = turning.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    a, b = turning[..., ::2], turning[..., 1::2]
    return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)


def undo_rope(
    x: Float[Tensor, "*B T K"], cos: Float[Tensor, "*#B T P"], sin: Float[Tensor, "*#B T P"], pairing: Pairing
) -> Float64[Tensor, "*B T K"]:
    """Invert `apply_rope` in float64, also if cos² + sin² is not 1 (rounded or scaled angles)."""
    cos, sin = cos.double(), sin.double()
    scale = (cos.square() + sin.square()).clamp(min=1e-300)
    return apply_rope(x.double(), cos / scale, -sin / scale, pairing)
