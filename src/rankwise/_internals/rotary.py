"""Rotary position embeddings (RoPE): pairs of channels are rotated by an angle that grows with position."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from rankwise._internals.linalg import as_float64

ROPE_BASE = 10_000.0
Pairing = Literal["halves", "neighbors"]
"""Rule for the channels of pair i of P pairs: (i, i + P) for "halves", (2i, 2i + 1) for "neighbors"."""
RopeLayout = Literal["halves", "pairs", "pairs of halves", "halves, short"]
"""Layout of the cos and sin that a model computes: per channel ("halves", "pairs"), per pair and repeated
("pairs of halves"), or once per pair ("halves, short"). Saved files contain these names."""
PAIRINGS: dict[RopeLayout, Pairing] = {
    "halves": "halves", "pairs": "neighbors", "pairs of halves": "neighbors", "halves, short": "halves",
}  # fmt: skip


def rope_angles(
    positions: Shaped[Tensor, "*P T"], width: int, base: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "*P T N"], Float[Tensor, "*P T N"]]:
    """Return the cosine and the sine of the angle p·base^(−2i/width) for each position p and channel pair i.

    Angles are computed in float32 or float64. Beyond about 10^5 tokens, float32 angles lose digits.
    Source: Su et al., “RoFormer”, 2021, equation 34.

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
    """Rotate P pairs (a, b) of channels to (a cos − b sin, b cos + a sin); copy all other channels."""
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
    """Invert `apply_rope` in float64, even if cos² + sin² ≠ 1 because angles were rounded or scaled."""
    cos, sin = as_float64(cos), as_float64(sin)
    scale = (cos.square() + sin.square()).clamp(min=1e-300)
    return apply_rope(as_float64(x), cos / scale, -sin / scale, pairing)


def per_pair(angles: Float[Tensor, "B S R"], layout: RopeLayout) -> Float[Tensor, "B S P"]:
    """Return the cos (or sin) of each pair, from the cos (or sin) in the layout that a model computes."""
    if layout == "halves, short":
        return angles
    return angles[..., ::2] if layout == "pairs" else angles[..., : angles.shape[-1] // 2]


def fits_layout(angles: Float[Tensor, "B S R"], layout: RopeLayout, width: int) -> bool:
    """Return True if both channels of each pair have the same angle, and all pairs fit into the head."""
    first, half = per_pair(angles, layout), angles.shape[-1] // 2
    same = {"halves": angles[..., half:], "pairs": angles[..., 1::2]}.get(layout, first)
    return 2 * first.shape[-1] <= width and bool((first == same).all())


@dataclass(frozen=True)
class PairRotation:
    """Rotation of P pairs of channels by angles that depend on the token; other channels are unchanged."""

    pairs: Int[Tensor, "P 2"]
    cos: Float[Tensor, "B T P"]
    sin: Float[Tensor, "B T P"]

    def __call__(self, heads: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """Return queries or keys with the pairs of channels rotated."""
        channels, rotated = self.pairs.T.flatten().to(heads.device), heads.clone()
        cos, sin = self.cos[:, None].to(heads), self.sin[:, None].to(heads)
        rotated[..., channels] = apply_rope(heads[..., channels], cos, sin, "halves")
        return rotated

    def __getitem__(self, sequences: Int[Tensor, "b"]) -> "PairRotation":
        """Return the rotation of the sequences with the given indices."""
        indices = sequences.to(self.cos.device)
        return PairRotation(self.pairs, self.cos[indices], self.sin[indices])


def fit_rotation(
    pairs: Int[Tensor, "P 2"],
    before: list[Float[Tensor, "B _ T K"]],
    after: list[Float[Tensor, "B _ T K"]],
) -> tuple[PairRotation, float]:
    """Return the least-squares rotation from heads ``before`` to ``after``, and its relative residual."""
    before, after = ([as_float64(heads) for heads in sides] for sides in (before, after))
    channels = pairs.to(before[0].device)
    x, y = (torch.cat([heads[..., channels[:, side]] for heads in before], 1) for side in (0, 1))
    u, v = (torch.cat([heads[..., channels[:, side]] for heads in after], 1) for side in (0, 1))
    size = (x.square() + y.square()).sum(1).clamp(min=1e-300)
    rotation = PairRotation(pairs, (x * u + y * v).sum(1) / size, (x * v - y * u).sum(1) / size)
    residual = sum(float((rotation(a) - b).square().sum()) for a, b in zip(before, after, strict=True))
    total = sum(float(heads.square().sum()) for heads in after)
    return rotation, (residual / max(total, 1e-300)) ** 0.5
