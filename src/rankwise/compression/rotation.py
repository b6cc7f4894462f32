"""Layouts in which models compute the cos and sin of rotary positions."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from rankwise._internals.rotary import Pairing

Rotation = Literal["halves", "pairs", "pairs of halves", "halves, short"]
"""Which channels are rotated together: i and i + R/2, or 2i and 2i + 1. A model computes cosines per channel,
or per pair and then again (pairs of halves), or per pair once (halves, short). Files hold these names."""
PAIRINGS: dict[Rotation, Pairing] = {
    "halves": "halves", "pairs": "neighbors", "pairs of halves": "neighbors", "halves, short": "halves",
}  # fmt: skip


def per_pair(angles: Float[Tensor, "B S R"], rotation: Rotation) -> Float[Tensor, "B S P"]:
    """Return the cos (or sin) of each pair from those that a model computes."""
    if rotation == "halves, short":
        return angles
    return angles[..., ::2] if rotation == "pairs" else angles[..., : angles.shape[-1] // 2]


def fits(angles: Float[Tensor, "B S R"], rotation: Rotation, width: int) -> bool:
    """Return whether both channels of every pair have one angle, and a head of this width has the pairs."""
    one, half = per_pair(angles, rotation), angles.shape[-1] // 2
    same = {"halves": angles[..., half:], "pairs": angles[..., 1::2]}.get(rotation, one)
    return 2 * one.shape[-1] <= width and bool((one == same).all())
