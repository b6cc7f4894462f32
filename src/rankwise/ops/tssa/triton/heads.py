"""Memberships from scores, and back, in plain torch: tensors of a width of H, not of w."""

import torch
from torch import Tensor


def memberships(score: Tensor, temperature: Tensor | None, mask: Tensor | None, keep: bool) -> Tensor:
    """Softmax over heads of temperature · score, or 1/H without a temperature; 0 where masked.

    Args:
        score: (B, T, H).
        temperature: (H,) or None.
        mask: (B, T) or None.
        keep: whether scores stay; otherwise memberships take their place.

    Returns:
        (B, T, H), contiguous.
    """
    if temperature is None:
        out = torch.full_like(score, 1 / score.shape[-1])
    else:
        out = score * temperature if keep else score.mul_(temperature)
        out.sub_(out.amax(-1, keepdim=True)).exp_()
        out.div_(out.sum(-1, keepdim=True))
    return out if mask is None else out.masked_fill_(~mask[..., None], 0.0)


def scores_back(
    given: Tensor, membership: Tensor, score: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the score and of the temperature from that of Π.

    Args:
        given: gradient of Π, (B, T, H).
        membership: Π.
        score: (B, T, H).
        temperature: (H,) or None.

    Returns:
        (B, T, H) and (H,); zeros without a temperature.
    """
    if temperature is None:
        return torch.zeros_like(score), score.new_zeros(score.shape[-1])
    logits = membership * (given - (membership * given).sum(-1, keepdim=True))
    return logits * temperature, (logits * score).sum((0, 1))
