"""How many real tokens each row or packed sequence has, and where each token stands among them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankwise.ops.token_statistics.checks import check_positions
from rankwise.ops.token_statistics.problem import Problem


def lengths(problem: Problem) -> Int[Tensor, " N"]:
    """How many real tokens each sequence has, int64."""
    mask, bounds, (batch, tokens) = problem.mask, problem.bounds, problem.w.shape[:2]
    if bounds is None:
        return torch.full((batch,), tokens, device=problem.w.device) if mask is None else mask.sum(1)
    if mask is None:
        return bounds.diff()
    return torch.nn.functional.pad(mask.flatten().cumsum(0), (1, 0))[bounds].diff()


def positions(problem: Problem, count: Int[Tensor, " N"] | None) -> Int[Tensor, "B T"]:
    """The position of every token among the real tokens of its sequence, from 0.

    Padding takes no position, so a padded row reads the bias as the row alone would; the number given to a
    padded token means nothing (its result is zero) and lies within the row.

    Args:
        problem: the call.
        count: tokens seen before, or None for none.

    Returns:
        Positions.
    """
    shape, mask, bounds = problem.w.shape[:2], problem.mask, problem.bounds
    index = torch.arange(shape.numel(), device=problem.w.device)
    if bounds is None:
        bounds = torch.arange(0, len(index) + 1, shape[1], device=index.device)
    sequence = torch.searchsorted(bounds, index, right=True) - 1
    ones = torch.ones_like(index) if mask is None else mask.flatten().long()
    upto = torch.nn.functional.pad(ones.cumsum(0), (1, 0))
    within = (upto[1:] - upto[bounds[sequence]] - 1).clamp(min=0)
    return (within if count is None else within + count[sequence]).view(shape)


def offsets(
    bias: Float[Tensor, "H P"], problem: Problem, count: Int[Tensor, " N"] | None
) -> Float[Tensor, "B T H"]:
    """What the learned bias adds to the score of every token: K · bias[h, position].

    Args:
        bias: learned, by head and position; it is added before the sum over the K channels.
        problem: the call.
        count: tokens seen before, or None for none.

    Returns:
        Offsets.

    Raises:
        ShapeError: if the bias ends before a real token. Under torch.compile, which looks at no number,
            indexing fails instead.
    """
    batch, tokens, _, width = problem.w.shape
    mask = problem.mask
    if mask is None and count is None and problem.bounds is None:
        check_positions(bias.shape[1], tokens - 1)
        return (width * bias[:, :tokens].t()).expand(batch, tokens, -1)
    position = positions(problem, count)
    if mask is not None:
        position = position.masked_fill(~mask, 0)
    if not torch.compiler.is_compiling():
        check_positions(bias.shape[1], int(position.max()))
    return width * bias.t()[position]
