"""Memberships from scores, and back."""

import torch
from torch import Tensor

from rankwise.ops.tssa.cpu.arrays import array, flat
from rankwise.ops.tssa.cpu.head_loops import softmax_rows, softmax_rows_back
from rankwise.ops.tssa.cpu.threads import spread


def uniform(like: Tensor, mask: Tensor | None) -> Tensor:
    """1/H, and 0 where masked.

    Args:
        like: a tensor (B, T, H).
        mask: (B, T) or None.

    Returns:
        (B, T, H).
    """
    out = torch.full_like(like, 1 / like.shape[-1])
    return out if mask is None else out.masked_fill_(~mask[..., None], 0.0)


def memberships(score: Tensor, temperature: Tensor | None, mask: Tensor | None, workers: int) -> Tensor:
    """Softmax over heads of temperature · score, or 1/H without a temperature; 0 where masked.

    Args:
        score: (B, T, H).
        temperature: (H,) or None.
        mask: (B, T) or None.
        workers: threads.

    Returns:
        (B, T, H).
    """
    if temperature is None:
        return uniform(score, mask)
    out = torch.empty_like(score)
    s, tau, m = flat(score, score.dtype), array(temperature, score.dtype), flat(mask, torch.bool)
    to = out.flatten(0, 1).numpy()
    spread(lambda low, high: softmax_rows(s, tau, m, to, low, high), len(s), workers)
    return out


def scores_back(
    given: Tensor, membership: Tensor, score: Tensor, temperature: Tensor | None, workers: int
) -> tuple[Tensor, Tensor]:
    """Gradients of the score and of the temperature from that of Π.

    Args:
        given: gradient of Π, (B, T, H).
        membership: Π.
        score: (B, T, H).
        temperature: (H,) or None.
        workers: threads.

    Returns:
        (B, T, H) and (H,); zeros without a temperature.
    """
    if temperature is None:
        return torch.zeros_like(score), score.new_zeros(score.shape[-1])
    logits = torch.empty_like(score)
    pi, g, to = flat(membership, score.dtype), flat(given, score.dtype), logits.flatten(0, 1).numpy()
    spread(lambda low, high: softmax_rows_back(pi, g, to, low, high), len(pi), workers)
    slope = (logits * score).sum((0, 1))
    return logits.mul_(temperature), slope
