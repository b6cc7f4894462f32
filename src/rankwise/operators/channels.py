"""Which of many channels to look at."""

import torch
from jaxtyping import Int64
from torch import Tensor

from rankwise.errors import InputError, ShapeError
from rankwise.operators.base import MixingOperator


def sampled_channels(operator: MixingOperator, count: int = 16, seed: int = 0) -> Int64[Tensor, " C"]:
    """A sample of the heads of an operator, in order: Mamba has one matrix for each of 1,536 channels.

    The heads are cut into ``count`` runs of the same length (to one), and one head is drawn from each: the
    sample is spread evenly over them, each head has the same chance (to one in the length of a run), and the
    same seed gives the same heads on every device. An operator with no more heads than asked for keeps all.

    Cost: O(count); nothing of the operator is computed.

    Args:
        operator: of shape (..., H, T, S).
        count: how many heads to draw, at least 1.
        seed: of the draw.

    Raises:
        InputError: if ``count`` is less than 1.
        ShapeError: if the operator has no axis of heads.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DiagonalMixing
        >>> operator = DiagonalMixing(torch.randn(2, 1536, 5))
        >>> heads = sampled_channels(operator, 4)
        >>> [int(head) // 384 for head in heads], tuple(operator[:, heads].shape)
        ([0, 1, 2, 3], (2, 4, 5, 5))
    """
    if count < 1:
        raise InputError(
            "`count` of `sampled_channels`", expected="at least 1", got=str(count), fix="Pass 16."
        )
    if len(operator.shape) < 3:
        raise ShapeError(
            "`sampled_channels`",
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
