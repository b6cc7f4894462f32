"""Rows, packed sequences and padding as one thing: segments of a flat list of tokens."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankwise.ops.tssa.checks import check_positions


def segments(batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Int[Tensor, " N1"]:
    """Where each sequence begins in the flat list of tokens, and where the last one ends.

    Args:
        batch: rows.
        tokens: tokens of a row.
        cu_seqlens: boundaries within one packed row, or None where each row is a sequence.
        device: where the boundaries should lie.

    Returns:
        Boundaries, one more than there are sequences, int64.
    """
    if cu_seqlens is not None:
        return cu_seqlens.to(device=device, dtype=torch.int64)
    return torch.arange(0, batch * tokens + 1, tokens, device=device)


def lengths(
    mask: Bool[Tensor, "B T"] | None, bounds: Int[Tensor, " N1"], count: Int[Tensor, " N"]
) -> Int[Tensor, " N"]:
    """Real tokens of each sequence, those before included.

    Args:
        mask: real tokens, or None for all.
        bounds: from `segments`.
        count: tokens seen before.

    Returns:
        The new numbers.
    """
    if mask is None:
        return count + bounds.diff()
    upto = torch.nn.functional.pad(mask.flatten().cumsum(0), (1, 0))
    return count + upto[bounds].diff()


def positions(
    mask: Bool[Tensor, "B T"] | None,
    bounds: Int[Tensor, " N1"],
    count: Int[Tensor, " N"],
    shape: tuple[int, int],
) -> Int[Tensor, "B T"]:
    """The position of every token among the real tokens of its sequence, from 0.

    Padding takes no position, so a padded row reads the bias as the row alone would; the number given to a
    padded token means nothing (its result is zero) and lies within the row.

    Args:
        mask: real tokens, or None for all.
        bounds: from `segments`.
        count: tokens seen before.
        shape: (B, T).

    Returns:
        Positions.
    """
    total = shape[0] * shape[1]
    index = torch.arange(total, device=bounds.device)
    sequence = torch.searchsorted(bounds, index, right=True) - 1
    ones = torch.ones_like(index) if mask is None else mask.flatten().long()
    upto = torch.nn.functional.pad(ones.cumsum(0), (1, 0))
    within = upto[1:] - upto[bounds[sequence]] - 1
    return (within.clamp(min=0) + count[sequence]).view(shape)


def offsets(
    bias: Float[Tensor, "H P"],
    width: int,
    mask: Bool[Tensor, "B T"] | None,
    bounds: Int[Tensor, " N1"],
    count: Int[Tensor, " N"] | None,
    shape: tuple[int, int],
    packed: bool,
) -> Float[Tensor, "B T H"]:
    """What the learned bias adds to the score of every token: K · bias[h, position].

    Args:
        bias: learned, by head and position.
        width: K; the bias is added before the sum over channels.
        mask: real tokens.
        bounds: from `segments`.
        count: tokens seen before, or None for none.
        shape: (B, T).
        packed: whether the row holds several sequences.

    Returns:
        Offsets.

    Raises:
        ShapeError: if the bias ends before a real token. Under torch.compile, which looks at no number,
            indexing fails instead.
    """
    batch, tokens = shape
    if mask is None and count is None and not packed:
        check_positions(bias.shape[1], tokens - 1)
        return (width * bias[:, :tokens].t()).expand(batch, tokens, -1)
    before = torch.zeros_like(bounds[1:]) if count is None else count
    position = positions(mask, bounds, before, shape)
    if mask is not None:
        position = position.masked_fill(~mask, 0)
    if not torch.compiler.is_compiling():
        check_positions(bias.shape[1], int(position.max()))
    return width * bias.t()[position]
