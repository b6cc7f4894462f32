"""Rotated positions, as models apply them to keys, so that keys can be rotated when they are read."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Rotation = Literal["halves", "pairs", "pairs of halves", "halves, short"]
"""Which channels turn together: i and i + R/2; or 2i and 2i + 1. Cosines are given for each channel, or for
the first half of them and then again (pairs of halves), or for one half alone (halves, short)."""
ROTATIONS: tuple[Rotation, ...] = ("halves", "pairs", "pairs of halves", "halves, short")


def channels_turned(cos: Float[Tensor, "B S R"], rotation: Rotation) -> int:
    """How many channels of keys are rotated.

    Args:
        cos: what a model gives.
        rotation: which channels are pairs.
    """
    return cos.shape[-1] * (2 if rotation == "halves, short" else 1)


def rotate(
    keys: Float[Tensor, "B G S K"],
    cos: Float[Tensor, "#B S R"],
    sin: Float[Tensor, "#B S R"],
    rotation: Rotation,
) -> Float[Tensor, "B G S K"]:
    """Rotate the first R channels of keys, as models with rotary positions do; the others stay.

    Formula: k·cos + turned(k)·sin, where turned makes (−b, a) of each pair (a, b).

    Args:
        keys: before rotation.
        cos: of each position, as the model gives it, its scale in it.
        sin: likewise.
        rotation: which channels are pairs.
    """
    cos, sin = _by_channel(cos, rotation)[:, None], _by_channel(sin, rotation)[:, None]
    width = cos.shape[-1]
    turning, staying = keys[..., :width], keys[..., width:]
    turned = turning * cos + _turned(turning, rotation) * sin
    return torch.cat([turned, staying], -1) if staying.shape[-1] else turned


def rotate_back(
    keys: Float[Tensor, "B G S K"],
    cos: Float[Tensor, "#B S R"],
    sin: Float[Tensor, "#B S R"],
    rotation: Rotation,
) -> Float[Tensor, "B G S K"]:
    """Undo `rotate`, in float64.

    Args:
        keys: rotated.
        cos: that they were rotated with.
        sin: likewise.
        rotation: which channels are pairs.
    """
    cos, sin = cos.double(), sin.double()
    scale = (cos.square() + sin.square()).clamp(min=1e-300)
    return rotate(keys.double(), cos / scale, -sin / scale, rotation)


def _by_channel(angles: Tensor, rotation: Rotation) -> Tensor:
    if rotation == "halves, short":
        return torch.cat([angles, angles], -1)
    if rotation == "pairs of halves":
        return angles[..., : angles.shape[-1] // 2].repeat_interleave(2, -1)
    return angles


def _turned(keys: Tensor, rotation: Rotation) -> Tensor:
    if rotation in ("halves", "halves, short"):
        first, second = keys.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-keys[..., 1::2], keys[..., ::2]], -1).flatten(-2)
