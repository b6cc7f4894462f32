"""Rotation of pairs of channels by position, fitted to what a model did."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankwise._internals.rotary import apply_rope


@dataclass(frozen=True)
class PairRotation:
    """cos and sin of each token and pair."""

    pairs: Int[Tensor, "P 2"]
    """Channels of a head that turn into each other; the others stay."""
    cos: Float[Tensor, "B T P"]
    sin: Float[Tensor, "B T P"]

    def __call__(self, heads: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """Rotate queries or keys.

        Args:
            heads: as they come from their projection.
        """
        channels, turned = self.pairs.T.flatten(), heads.clone()
        cos, sin = self.cos[:, None].to(heads), self.sin[:, None].to(heads)
        turned[..., channels] = apply_rope(heads[..., channels], cos, sin, "halves")
        return turned

    def of(self, rows: Int[Tensor, "b"]) -> "PairRotation":
        """The rotation of some sequences.

        Args:
            rows: which.
        """
        return PairRotation(self.pairs, self.cos[rows], self.sin[rows])


def fitted(
    pairs: Int[Tensor, "P 2"],
    before: list[Float[Tensor, "B _ T K"]],
    after: list[Float[Tensor, "B _ T K"]],
) -> tuple[PairRotation, float]:
    """The rotation that takes queries and keys to what attention got, by least squares over heads.

    Args:
        pairs: channels that turn into each other.
        before: queries and keys from their projections.
        after: as attention got them.

    Returns:
        It, and what it leaves over, relative in the Frobenius norm.
    """
    x, y = (torch.cat([heads[..., pairs[:, side]].double() for heads in before], 1) for side in (0, 1))
    u, v = (torch.cat([heads[..., pairs[:, side]].double() for heads in after], 1) for side in (0, 1))
    size = (x.square() + y.square()).sum(1).clamp(min=1e-300)
    rotation = PairRotation(pairs, (x * u + y * v).sum(1) / size, (x * v - y * u).sum(1) / size)
    off = sum(
        float((rotation(a.double()) - b.double()).square().sum()) for a, b in zip(before, after, strict=True)
    )
    whole = sum(float(heads.double().square().sum()) for heads in after)
    return rotation, (off / max(whole, 1e-300)) ** 0.5
