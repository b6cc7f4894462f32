"""Random sample of the heads (channels) of an operator, for operators with too many heads to measure all."""

import torch
from jaxtyping import Int64
from torch import Tensor

from rankwise.errors import ShapeError, whole_number
from rankwise.operators.base import MixingOperator


def sample_channels(operator: MixingOperator, count: int = 16, seed: int = 0) -> Int64[Tensor, " C"]:
    """Return the ascending indices of a random sample of heads, for layers such as Mamba with 1,536 channels.

    The heads are divided into ``count`` ranges whose lengths differ by at most 1, and one head is drawn from
    each range. So the sample is spread evenly over the heads, and all heads have almost the same probability.
    The same seed returns the same heads on every device. If the operator has at most ``count`` heads, all
    heads are returned.

    Cost: O(count); no part of the operator is computed.

    Raises:
        InputError: if ``count`` is less than 1.
        ShapeError: if the operator has no head axis, that is fewer than three axes.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DiagonalMixing
        >>> operator = DiagonalMixing(torch.randn(2, 1536, 5))
        >>> heads = sample_channels(operator, 4)
        >>> [int(head) // 384 for head in heads], tuple(operator[:, heads].shape)
        ([0, 1, 2, 3], (2, 4, 5, 5))
    """
    whole_number("`count` of `sample_channels`", count, fix="Pass 16.")
    if len(operator.shape) < 3:
        raise ShapeError(
            "`sample_channels`",
            expected="an operator of shape (..., H, T, S)",
            got=f"{tuple(operator.shape)}",
            fix="Index it with None to give it an axis of heads.",
        )
    heads = operator.shape[-3]
    if heads <= count:
        return torch.arange(heads)
    edges = torch.arange(count + 1) * heads // count
    draw = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return edges[:-1] + (draw * edges.diff()).long()
